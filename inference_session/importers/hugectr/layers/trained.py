"""Layers with weights, which are taken from the dense file in the order written here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inference_session.importers.hugectr.graph import Layer
from inference_session.importers.hugectr.json_file import shown
from inference_session.importers.hugectr.layers.base import LayerBuilder, Tensor, only, require_rank


def inner_product(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
    """Fully connected: x @ weight [in, out] + bias [out], over the last dimension."""
    return [_fully_connected(build, layer, only(layer, bottoms))]


def fused_inner_product(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
    """Fully connected with its ReLU; `activation` "None" leaves the ReLU out.

    In a chain by `position` it has three further tops and bottoms that only training reads; they repeat the first.
    """
    if not bottoms:
        layer.fail("needs a tensor, found none", "bottom")
    activation = layer.parameters.get("activation", "Relu")
    if activation not in ("Relu", "None"):
        layer.refuse(f"activation {activation!r} is not supported")
    result = _fully_connected(build, layer, bottoms[0])
    if activation == "Relu":
        result = Tensor(build.node("Relu", result.name), result.dims, result.rows)
    return [result] * len(layer.tops)


def _fully_connected(build: LayerBuilder, layer: Layer, x: Tensor) -> Tensor:
    num_inputs, num_outputs = x.dims[-1], layer.whole("fc_param", "num_output")
    weight = build.parameter(layer, "weight", num_inputs, num_outputs)
    bias = build.parameter(layer, "bias", num_outputs)
    if len(x.dims) == 1:
        name = build.node("Gemm", x.name, weight, bias)
    else:
        name = build.node("Add", build.node("MatMul", x.name, weight), bias)
    return Tensor(name, (*x.dims[:-1], num_outputs), x.rows)


def mlp(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
    """Fully connected layers, each with its ReLU or without. The file has a bias also where a layer uses none.

    A second bottom, of `Interaction`, is read by training only.
    """
    if not bottoms:
        layer.fail("needs a tensor, found none", "bottom")
    x = bottoms[0]
    require_rank(layer, x, 2)
    widths = layer.wholes("mlp_param", "num_outputs", low=1)
    if not widths:
        layer.fail("at least one layer is required", "mlp_param", "num_outputs")
    activations = _by_layer(layer, len(widths), "activation", "activations", ("Relu", "None"))
    biases = _by_layer(layer, len(widths), "use_bias", "biases", (True, False))
    name, num_inputs = x.name, x.dims[0]
    for width, activation, has_bias in zip(widths, activations, biases, strict=True):
        weight = build.parameter(layer, "weight", num_inputs, width)
        bias = build.parameter(layer, "bias", width)
        name = build.node("Gemm", name, weight, bias, **({} if has_bias else {"beta": 0.0}))
        name, num_inputs = build.node("Relu", name) if activation == "Relu" else name, width
    return [Tensor(name, (num_inputs,), x.rows)]


def _by_layer(layer: Layer, count: int, one: str, each: str, allowed: Sequence[Any]) -> list[Any]:
    """A parameter of each layer of an MLP: `each` lists them, or `one` holds for all; the first allowed by default."""
    parameters = layer.parameters["mlp_param"]
    found = parameters.get(each) or [parameters.get(one, allowed[0])] * count
    if not isinstance(found, list) or len(found) != count:
        layer.fail(f"found {shown(found)}; a list of {count} is required", "mlp_param", each)
    if wrong := [value for value in found if type(value) is not type(allowed[0]) or value not in allowed]:
        layer.refuse(f"{one} {shown(wrong[0])} is not supported; allowed: {', '.join(map(repr, allowed))}")
    return found


def multi_cross(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
    """The cross network of DCN v1: x[l+1] = x[0] * (x[l] . w[l]) + b[l] + x[l].

    With `projection_dim`, that of DCN v2: x[l+1] = x[0] * (x[l] @ u[l] @ v[l] + b[l]) + x[l].
    """
    x = only(layer, bottoms, rank=2)
    cross = _cross_projected if layer.whole("mc_param", "projection_dim", low=0, default=0) else _cross
    name = x.name
    for _ in range(layer.whole("mc_param", "num_layers")):
        name = build.node("Add", cross(build, layer, x, name), name)
    return [Tensor(name, x.dims, x.rows)]


def _cross(build: LayerBuilder, layer: Layer, x: Tensor, name: str) -> str:
    width = x.dims[0]
    weight = build.parameter(layer, "weight", width, 1)
    bias = build.parameter(layer, "bias", width)
    return build.node("Add", build.node("Mul", x.name, build.node("MatMul", name, weight)), bias)


def _cross_projected(build: LayerBuilder, layer: Layer, x: Tensor, name: str) -> str:
    width, projection_dim = x.dims[0], layer.whole("mc_param", "projection_dim")
    down = build.parameter(layer, "weight", width, projection_dim)
    up = build.parameter(layer, "weight", projection_dim, width)
    bias = build.parameter(layer, "bias", width)
    return build.node("Mul", x.name, build.node("Gemm", build.node("MatMul", name, down), up, bias))


def weight_multiply(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
    """Every element becomes a vector: out[i * v + j] = x[i] * weight[i, j]."""
    x = only(layer, bottoms, rank=2)
    dims = layer.wholes("weight_dims")
    if len(dims) != 2 or dims[0] != x.dims[0] or dims[1] < 1:
        layer.fail(
            f"found {list(dims)}; expected two numbers, the first of which is the tensor's width {x.dims[0]}",
            "weight_dims",
        )
    slots, width = dims
    weight = build.parameter(layer, "weight", slots, width)
    product = build.node("Mul", build.reshape(x.name, slots, 1), weight)
    return [Tensor(build.reshape(product, slots * width), (slots * width,), x.rows)]


def batch_norm(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
    """Normalise by the running statistics: gamma * (x - mean) / sqrt(var + eps) + beta."""
    x = only(layer, bottoms)
    require_rank(layer, x, 2)
    width = x.dims[0]
    gamma = build.parameter(layer, "gamma", width)
    beta = build.parameter(layer, "beta", width)
    mean, variance = build.running_statistics(layer, width)
    eps = layer.number("bn_param", "eps", low=0, default=1e-5)
    # The share of the running statistics that stays after a step of training.
    kept = {"momentum": 1.0 - layer.number("bn_param", "factor", default=1.0)} if build.is_training else {}
    name = build.node("BatchNormalization", x.name, gamma, beta, mean, variance, epsilon=eps, **kept)
    return [Tensor(name, x.dims, x.rows)]


def layer_norm(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
    """Normalise each row by its own statistics: gamma * (x - mean) / sqrt(var + eps) + beta."""
    x = only(layer, bottoms)
    gamma = build.parameter(layer, "gamma", x.dims[-1])
    beta = build.parameter(layer, "beta", x.dims[-1])
    eps = layer.number("ln_param", "eps", low=0, default=1e-5)
    return [Tensor(build.node("LayerNormalization", x.name, gamma, beta, axis=-1, epsilon=eps), x.dims, x.rows)]
