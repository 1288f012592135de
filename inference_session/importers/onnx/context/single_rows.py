"""Lets a context's layers round as they do for its repeated rows, also where a request has one context.

ONNX Runtime multiplies a single row, and sums within a single matrix, with other algorithms than several ones, and
these add in another order. With a second row, the result of one context is bitwise that of the repeated context.
"""

from __future__ import annotations

import math

from onnx import NodeProto

from inference_session.importers.onnx.context.work import Work, WorkBuilder
from inference_session.onnx_graphs import attribute, axes_of

_SUMS = frozenset({
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean", "ReduceProd", "ReduceSum",
    "ReduceSumSquare",
})  # fmt: skip


def compute_two_rows(work: Work, node: NodeProto) -> list[NodeProto] | None:
    """Give products and sums of contexts a copy of the first row, and drop its result.

    Look-ups pool none of these sums then: they add rows one after the other, and ONNX Runtime four at a time.
    """
    dims = work.dims(node.input[0]) if node.input and not node.domain else None
    if not dims or dims[0] != work.dims_of_contexts or not work.is_contexts(node.output[0]):
        return None
    return _with_copy(work, node) if _multiplies_single_rows(work, node) or _sums(work, node) else None


def _multiplies_single_rows(work: Work, node: NodeProto) -> bool:
    """Whether a node multiplies one row of each context, or an open number of them, by weights."""
    if node.op_type not in ("MatMul", "Gemm") or attribute(node, "transA", 0):
        return False
    sizes, others = work.sizes(node.input[0]), [name for name in node.input[1:] if name]
    if sizes is None or work.rank(others[0]) != 2 or any(work.is_contexts(name) for name in others):
        return False
    rows = sizes[1:-1]
    return None in rows or math.prod(size or 0 for size in rows) == 1


def _sums(work: Work, node: NodeProto) -> bool:
    """Whether a node adds up something within each context."""
    if node.op_type not in _SUMS:
        return False
    axes, rank = axes_of(work.graph, node), work.rank(node.input[0]) or 1
    return bool(axes) and 0 not in {axis % rank for axis in axes or ()}


def _with_copy(work: Work, node: NodeProto) -> list[NodeProto]:
    builder = WorkBuilder(work, node.output[0])
    zero, one, last = (builder.integers([i]) for i in (0, 1, -1))
    first = builder.add("Slice", [node.input[0], zero, one, zero])
    rows = builder.add("Concat", [node.input[0], first], axis=0)
    both = builder.copy(node, [rows, *node.input[1:]])
    builder.add("Slice", [both, zero, last, zero], node.output[0])
    return builder.nodes
