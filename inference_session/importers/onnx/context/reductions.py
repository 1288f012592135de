"""Reduces a Concat of the context's and the candidates' vectors part by part: sums of fields, as in an FM.

ReduceSum(Concat(u, t)) along the concatenated axis is the context's sum, which is computed once, plus the candidate's;
in a mean, both are weighted by their number of vectors.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from inference_session.importers.onnx.context.work import Work, WorkBuilder
from inference_session.onnx_graphs import attribute, axes_of


def reduce_by_parts(work: Work, node: NodeProto) -> list[NodeProto] | None:
    """Reduce the parts of a Concat one by one."""
    if node.op_type not in ("ReduceSum", "ReduceMean") or node.domain:
        return None
    concat, axes = work.made_by.get(node.input[0]), axes_of(work.graph, node)
    rank = work.rank(node.input[0])
    if concat is None or concat.op_type != "Concat" or concat.domain or axes is None or rank is None:
        return None
    axis = attribute(concat, "axis", 0) % rank
    tiled = [work.tiled(name) for name in concat.input]
    if [item % rank for item in axes] != [axis] or axis == 0 or not any(tiled) or all(tiled):
        return None
    if not work.is_float(node.input[0]) or any(
        (work.sizes(name) or [None] * rank)[axis] is None for name in concat.input
    ):
        return None
    builder = WorkBuilder(work, node.output[0])
    contexts = [source for source in tiled if source]
    candidates = [name for name, source in zip(concat.input, tiled, strict=True) if not source]
    parts = [_reduced(work, builder, node, group, axis) for group in (contexts, candidates)]
    builder.add("Add", [builder.tile(parts[0]), parts[1]], node.output[0])
    return builder.nodes


def _reduced(work: Work, builder: WorkBuilder, node: NodeProto, names: list[str], axis: int) -> str:
    """The share of some of the parts in the sum, or in the mean."""
    value = names[0] if len(names) == 1 else builder.add("Concat", names, axis=axis)
    part = builder.copy(node, [value, *node.input[1:]])
    if node.op_type == "ReduceSum":
        return part
    sizes = [(work.sizes(name) or [None] * (axis + 1))[axis] or 0 for name in (*names, node.input[0])]
    return builder.add("Mul", [part, builder.weight(np.array(sum(sizes[:-1]) / sizes[-1]))])
