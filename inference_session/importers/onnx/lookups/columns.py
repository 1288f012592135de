"""Finds look-ups whose keys are columns of a matrix of keys, so that the session reads them in place."""

from __future__ import annotations

from onnx import GraphProto, NodeProto

from inference_session.importers.onnx.lookups.graph_lookups import (
    KEY_TYPES,
    SHAPE_OPS,
    EditedModel,
    GraphLookup,
    casts_keys,
)
from inference_session.onnx_graphs import attribute, axes_of, constants, integers, producers

Columns = tuple[int, int]
_FAR = 1 << 31


def read_columns(edited: EditedModel, lookups: list[GraphLookup]) -> None:
    """Let look-ups that share a matrix read columns of a model's input [samples, n], where their keys are such columns.

    Only those: the vectors of a look-up without a shared matrix need the shape that the graph gave its keys.
    """
    made_by = producers(edited.graph)
    for lookup in lookups:
        found = _columns_behind(edited, made_by, lookup.keys) if lookup.matrix and not lookup.weights else None
        if found:
            lookup.keys, lookup.columns = found


def _columns_behind(edited: EditedModel, made_by: dict[str, NodeProto], keys: str) -> tuple[str, Columns] | None:
    while keys in made_by and _keeps_order(made_by[keys]):
        keys = made_by[keys].input[0]
    node = made_by.get(keys)
    if node is None:
        return None
    matrix = node.input[0]
    while matrix in made_by and casts_keys(made_by[matrix]):
        matrix = made_by[matrix].input[0]
    dims = edited.types.dims(matrix)
    is_input = any(value.name == matrix for value in edited.graph.input)
    if not is_input or edited.types.elem_type(matrix) not in KEY_TYPES or dims is None or len(dims) != 2:
        return None
    columns = columns_of(edited.graph, node, keys, dims[1]) if isinstance(dims[1], int) else None
    return (matrix, columns) if columns else None


def _keeps_order(node: NodeProto) -> bool:
    return casts_keys(node) or (node.op_type in SHAPE_OPS and not node.domain)


def columns_of(graph: GraphProto, node: NodeProto, output: str, width: int) -> Columns | None:
    """The columns that a node picks out of a matrix of that width, if they are neighbours."""
    found = None
    if node.op_type == "Slice":
        found = _sliced(graph, node, width)
    elif attribute(node, "axis", 0) in (1, -1):
        if node.op_type == "Gather":
            found = _gathered(graph, node, width)
        elif node.op_type == "Split":
            found = _split(graph, node, output, width)
    return found if found is not None and 0 <= found[0] < found[1] <= width else None


def _gathered(graph: GraphProto, node: NodeProto, width: int) -> Columns | None:
    picked = [i + width if i < 0 else i for i in integers(constants(graph).get(node.input[1])) or []]
    if not picked or picked != list(range(picked[0], picked[0] + len(picked))):
        return None
    return picked[0], picked[-1] + 1


def _sliced(graph: GraphProto, node: NodeProto, width: int) -> Columns | None:
    values = constants(graph)
    starts, ends, axes, steps = ([integers(values.get(name)) for name in node.input[1:]] + [None] * 4)[:4]
    if starts is None or ends is None or axes not in ([1], [-1]) or (len(node.input) > 4 and steps != [1]):
        return None
    begin, end = (min(i, width) if i >= 0 else max(i + width, 0) for i in (starts[0], min(ends[0], _FAR)))
    return begin, end


def _split(graph: GraphProto, node: NodeProto, output: str, width: int) -> Columns | None:
    sizes = _split_sizes(graph, node, width)
    at = list(node.output).index(output)
    return (sum(sizes[:at]), sum(sizes[: at + 1])) if sizes else None


def _split_sizes(graph: GraphProto, node: NodeProto, width: int) -> list[int]:
    given = axes_of(graph, node, "split")
    if given is None and len(node.input) < 2:
        size, rest = divmod(width, len(node.output))
        return [size] * len(node.output) if not rest else []
    return given or []
