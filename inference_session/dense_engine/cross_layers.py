"""DCN-v2's cross layers with fewer passes over their wide values; only rounding differs.

A layer computes y = x0 * (v W + b) + x from v = x V: x0, x and y are wide, v is narrow. On a GPU each sum
and product of wide values takes about as long as the matrix product with W. All x of such layers are x0 * g,
the first with g = 1. So the same numbers are

    v' = v, and a column of ones         narrow
    g' = v' [W; b] + g                   one matrix product, which adds g
    y  = x0 * g'
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper, numpy_helper

from inference_session.dense_engine.parts import names_read

_COLUMNS = 8
"""Added to v, of which one is used: GPUs multiply matrices of such sizes fastest."""
_LEAST_RATIO = 2
"""The least ratio of the widths of x and v: where v is not much narrower, its columns cost what is saved."""


class _Product(NamedTuple):
    """value @ matrix + bias."""

    value: str
    matrix: NDArray[np.float32]
    bias: NDArray[np.float32] | None
    nodes: tuple[NodeProto, ...]


class _Layer(NamedTuple):
    first: str
    """x0"""
    value: str
    """x"""
    narrow: _Product
    wide: _Product
    nodes: tuple[NodeProto, ...]
    """All that it replaces."""


def merge_cross_layers(model: ModelProto) -> int:
    """Rewrite the cross layers of a network in place; returns how many there were."""
    graph = _Graph(model)
    factors: dict[str, tuple[str, str]] = {}
    """x0 and g, by their product."""
    written: list[NodeProto] = []
    replaced: set[int] = set()
    for node in model.graph.node:
        written.append(node)
        layer = graph.layer_ending_with(node)
        if layer is None:
            continue
        first, before = factors.get(layer.value, ("", ""))
        if layer.value == layer.first:
            before = ""
        elif first != layer.first:
            continue
        factors[node.output[0]] = layer.first, f"{node.output[0]}/factor"
        replaced.update(map(id, layer.nodes))
        written += graph.merged(layer, node.output[0], before)
    kept = [node for node in written if id(node) not in replaced]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return len(factors)


class _Graph:
    """A network, and where its values come from."""

    def __init__(self, model: ModelProto) -> None:
        self._graph = model.graph
        self._makers = {name: node for node in model.graph.node for name in node.output}
        self._uses = Counter(name for node in model.graph.node for name in names_read(node))
        self._uses.update(value.name for value in model.graph.output)
        given = {value.name for value in model.graph.input}
        self._constants = {t.name: t for t in model.graph.initializer if t.name not in given}
        inferred = onnx.shape_inference.infer_shapes(model).graph
        self._matrices = {
            value.name
            for value in (*inferred.input, *inferred.value_info)
            if len(value.type.tensor_type.shape.dim) == 2
        }

    def layer_ending_with(self, node: NodeProto) -> _Layer | None:
        """The layer whose y the node computes."""
        for product, value in self._operands(node, "Add"):
            for first, sum_name in self._operands(self._only(product), "Mul"):
                wide = self._product(sum_name)
                narrow = None if wide is None or wide.bias is None else self._product(wide.value)
                if wide is None or narrow is None or narrow.bias is not None or narrow.value != value:
                    continue
                rank, width = wide.matrix.shape
                fits = narrow.matrix.shape == (width, rank) and wide.bias.shape == (width,)  # type: ignore[union-attr]
                if fits and value in self._matrices and rank * _LEAST_RATIO <= width:
                    nodes = (node, self._makers[product], *wide.nodes, *narrow.nodes)
                    return _Layer(first, value, narrow, wide, nodes)
        return None

    def merged(self, layer: _Layer, name: str, before: str) -> list[NodeProto]:
        """The nodes that compute `name` instead; `before`: the g that is added, empty for 1."""
        rank = layer.wide.matrix.shape[0]
        ones = np.zeros(rank + _COLUMNS, np.float32)
        ones[rank] = 1
        narrow = np.pad(layer.narrow.matrix, ((0, 0), (0, _COLUMNS)))
        wide = np.pad(layer.wide.matrix, ((0, _COLUMNS), (0, 0)))
        wide[rank] = layer.wide.bias if before else layer.wide.bias + np.float32(1)
        names = [f"{name}/{part}" for part in ("narrow_matrix", "ones", "wide_matrix", "narrow", "factor")]
        arrays = zip(names, (narrow, ones, wide), strict=False)
        self._graph.initializer.extend(numpy_helper.from_array(array, own) for own, array in arrays)
        return [
            helper.make_node("Gemm", [layer.value, *names[:2]], [names[3]]),
            helper.make_node("Gemm", [names[3], names[2], *([before] if before else [])], [names[4]]),
            helper.make_node("Mul", [layer.first, names[4]], [name]),
        ]

    def _only(self, name: str) -> NodeProto | None:
        """The node that computes a value that one node uses."""
        return self._makers.get(name) if self._uses[name] == 1 else None

    def _operands(self, node: NodeProto | None, op_type: str) -> Iterator[tuple[str, str]]:
        """Both orders of the operands of a sum or product."""
        if node is not None and node.op_type == op_type and not node.domain:
            left, right = node.input
            yield left, right
            yield right, left

    def _product(self, name: str) -> _Product | None:
        """The product that a value is, one that nothing else uses."""
        node = self._only(name)
        for summed, bias_name in self._operands(node, "Add"):
            bias, product = self._constant(bias_name, 1), self._product(summed)
            if bias is not None and product is not None and product.bias is None and node is not None:
                return product._replace(bias=bias, nodes=(node, *product.nodes))
        if node is None or node.op_type not in {"MatMul", "Gemm"} or node.domain:
            return None
        settings = {item.name: helper.get_attribute_value(item) for item in node.attribute}
        is_transposed = settings.pop("transB", 0)
        matrix = self._constant(node.input[1], 2)
        has_bias = len(node.input) > 2 and node.input[2]
        bias = self._constant(node.input[2], 1) if has_bias else None
        if matrix is None or (has_bias and bias is None) or any(settings.get(n, 1) != 1 for n in ("alpha", "beta")):
            return None
        if settings.get("transA", 0):
            return None
        return _Product(node.input[0], matrix.T if is_transposed else matrix, bias, (node,))

    def _constant(self, name: str, rank: int) -> NDArray[np.float32] | None:
        tensor = self._constants.get(name)
        if tensor is None or len(tensor.dims) != rank or tensor.data_type != onnx.TensorProto.FLOAT:
            return None
        return numpy_helper.to_array(tensor)
