"""Every dense layer of HugeCTR in float64 NumPy, from its formula. Shares no code with the code that it checks.

A tensor is an array whose first dimension is samples x rows per sample, as HugeCTR sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Take = Callable[..., Array]
"""take(*shape): the next weights of the dense file."""


class Weights:
    """Draws weights on request, and keeps them in the order of the dense file."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        self.taken: list[NDArray[np.float32]] = []
        self.statistics: list[dict[str, Any]] = []

    def take(self, *shape: int) -> Array:
        scale = 1.0 / np.sqrt(shape[0])
        weights = (self._random.normal(size=shape) * scale).astype(np.float32)
        self.taken.append(weights.reshape(-1))
        return weights.astype(np.float64)

    def running(self, width: int) -> tuple[Array, Array]:
        mean = self._random.normal(size=width).astype(np.float32)
        variance = self._random.uniform(0.2, 2.0, size=width).astype(np.float32)
        self.statistics.append({"type": "BatchNorm", "mean": mean.tolist(), "var": variance.tolist()})
        return mean.astype(np.float64), variance.astype(np.float64)

    def file(self) -> bytes:
        """The dense file: all weights, float32, in this order."""
        return np.concatenate([np.empty(0, np.float32), *self.taken]).tobytes()


class SameWeights(Weights):
    """Returns the weights that another source drew, in the same order."""

    def __init__(self, weights: Weights) -> None:
        self._next: Iterator[NDArray[np.float32]] = iter(weights.taken)
        self._next_statistics = iter(weights.statistics)

    def take(self, *shape: int) -> Array:
        return next(self._next).reshape(shape).astype(np.float64)

    def running(self, width: int) -> tuple[Array, Array]:
        found = next(self._next_statistics)
        return np.array(found["mean"]), np.array(found["var"])


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-np.clip(x, -700, 700)))


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def run_layer(layer: Mapping[str, Any], x: Sequence[Array], weights: Weights) -> list[Array]:
    """The tops of a layer."""
    kind = layer["type"]
    if kind in _PLAIN:
        return [_PLAIN[kind](*x)]
    result = _WITH_PARAMETERS[kind](layer, x, weights)
    return result if isinstance(result, list) else [result]


def _product(*x: Array) -> Array:
    return np.prod(np.stack(x), axis=0)


_PLAIN: dict[str, Callable[..., Array]] = {
    "Add": lambda *x: np.sum(np.stack(x), axis=0),
    "Sub": lambda a, b: a - b,
    "ElementwiseMultiply": _product,
    "DotProduct": _product,
    "Dropout": lambda x: x,
    "Cast": lambda x: x,
    "ReLU": lambda x: np.where(x > 0, x, 0.0),
    "Sigmoid": sigmoid,
    "MatrixMultiply": lambda a, b: np.einsum("n...kl,n...lm->n...km", a, b),
    "FusedReshapeConcatGeneral": lambda *x: np.concatenate(x, axis=2).reshape(-1, sum(t.shape[2] for t in x)),
}


def _inner_product(layer: Mapping[str, Any], x: Sequence[Array], weights: Weights) -> Array:
    num_output = layer["fc_param"]["num_output"]
    weight = weights.take(x[0].shape[-1], num_output)
    return x[0] @ weight + weights.take(num_output)


def _fused_inner_product(layer: Mapping[str, Any], x: Sequence[Array], weights: Weights) -> list[Array]:
    y = _inner_product(layer, x, weights)
    y = y if layer.get("activation") == "None" else np.maximum(y, 0.0)
    num_tops = 1 if isinstance(layer["top"], str) else len(layer["top"])
    return [y] * num_tops


def _mlp(layer: Mapping[str, Any], x: Sequence[Array], weights: Weights) -> Array:
    parameters, y = layer["mlp_param"], x[0]
    widths = parameters["num_outputs"]
    activations = parameters.get("activations") or [parameters.get("activation", "Relu")] * len(widths)
    biases = parameters.get("biases") or [parameters.get("use_bias", True)] * len(widths)
    for width, activation, has_bias in zip(widths, activations, biases, strict=True):
        weight, bias = weights.take(y.shape[-1], width), weights.take(width)
        y = y @ weight + bias * has_bias
        y = np.maximum(y, 0.0) if activation == "Relu" else y
    return y


def _multi_cross(layer: Mapping[str, Any], x: Sequence[Array], weights: Weights) -> Array:
    y, projection_dim = x[0], layer["mc_param"].get("projection_dim", 0)
    if projection_dim:
        return _projected_cross(x[0], layer["mc_param"]["num_layers"], projection_dim, weights)
    for _ in range(layer["mc_param"]["num_layers"]):
        weight, bias = weights.take(y.shape[1]), weights.take(y.shape[1])
        y = np.array([x[0][i] * float(y[i] @ weight) + bias + y[i] for i in range(len(y))]).reshape(y.shape)
    return y


def _projected_cross(x: Array, num_layers: int, projection_dim: int, weights: Weights) -> Array:
    y, width = x, x.shape[1]
    for _ in range(num_layers):
        down, up, bias = weights.take(width, projection_dim), weights.take(projection_dim, width), weights.take(width)
        y = x * (y @ (down @ up) + bias) + y
    return y


def _weight_multiply(layer: Mapping[str, Any], x: Sequence[Array], weights: Weights) -> Array:
    slots, width = layer["weight_dims"]
    weight = weights.take(slots, width)
    out = np.empty((len(x[0]), slots * width))
    for i in range(slots):
        for j in range(width):
            out[:, i * width + j] = x[0][:, i] * weight[i, j]
    return out


def _batch_norm(layer: Mapping[str, Any], x: Sequence[Array], weights: Weights) -> Array:
    width = x[0].shape[1]
    gamma, beta = weights.take(width), weights.take(width)
    mean, variance = weights.running(width)
    return gamma * (x[0] - mean) / np.sqrt(variance + layer["bn_param"]["eps"]) + beta


def _layer_norm(layer: Mapping[str, Any], x: Sequence[Array], weights: Weights) -> Array:
    gamma, beta = weights.take(x[0].shape[-1]), weights.take(x[0].shape[-1])
    mean, variance = x[0].mean(axis=-1, keepdims=True), x[0].var(axis=-1, keepdims=True)
    return gamma * (x[0] - mean) / np.sqrt(variance + layer["ln_param"]["eps"]) + beta


def _sequence_mask(layer: Mapping[str, Any], x: Sequence[Array], weights: Weights) -> Array:
    lengths = [[int(value) for value in column[:, 0]] for column in x]
    if len(x) == 1:
        return np.array([[[[float(i < n) for i in range(layer["max_sequence_len"])]]] for n in lengths[0]])
    rows, columns = layer["max_sequence_len_from"], layer["max_sequence_len_to"]
    pairs = zip(*lengths, strict=True)
    return np.array([[[[float(i < m and j < n) for j in range(columns)] for i in range(rows)]] for m, n in pairs])


def _masked(scores: Array, mask: Array) -> Array:
    lowered = scores - 10000.0 * (1.0 - mask)
    powers = np.exp(lowered - lowered.max(axis=-1, keepdims=True))
    return np.asarray(powers / (powers.sum(axis=-1, keepdims=True) + 1e-6))


def _softmax(layer: Mapping[str, Any], x: Sequence[Array], weights: Weights) -> Array:
    return softmax(x[0]) if len(x) == 1 else _masked(x[0] * layer.get("factor", 1.0), x[1])


def _attention(layer: Mapping[str, Any], x: Sequence[Array], weights: Weights) -> list[Array]:
    if len(x) == 2:
        return [np.concatenate(list(np.einsum("nhft,nhtw->hnfw", *x)), axis=-1)]
    heads = layer["num_attention_heads"]
    query, key, value = (np.stack(np.split(tensor, heads, axis=-1), axis=1) for tensor in x[:3])
    scores = np.einsum("nhfw,nhtw->nhft", query, key) / np.sqrt(query.shape[-1])
    if len(x) == 3 and not isinstance(layer["top"], str):
        return [scores, value]
    softened = softmax(scores) if len(x) == 3 else _masked(scores, x[3])
    return _attention(layer, [softened, value], weights)


def _elu(layer: Mapping[str, Any], x: Sequence[Array], weights: Weights) -> Array:
    return np.where(x[0] >= 0, x[0], layer["elu_param"]["alpha"] * np.expm1(np.minimum(x[0], 0.0)))


_DICE_NAMES = (("alpha", "elu_alpha"), ("eps", "epsilon"))


def _prelu_dice(layer: Mapping[str, Any], x: Sequence[Array], weights: Weights) -> Array:
    parameters = layer["prelu_dice_param"]
    mean = x[0].mean(axis=0)
    variance = (x[0] ** 2).mean(axis=0) - mean**2
    alpha, eps = (parameters.get(first, parameters.get(other)) for first, other in _DICE_NAMES)
    p = 1.0 / (1.0 + np.exp((mean - x[0]) / np.sqrt(variance + eps)))
    return np.asarray(p * x[0] + (1.0 - p) * alpha * x[0])


def _reduce(layer: Mapping[str, Any], x: Sequence[Array], weights: Weights) -> Array:
    reduce = np.sum if layer["type"] == "ReduceSum" else np.mean
    return np.asarray(reduce(x[0], axis=layer.get("axis", 1), keepdims=True))


def _reshape(layer: Mapping[str, Any], x: Sequence[Array], weights: Weights) -> Array:
    if "selected" in layer:
        picked = [x[0][:, slot] for slot in layer["selected"]]
        return np.concatenate(picked, axis=1)
    if "shape" in layer:
        return x[0].reshape(layer["shape"])
    if layer.get("time_step", 0):
        return x[0].reshape(-1, layer["time_step"], layer["leading_dim"])
    return x[0].reshape(-1, layer["leading_dim"])


def _slice(layer: Mapping[str, Any], x: Sequence[Array], weights: Weights) -> list[Array]:
    return [x[0][..., begin:end] for begin, end in layer["ranges"]]


def _concat(layer: Mapping[str, Any], x: Sequence[Array], weights: Weights) -> Array:
    return np.concatenate(x, axis=layer.get("axis", -1))


def _scale(layer: Mapping[str, Any], x: Sequence[Array], weights: Weights) -> Array:
    parameters = layer["scale_param"]
    return np.repeat(x[0], int(parameters["factor"]), axis=1 - parameters["axis"])


def _fm_order2(layer: Mapping[str, Any], x: Sequence[Array], weights: Weights) -> Array:
    width = layer["out_dim"]
    slots = [x[0][:, i : i + width] for i in range(0, x[0].shape[1], width)]
    pairs = [a * b for i, a in enumerate(slots) for b in slots[:i]]
    return np.sum([np.zeros((len(x[0]), width)), *pairs], axis=0)


def _interaction(layer: Mapping[str, Any], x: Sequence[Array], weights: Weights) -> Array:
    dense, slots = x
    vectors = [dense, *(slots[:, i] for i in range(slots.shape[1]))]
    products = [(vectors[i] * vectors[j]).sum(axis=1, keepdims=True) for j in range(1, len(vectors)) for i in range(j)]
    return np.concatenate([dense, *products, np.zeros((len(dense), 1))], axis=1)


def _fused_reshape_concat(layer: Mapping[str, Any], x: Sequence[Array], weights: Weights) -> list[Array]:
    joined = np.concatenate(x, axis=2)
    history = np.array([row for sample in joined for row in sample[:-1]]).reshape(-1, joined.shape[2])
    return [history, joined[:, -1]]


_WITH_PARAMETERS: dict[str, Callable[[Mapping[str, Any], Sequence[Array], Weights], Array | list[Array]]] = {
    "InnerProduct": _inner_product,
    "FusedInnerProduct": _fused_inner_product,
    "MLP": _mlp,
    "MultiCross": _multi_cross,
    "WeightMultiply": _weight_multiply,
    "BatchNorm": _batch_norm,
    "LayerNorm": _layer_norm,
    "SequenceMask": _sequence_mask,
    "Softmax": _softmax,
    "MultiHeadAttention": _attention,
    "ELU": _elu,
    "PReLU_Dice": _prelu_dice,
    "ReduceSum": _reduce,
    "ReduceMean": _reduce,
    "Reshape": _reshape,
    "Slice": _slice,
    "Concat": _concat,
    "Scale": _scale,
    "FmOrder2": _fm_order2,
    "Interaction": _interaction,
    "FusedReshapeConcat": _fused_reshape_concat,
}

LOSSES: dict[str, Callable[[Array], Array]] = {
    "BinaryCrossEntropyLoss": sigmoid,
    "MultiCrossEntropyLoss": sigmoid,
    "CrossEntropyLoss": softmax,
}
