"""Takes row reads out of the main graph: what the session looks up, by which keys, for which value."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from inference_session.importers.onnx.evaluation import fixed_value
from inference_session.importers.onnx.lookups.vector_values import values_of_vectors
from inference_session.importers.onnx.tables import StaysDenseError, is_row_read
from inference_session.importers.onnx.types import Dims, Types
from inference_session.importers.onnx.weights import Weight, little_endian
from inference_session.model_spec import Pooling
from inference_session.onnx_graphs import (
    Names,
    NodeBuilder,
    all_graphs,
    attribute,
    is_random,
    make_node,
    needed_nodes,
    opset_of,
    producers,
    replace_node,
    replace_reads,
    set_nodes,
    use_counts,
)

KEY_TYPES = (TensorProto.INT64, TensorProto.INT32)
SHAPE_OPS = ("Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten")
_MAX_FIXED_BYTES = 64 << 20


@dataclass
class GraphLookup:
    """One read of a table that the session does instead of the dense network."""

    table: str
    keys: str
    """A model input, or a value of the graph."""
    keys_dims: Dims | None
    row_shape: tuple[int, ...]
    vectors: str
    """The value, float32, that no node of the graph computes after the cut."""
    pooling: Pooling = "none"
    weights: str | None = None
    bags: tuple[str, str] | None = None
    """For pooled keys that are one list: the values that say where each bag begins and ends in it."""
    was_zero_if_empty: bool = False
    """Whether the model's own mean over an empty bag is zero, as the look-up's is."""
    columns: tuple[int, int] | None = None
    """Columns of a matrix of keys: from the first up to, not including, the second."""
    matrix: str | None = None
    """The value that several look-ups fill together."""

    @property
    def embedding_dim(self) -> int:
        return math.prod(self.row_shape)

    @property
    def reads(self) -> tuple[str, ...]:
        """The values that the look-up needs."""
        return (self.keys, *([self.weights] if self.weights else []), *(self.bags or ()))

    @property
    def dims(self) -> Dims | None:
        """Shape of the vectors."""
        if self.keys_dims is None:
            return None
        if self.pooling == "none":
            return (*self.keys_dims, *self.row_shape)
        return (*self.keys_dims[:-1], self.embedding_dim)


@dataclass
class EditedModel:
    """A model that is being changed: its tables and look-ups are taken out of its graph."""

    model: ModelProto
    tables: dict[str, Weight]
    names: Names
    types: Types

    @property
    def graph(self) -> GraphProto:
        """The main graph."""
        return self.model.graph

    @property
    def opset(self) -> int:
        """The version of the standard operators."""
        return opset_of(self.model)

    def builder(self, stem: str) -> NodeBuilder:
        """Writes nodes for the main graph."""
        return NodeBuilder(self.graph, self.names, stem)


def take_lookups(edited: EditedModel) -> list[GraphLookup]:
    """Remove the row reads from the graph; their vectors become values that no node makes.

    Raises:
        StaysDenseError: keys depend on looked-up vectors, or on random numbers.
    """
    graph, tables = edited.graph, edited.tables
    from_vectors = values_of_vectors(graph, set(tables))
    lookups: list[GraphLookup] = []
    gathers = [node for node in graph.node if is_row_read(node) and node.input[0] in tables]
    for gather in gathers:
        _check_keys(edited, tables[gather.input[0]], gather.input[1], from_vectors)
    for gather in gathers:
        table, keys = tables[gather.input[0]], gather.input[1]
        fixed_keys = fixed_value(edited.model, graph, keys)
        if fixed_keys is not None:
            rows = _fixed_rows(edited, table, fixed_keys.astype(np.int64), gather.output[0])
            replace_node(graph, gather, [rows])
        else:
            lookups.append(_take(edited, table, gather))
    skip_identities(graph)
    return lookups


def _check_keys(edited: EditedModel, table: Weight, keys: str, from_vectors: set[str]) -> None:
    graph, tables = edited.graph, edited.tables
    if keys in from_vectors:
        sources = [tables[name] for name in tables if keys in values_of_vectors(graph, {name})]
        smallest = min([table, *sources], key=lambda each: each.num_bytes)
        if table in sources or smallest is table:
            raise StaysDenseError(table.name, f"is read with keys ({keys!r}) that depend on looked-up vectors")
        raise StaysDenseError(smallest.name, f"is read to compute keys ({keys!r}) of {table.name!r}, which is larger")
    for node in needed_nodes(graph.node, [keys]):
        if is_random(node):
            raise StaysDenseError(table.name, f"is read with keys ({keys!r}) that are drawn at random")


def _fixed_rows(edited: EditedModel, table: Weight, keys: NDArray[np.int64], output: str) -> NodeProto:
    """Rows that are the same for every request need no look-up: they are read now, once."""
    num_rows = table.dims[0]
    if keys.size * (table.num_bytes // num_rows) > _MAX_FIXED_BYTES:
        raise StaysDenseError(table.name, f"is read with the same {keys.size} keys for every request")
    if keys.size and not -num_rows <= keys.min() <= keys.max() < num_rows:
        raise StaysDenseError(table.name, f"is read with constant keys outside its {num_rows} rows")
    rows = table.rows(keys)
    tensor = TensorProto(name=edited.names.fresh(f"{output}_rows"), data_type=table.elem_type, dims=rows.shape)
    tensor.raw_data = little_endian(rows)
    edited.graph.initializer.append(tensor)
    return make_node("Identity", [tensor.name], output)


def _take(edited: EditedModel, table: Weight, gather: NodeProto) -> GraphLookup:
    """Replace a row read by a look-up, and nodes that give its vectors the shape and type that the graph expects."""
    keys, output = gather.input[1], gather.output[0]
    base, shape = _keys_behind(edited, keys)
    vectors = edited.names.fresh(f"{table.name}_vectors")
    lookup = GraphLookup(table.name, base, edited.types.dims(base), table.dims[1:], vectors)
    is_narrow = table.elem_type != TensorProto.FLOAT
    shaped = edited.names.fresh(f"{output}_float32") if is_narrow else output
    builder = edited.builder(vectors)
    if shape is None:
        builder.add("Identity", [vectors], shaped)
    else:
        builder.add("Reshape", [vectors, builder.integers([*shape, *lookup.row_shape])], shaped)
    if is_narrow:
        _skip_widening(edited.graph, output, shaped)
        if use_counts(edited.graph)[output]:
            builder.add("Cast", [shaped], output, to=table.elem_type)
    replace_node(edited.graph, gather, builder.nodes)
    return lookup


def _skip_widening(graph: GraphProto, half: str, wide: str) -> None:
    """Look-ups return float32: casts to float32 are removed."""
    for node in graph.node:
        if node.op_type == "Cast" and node.input[0] == half and attribute(node, "to", 0) == TensorProto.FLOAT:
            del node.attribute[:]
            node.op_type, node.input[0] = "Identity", wide


def _keys_behind(edited: EditedModel, keys: str) -> tuple[str, list[int] | None]:
    """The model's input that equals the keys except in shape and integer type, and the shape for the looked-up vectors.

    Without such an input, the keys themselves. The shape is None where no reshape is needed.
    """
    types, dims = edited.types, edited.types.dims(keys)
    base = _input_behind(edited, keys)
    if base is None or base == keys:
        return keys, None
    if dims is not None and None not in dims and types.dims(base) == dims:
        return base, None
    if dims is None or 0 in dims or sum(not isinstance(dim, int) for dim in dims) > 1:
        return (base, None) if _only_casts(edited, keys) else (keys, None)
    return base, [dim if isinstance(dim, int) else -1 for dim in dims]


def _input_behind(edited: EditedModel, keys: str) -> str | None:
    made_by = producers(edited.graph)
    while keys in made_by:
        node = made_by[keys]
        if not casts_keys(node) and node.op_type not in SHAPE_OPS:
            return None
        keys = node.input[0]
    is_input = any(value.name == keys for value in edited.graph.input)
    return keys if is_input and edited.types.elem_type(keys) in KEY_TYPES else None


def _only_casts(edited: EditedModel, keys: str) -> bool:
    made_by = producers(edited.graph)
    while keys in made_by:
        if not casts_keys(made_by[keys]) and made_by[keys].op_type != "Identity":
            return False
        keys = made_by[keys].input[0]
    return True


def casts_keys(node: NodeProto) -> bool:
    """Whether a node changes the type of keys, which stay the same numbers."""
    return node.op_type == "Cast" and attribute(node, "to", 0) in KEY_TYPES


def skip_same_casts(edited: EditedModel) -> None:
    """Let readers of a Cast to the type that its input has read the input: Keras writes many of them."""
    for scope in all_graphs(edited.graph):
        for node in scope.node:
            if node.op_type == "Cast" and not node.domain:
                elem_type = edited.types.elem_type(node.input[0])
                if elem_type and attribute(node, "to", 0) == elem_type:
                    del node.attribute[:]
                    node.op_type = "Identity"
    skip_identities(edited.graph)


def skip_identities(graph: GraphProto) -> None:
    """Let readers of a copy read the original; copies that are the outputs of a graph stay."""
    outputs = {value.name for scope in all_graphs(graph) for value in scope.output}
    originals: dict[str, str] = {}
    kept: list[NodeProto] = []
    for node in graph.node:
        if node.op_type == "Identity" and not node.domain and node.output[0] not in outputs:
            originals[node.output[0]] = originals.get(node.input[0], node.input[0])
        else:
            kept.append(node)
    if originals:
        replace_reads(graph, originals)
        set_nodes(graph, kept)
