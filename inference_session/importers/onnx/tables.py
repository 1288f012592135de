"""Which initializers are embedding tables: those that the graph only ever reads by rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from onnx import GraphProto, NodeProto, TensorProto

from inference_session.importers.onnx.canonical import FLOAT_TYPES
from inference_session.importers.onnx.weights import Weight
from inference_session.model_spec import VectorType
from inference_session.onnx_graphs import (
    Names,
    NodeBuilder,
    all_graphs,
    all_nodes,
    attribute,
    make_node,
    replace_node,
    set_nodes,
    use_counts,
)

VECTOR_TYPES: dict[int, VectorType] = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "float32",
}
"""How tables of these types are stored. Each bfloat16 is a float32 whose low 16 bits are 0."""


_OTHER_ROW_READS = ("GatherND", "GatherElements")
"""Operators that read rows in ways that no look-up of ours does."""


class StaysDenseError(Exception):
    """A table turns out not to be one; the importer then begins again without it. Never leaves the importer."""

    def __init__(self, table: str, reason: str) -> None:
        super().__init__(table, reason)
        self.table = table
        self.reason = reason


@dataclass
class _Uses:
    by_rows: bool = False
    otherwise: str | None = None


@dataclass
class TableSearch:
    """What was found among a model's initializers."""

    tables: list[str] = field(default_factory=list)
    dense: dict[str, str] = field(default_factory=dict)
    """Why those that are read by rows are no tables nevertheless."""


def find_tables(graph: GraphProto, weights: dict[str, Weight], min_rows: int) -> TableSearch:
    """Sort the initializers that are read by rows into tables and others."""
    uses = _uses(graph, weights)
    search = TableSearch()
    for name, weight in weights.items():
        if not uses[name].by_rows:
            continue
        reason = _obstacle(weight, min_rows) or uses[name].otherwise
        if reason:
            search.dense[name] = reason
        else:
            search.tables.append(name)
    return search


def _obstacle(weight: Weight, min_rows: int) -> str | None:
    if weight.dims[0] < min_rows:
        return f"has {weight.dims[0]} rows, fewer than {min_rows}"
    if weight.elem_type not in VECTOR_TYPES:
        kind = TensorProto.DataType.Name(weight.elem_type).lower()
        return f"holds {kind}; tables hold float32, float16 or bfloat16"
    if 0 in weight.dims:
        return f"is empty, of shape {list(weight.dims)}"
    return None


def _uses(graph: GraphProto, weights: dict[str, Weight]) -> dict[str, _Uses]:
    uses = {name: _Uses() for name in weights}
    aliases = copies_of_tables(graph, set(weights))
    read_by_rows = {node.input[0] for node in all_nodes(graph) if is_row_read(node)}
    for node in all_nodes(graph):
        for position, name in enumerate(node.input):
            table = aliases.get(name)
            if table is None or _is_alias(node, aliases):
                continue
            if is_row_read(node) and position == 0:
                uses[table].by_rows = True
            elif node.op_type not in ("Shape", "Size"):
                _count_other_read(uses[table], node, is_first=position == 0, read_by_rows=read_by_rows)
    for scope in all_graphs(graph):
        for value in scope.output:
            if value.name in aliases:
                uses[aliases[value.name]].otherwise = f"is an output of a graph, {value.name!r}"
    return uses


def _count_other_read(uses: _Uses, node: NodeProto, *, is_first: bool, read_by_rows: set[str]) -> None:
    reader = f"{node.op_type} {node.name or node.output[0]!r}"
    if is_first and node.op_type in _OTHER_ROW_READS:
        uses.by_rows, uses.otherwise = True, f"is read by {reader}, which is not a Gather"
    else:
        uses.otherwise = f"is read completely by {reader}"
        # Rows of a value computed from it are read, as of a quantized table: users regard it as a table.
        uses.by_rows |= is_first and node.output[0] in read_by_rows


def is_row_read(node: NodeProto) -> bool:
    """Whether a node reads its first input by rows."""
    return node.op_type == "Gather" and not node.domain and attribute(node, "axis", 0) == 0


def _is_alias(node: NodeProto, aliases: dict[str, str]) -> bool:
    return node.op_type in ("Identity", "Cast") and aliases.get(node.output[0]) == aliases.get(node.input[0])


def copies_of_tables(graph: GraphProto, tables: set[str]) -> dict[str, str]:
    """The tables by their names, and by those of their copies in another float type."""
    aliases = {name: name for name in tables}
    for scope in all_graphs(graph):
        for node in scope.node:
            copies = node.op_type == "Identity" or (node.op_type == "Cast" and attribute(node, "to", 0) in FLOAT_TYPES)
            if copies and node.input[0] in aliases:
                aliases[node.output[0]] = aliases[node.input[0]]
    return aliases


def read_directly(graph: GraphProto, weights: dict[str, Weight], tables: list[str], names: Names) -> None:
    """Let every row read of a table name the table itself: a cast of the whole becomes one of the rows read.

    Shape nodes of a table become constants.
    """
    aliases = copies_of_tables(graph, set(tables))
    casts = {name: _casts_to(graph, name) for name in aliases}
    for scope in all_graphs(graph):
        nodes: list[NodeProto] = []
        for node in scope.node:
            table = aliases.get(node.input[0]) if node.input else None
            if table and node.op_type in ("Shape", "Size"):
                builder = NodeBuilder(graph, names, node.output[0])
                builder.add("Identity", [builder.integers(_shape(node, weights[table].dims))], node.output[0])
                nodes += builder.nodes
            elif table and is_row_read(node):
                nodes += _row_read(node, table, casts[node.input[0]], names)
            else:
                nodes.append(node)
        set_nodes(scope, nodes)
    _drop_unread(graph, set(aliases) - set(tables))


def ask_keys_for_shapes(graph: GraphProto, weights: dict[str, Weight], tables: list[str], names: Names) -> None:
    """Compute the shape of looked-up vectors from their keys and the row, without the vectors."""
    for scope in all_graphs(graph):
        gathers = {node.output[0]: node for node in scope.node if is_row_read(node) and node.input[0] in tables}
        for node in list(scope.node):
            if node.op_type != "Shape" or node.input[0] not in gathers or node.attribute:
                continue
            table, keys = gathers[node.input[0]].input
            builder = NodeBuilder(graph, names, node.output[0])
            row = builder.integers(weights[table].dims[1:])
            builder.add("Concat", [builder.add("Shape", [keys]), row], node.output[0], axis=0)
            replace_node(scope, node, builder.nodes)


def _casts_to(graph: GraphProto, alias: str) -> list[int]:
    """The types that a table is cast to, one after the other, to become this alias."""
    made_by = {node.output[0]: node for node in all_nodes(graph) if node.op_type in ("Identity", "Cast")}
    casts: list[int] = []
    while alias in made_by:
        node = made_by[alias]
        if node.op_type == "Cast":
            casts.insert(0, attribute(node, "to", 0))
        alias = node.input[0]
    return casts


def _row_read(node: NodeProto, table: str, casts: list[int], names: Names) -> list[NodeProto]:
    values = [names.fresh(f"{node.output[0]}_rows") for _ in casts] + [node.output[0]]
    node.input[0], node.output[0] = table, values[0]
    return [node] + [
        make_node("Cast", [source], target, to=to)
        for to, source, target in zip(casts, values, values[1:], strict=False)
    ]


def _shape(node: NodeProto, dims: tuple[int, ...]) -> int | list[int]:
    if node.op_type == "Size":
        return math.prod(dims)
    return list(dims[slice(attribute(node, "start", 0), attribute(node, "end", len(dims)))])


def _drop_unread(graph: GraphProto, values: set[str]) -> None:
    counts = use_counts(graph)
    for scope in all_graphs(graph):
        while unread := {n.output[0]: n for n in scope.node if n.output[0] in values and not counts[n.output[0]]}:
            for node in unread.values():
                counts.subtract(node.input)
            set_nodes(scope, [node for node in scope.node if node.output[0] not in unread])
