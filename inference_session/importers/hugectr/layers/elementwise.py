"""Layers that keep the shape: activations, sums and products of equal tensors."""

from __future__ import annotations

from collections.abc import Sequence

from inference_session.importers.hugectr.graph import Layer
from inference_session.importers.hugectr.layers.base import Emitter, LayerBuilder, Tensor, alike, only


def activation(op: str) -> Emitter:
    """A layer that is one ONNX operator without parameters."""

    def emit(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
        x = only(layer, bottoms)
        return [Tensor(build.node(op, x.name), x.dims, x.rows)]

    return emit


def chain(op: str) -> Emitter:
    """Add, multiply … two or more tensors of one shape, from the left."""

    def emit(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
        if len(bottoms) < 2:
            layer.fail(f"needs two or more tensors, found {len(bottoms)}", "bottom")
        first = alike(layer, bottoms)
        name = first.name
        for tensor in bottoms[1:]:
            name = build.node(op, name, tensor.name)
        return [Tensor(name, first.dims, first.rows)]

    return emit


def subtract(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
    """The first minus the second."""
    if len(bottoms) != 2:
        layer.fail(f"needs two tensors, found {len(bottoms)}", "bottom")
    return chain("Sub")(build, layer, bottoms)


def unchanged(_build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
    """Cast does nothing, as all is computed in float32."""
    return [only(layer, bottoms)]


def dropout(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
    """Sets elements to zero by chance while a model is trained; nothing when it serves."""
    x = only(layer, bottoms)
    if not build.is_training:
        return [x]
    rate = layer.number("rate", low=0, default=0.5)
    if rate >= 1.0:
        layer.fail(f"found {rate}; allowed: numbers from 0, and below 1", "rate")
    return [Tensor(build.node("Dropout", x.name, build.scalar(rate)), x.dims, x.rows)]


def elu(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
    """Exponential linear unit: x, and alpha * (exp(x) - 1) below zero."""
    x = only(layer, bottoms)
    alpha = layer.number("elu_param", "alpha")
    return [Tensor(build.node("Elu", x.name, alpha=alpha), x.dims, x.rows)]


def prelu_dice(build: LayerBuilder, layer: Layer, bottoms: Sequence[Tensor]) -> Sequence[Tensor]:
    """Dice: p * x + (1 - p) * alpha * x, p the sigmoid of x normalised over the rows of the batch."""
    x = only(layer, bottoms, rank=2)
    # graph_to_json writes `alpha` and `eps`; construct_from_json reads `elu_alpha`; HugeCTR's own graphs say `epsilon`.
    alpha_name = "elu_alpha" if layer.has("prelu_dice_param", "elu_alpha") else "alpha"
    eps_name = "epsilon" if layer.has("prelu_dice_param", "epsilon") else "eps"
    alpha = layer.number("prelu_dice_param", alpha_name)
    eps = layer.number("prelu_dice_param", eps_name, low=0)
    build.joinable = False
    centred = build.node("Sub", x.name, _mean_of_rows(build, x.name))
    variance = _mean_of_rows(build, build.node("Mul", centred, centred))
    deviation = build.node("Sqrt", build.node("Add", variance, build.scalar(eps)))
    gate = build.node("Sigmoid", build.node("Div", centred, deviation))
    # p + (1 - p) * alpha, as alpha + p * (1 - alpha)
    slope = build.node("Add", build.node("Mul", gate, build.scalar(1.0 - alpha)), build.scalar(alpha))
    return [Tensor(build.node("Mul", x.name, slope), x.dims, x.rows)]


def _mean_of_rows(build: LayerBuilder, source: str) -> str:
    return build.node("ReduceMean", source, axes=[0], keepdims=1)
