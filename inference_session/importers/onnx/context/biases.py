"""Lets products of large values add their biases themselves, instead of in a separate pass over the result.

f(x W1 + b1) W2 + b2 is f(x [W1 0] + [b1 1]) [W2; b2 / f(1)]: a column that is always f(1) carries the bias of the next
layer. The first layer's bias is part of what is computed once per context (columns.py). Layers behind an attention over
a history have many rows and few columns, so that a pass over them takes a third of the product's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from inference_session.importers.onnx.context.work import Work, WorkBuilder
from inference_session.importers.onnx.evaluation import reference_values
from inference_session.onnx_graphs import UNARY

_MIN_RANK = 3
_MIN_CARRIED = 0.1


@dataclass
class _Layer:
    """A product with weights, the Add behind it, and what follows one by one."""

    product: NodeProto
    add: NodeProto
    bias: NDArray[np.generic]
    activations: list[NodeProto]

    @property
    def output(self) -> str:
        """After the activations."""
        return str((self.activations or [self.add])[-1].output[0])


def carry_biases(work: Work) -> None:
    """Carry biases in columns of the products before them."""
    readers: dict[str, list[NodeProto]] = {}
    for node in work.graph.node:
        for name in dict.fromkeys(node.input):
            readers.setdefault(name, []).append(node)
    layers = [layer for node in work.graph.node if (layer := _layer(work, node, readers))]
    behind = {layer.output: layer for layer in layers if work.uses.get(layer.output) == 1}
    carried: dict[str, float] = {}
    for layer in layers:
        before = behind.get(layer.product.input[0])
        value = _value_of_one(work, before.activations) if before else None
        if value is not None:
            carried[layer.product.input[0]] = value
    positions = {node.output[0]: i for i, node in enumerate(work.graph.node)}
    replaced: dict[int, list[NodeProto]] = {}
    for layer in layers:
        for node, nodes in _rewritten(work, layer, carried):
            replaced[positions[node.output[0]]] = nodes
    work.replace(replaced)


def _layer(work: Work, product: NodeProto, readers: dict[str, list[NodeProto]]) -> _Layer | None:
    add = _only(work, product, readers)
    if product.op_type != "MatMul" or product.domain or add is None or add.op_type != "Add" or add.domain:
        return None
    weights, rank = work.constant(product.input[1]), work.rank(product.input[0]) or 0
    if weights is None or weights.ndim != 2 or weights.dtype != np.float32 or rank < _MIN_RANK:
        return None
    (name,) = [name for name in add.input if name != product.output[0]] or [""]
    bias = work.constant(name)
    if bias is None or bias.shape != weights.shape[1:] or work.is_contexts(add.output[0]):
        return None
    activations: list[NodeProto] = []
    node = _only(work, add, readers)
    while node is not None and node.op_type in UNARY and not node.domain and len(node.input) == 1:
        activations.append(node)
        node = _only(work, node, readers)
    return _Layer(product, add, bias, activations)


def _only(work: Work, node: NodeProto, readers: dict[str, list[NodeProto]]) -> NodeProto | None:
    """The only reader of what a node makes."""
    found = readers.get(node.output[0], [])
    return found[0] if len(found) == 1 and work.uses.get(node.output[0]) == 1 else None


def _value_of_one(work: Work, activations: Sequence[NodeProto]) -> float | None:
    """The result of the activations for 1; None where it cannot carry a bias."""
    if not activations:
        return 1.0
    feeds = {activations[0].input[0]: np.ones(1, np.float32)}
    found = reference_values(activations, [activations[-1].output[0]], feeds, work.model)
    value = float(found[0].ravel()[0]) if found and found[0].dtype == np.float32 else 0.0
    return value if abs(value) > _MIN_CARRIED else None


def _rewritten(work: Work, layer: _Layer, carried: dict[str, float]) -> list[tuple[NodeProto, list[NodeProto]]]:
    """The nodes that take the places of a layer's product and Add."""
    given, hands_on = carried.get(layer.product.input[0]), layer.output in carried
    if given is None and not hands_on:
        return []
    weights, bias = work.constant(layer.product.input[1]), layer.bias
    if weights is None:
        return []
    if hands_on:
        weights, bias = np.pad(weights, ((0, 0), (0, 1))), np.append(bias, np.float32(1))
    builder = WorkBuilder(work, layer.add.output[0])
    if given is not None:
        whole = np.concatenate([weights, bias[None] / np.float32(given)])
        builder.add("MatMul", [layer.product.input[0], builder.weight(whole)], layer.add.output[0])
        return [(layer.product, []), (layer.add, builder.nodes)]
    product = builder.add("MatMul", [layer.product.input[0], builder.weight(weights)])
    builder.add("Add", [product, builder.weight(bias)], layer.add.output[0])
    return [(layer.product, []), (layer.add, builder.nodes)]
