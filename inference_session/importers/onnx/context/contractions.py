"""Writes sums of products of a candidate's and its context's values as products of matrices.

ReduceSum(h * t) over the last axis is t times the transposed h, and ReduceSum(h * scores) over the history is the
scores times h: written as MatMul, neither repeats the history for every candidate (products.py).
"""

from __future__ import annotations

from onnx import NodeProto

from inference_session.importers.onnx.context.work import Builder, Work
from inference_session.importers.onnx.graph import attribute, axes_of

_SWAPPED = [0, 2, 1]


def contract_sums(work: Work) -> None:
    """Change the graph."""
    work.replace_each(_contract)


def _contract(work: Work, node: NodeProto) -> list[NodeProto] | None:
    if node.op_type != "ReduceSum" or node.domain:
        return None
    product = work.made_by.get(node.input[0])
    if product is None or product.op_type != "Mul" or product.domain or work.uses.get(product.output[0]) != 1:
        return None
    axes = axes_of(work.graph, node) or []
    axis = axes[0] % 3 if len(axes) == 1 and work.rank(product.output[0]) == 3 else None
    for name, other in (product.input, reversed(product.input)):
        source = work.tiled(name)
        if source is not None and work.all_dims(name) == work.all_dims(product.output[0]) and axis:
            return _as_product(work, node, source, other, axis)
    return None


def _as_product(work: Work, node: NodeProto, source: str, other: str, axis: int) -> list[NodeProto] | None:
    """The product of a candidate's row and its context's matrix; None where the other factor is no such row."""
    sizes = work.sizes(other)
    if sizes is None or len(sizes) != 3 or sizes[3 - axis] != 1 or sizes[axis] == 1:
        return None
    builder, keeps = Builder(work, node.output[0]), attribute(node, "keepdims", 1)
    if axis == 1:
        row = builder.add("Transpose", [other], perm=_SWAPPED)
        matrix = builder.tile(source)
        output = node.output[0] if keeps else None
        total = builder.add("MatMul", [row, matrix], output)
    else:
        matrix = builder.tile(builder.add("Transpose", [source], perm=_SWAPPED))
        total = builder.add("MatMul", [other, matrix])
        if keeps:
            builder.add("Transpose", [total], node.output[0], perm=_SWAPPED)
    if not keeps:
        builder.add("Flatten", [total], node.output[0], axis=1)
    return builder.nodes
