"""DCN-v2's cross layers with fewer passes over their wide values; only rounding differs.

A layer computes y = x0 * (v W + b) + x from v = x V: x0, x and y are wide, v is narrow. On a GPU each sum
and product of wide values takes about as long as the matrix product with W. All x of such layers are x0 * g,
the first with g = 1. So the same numbers are

    v' = v, and a column of ones         narrow
    g' = v' [W; b] + g                   one matrix product, which adds g
    y  = x0 * g'
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper

from inference_session.dense_engine.rewrites.products import Product, Products, operands

_COLUMNS = 8
"""Added to v, of which one is used: GPUs multiply matrices of such sizes fastest."""
_LEAST_RATIO = 2
"""The least ratio of the widths of x and v: where v is not much narrower, its columns cost what is saved."""


class _Layer(NamedTuple):
    first: str
    """x0"""
    value: str
    """x"""
    narrow: Product
    wide: Product
    nodes: tuple[NodeProto, ...]
    """All that it replaces."""


def merge_cross_layers(model: ModelProto) -> int:
    """Rewrite the cross layers of a network in place; returns how many there were."""
    products, matrices = Products(model), _matrices(model)
    factors: dict[str, tuple[str, str]] = {}
    """x0 and g, by their product."""
    written: list[NodeProto] = []
    replaced: set[int] = set()
    for node in model.graph.node:
        written.append(node)
        layer = _layer_ending_with(node, products, matrices)
        if layer is None:
            continue
        first, before = factors.get(layer.value, ("", ""))
        if layer.value == layer.first:
            before = ""
        elif first != layer.first:
            continue
        nodes = _merged(layer, node.output[0], before, products)
        factors[node.output[0]] = layer.first, nodes[1].output[0]
        replaced.update(map(id, layer.nodes))
        written += nodes
    kept = [node for node in written if id(node) not in replaced]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return len(factors)


def _matrices(model: ModelProto) -> set[str]:
    """The values that have two dimensions."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    values = (*graph.input, *graph.value_info)
    return {value.name for value in values if len(value.type.tensor_type.shape.dim) == 2}


def _layer_ending_with(node: NodeProto, products: Products, matrices: set[str]) -> _Layer | None:
    """The layer whose y the node computes."""
    for crossed, value in operands(node, "Add"):
        times = products.maker(crossed)
        for first, sum_name in operands(times, "Mul"):
            wide = products.product(sum_name)
            narrow = None if wide is None or wide.bias is None else products.product(wide.value)
            if wide is None or narrow is None or narrow.bias is not None or narrow.value != value or times is None:
                continue
            rank, width = wide.matrix.shape
            fits = narrow.matrix.shape == (width, rank) and wide.bias.shape == (width,)  # type: ignore[union-attr]
            if fits and value in matrices and rank * _LEAST_RATIO <= width:
                return _Layer(first, value, narrow, wide, (node, times, *wide.nodes, *narrow.nodes))
    return None


def _merged(layer: _Layer, name: str, before: str, products: Products) -> list[NodeProto]:
    """The nodes that compute `name` instead, the second one g'; `before`: the g that is added, empty for 1."""
    rank = layer.wide.matrix.shape[0]
    ones = np.zeros(rank + _COLUMNS, np.float32)
    ones[rank] = 1
    narrow = np.pad(layer.narrow.matrix, ((0, 0), (0, _COLUMNS)))
    wide = np.pad(layer.wide.matrix, ((0, _COLUMNS), (0, 0)))
    wide[rank] = layer.wide.bias if before else layer.wide.bias + np.float32(1)
    constants = {"narrow_matrix": narrow, "ones": ones, "wide_matrix": wide}
    first, second, third = (products.add_constant(f"{name}/{part}", array) for part, array in constants.items())
    names = [products.names.fresh(f"{name}/{part}") for part in ("narrow", "factor")]
    return [
        helper.make_node("Gemm", [layer.value, first, second], names[:1]),
        helper.make_node("Gemm", [names[0], third, *([before] if before else [])], names[1:]),
        helper.make_node("Mul", [layer.first, names[1]], [name]),
    ]
