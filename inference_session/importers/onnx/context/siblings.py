"""Multiplies rows that have one matrix in common at once, as the gates of several tasks over the same experts.

A candidate's row times its matrix is a small product for each candidate, whose cost is that of beginning it: two rows
below each other take as long as one.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx import NodeProto

from inference_session.importers.onnx.context.work import Work, WorkBuilder
from inference_session.onnx_graphs import reads, set_nodes, sort_nodes


def multiply_siblings(work: Work) -> None:
    """Multiply rows that share a matrix in one product."""
    groups: dict[tuple[str, tuple[int, ...]], list[NodeProto]] = {}
    for node in work.graph.node:
        if _is_row_times_matrix(work, node):
            groups.setdefault((node.input[1], work.dims(node.input[0]) or ()), []).append(node)
    changed = False
    for group in groups.values():
        members = _independent(work, group)
        if len(members) > 1:
            _join(work, members)
            changed = True
    if changed:
        work.drop_unused()


def _is_row_times_matrix(work: Work, node: NodeProto) -> bool:
    """Whether each candidate has a row, and a matrix that no context gives."""
    if node.op_type != "MatMul" or node.domain or not work.is_float(node.output[0]):
        return False
    row, matrix = (work.dims(name) for name in node.input)
    return (
        row is not None
        and matrix is not None
        and len(row) == len(matrix) == 3
        and row[1] == 1
        and row[0] == matrix[0] == work.dims_of_rows
        and work.tiled(node.input[0]) is None
        and work.tiled(node.input[1]) is None
    )


def _independent(work: Work, group: Sequence[NodeProto]) -> list[NodeProto]:
    """The first products of a group of which none depends on another."""
    members: list[NodeProto] = []
    for node in group:
        if not any(_depends(work, node.input[0], other.output[0]) for other in members):
            members.append(node)
    return members


def _depends(work: Work, value: str, on: str) -> bool:
    waiting, seen = [value], set[str]()
    while waiting:
        name = waiting.pop()
        if name == on:
            return True
        if name not in seen and name in work.made_by:
            seen.add(name)
            waiting += reads(work.made_by[name])
    return False


def _join(work: Work, members: Sequence[NodeProto]) -> None:
    """One product in the place of several. What reads one of them may stand before another, so nodes are sorted."""
    builder = WorkBuilder(work, members[0].output[0])
    rows = builder.add("Concat", [node.input[0] for node in members], axis=1)
    product = builder.add("MatMul", [rows, members[0].input[1]])
    for i, node in enumerate(members):
        builder.add("Slice", [product, *map(builder.integers, ([i], [i + 1], [1]))], node.output[0])
    gone = {node.output[0] for node in members}
    nodes = [*(node for node in work.graph.node if node.output[0] not in gone), *builder.nodes]
    set_nodes(work.graph, nodes)
    sort_nodes(work.graph)
    work.refresh()
