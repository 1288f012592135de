"""Divides a canonical model into tables, look-ups, the network that computes keys, and the dense network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from inference_session.dense_engine.rewrites.parts import part_of
from inference_session.importers.onnx.canonical import CanonicalModel
from inference_session.importers.onnx.decided_branches import take_decided_branches
from inference_session.importers.onnx.empty_lists import correct_empty_sums
from inference_session.importers.onnx.lookups.bags import pool_bags
from inference_session.importers.onnx.lookups.columns import read_columns
from inference_session.importers.onnx.lookups.graph_lookups import (
    EditedModel,
    GraphLookup,
    skip_same_casts,
    take_lookups,
)
from inference_session.importers.onnx.lookups.hoisting import Hoister
from inference_session.importers.onnx.lookups.matrices import share_matrices, vectors_per_sample
from inference_session.importers.onnx.lookups.negative_keys import read_negative_keys
from inference_session.importers.onnx.lookups.pooling import pool_lookups
from inference_session.importers.onnx.lookups.stacking import stack_columns
from inference_session.importers.onnx.tables import (
    StaysDenseError,
    TableSearch,
    ask_keys_for_shapes,
    find_tables,
    read_directly,
)
from inference_session.importers.onnx.types import Dims, Types
from inference_session.importers.onnx.weights import Weight
from inference_session.onnx_graphs import reads, sink_constants

CONSTANT_KEYS_ONLY = "is read with constant keys only; those rows are in the dense network"
"""Why a table stays dense that could be cut out: no request says which of its rows are read."""


@dataclass
class CarvedModel:
    """A model taken apart."""

    dense: ModelProto
    """Without the values of its bulky initializers."""
    dense_weights: list[Weight]
    keys: ModelProto | None
    keys_weights: list[Weight]
    lookups: list[GraphLookup]
    tables: list[Weight]
    stays_dense: dict[str, str] = field(default_factory=dict)
    """Why initializers that are read by rows did not become tables, by name."""


def carve(whole: CanonicalModel, min_rows: int, *, merge: bool) -> CarvedModel:
    """Take a model apart; the model itself is not changed.

    Args:
        merge: also make changes that rely on inferred shapes, where they are exactly equivalent: take branches that
            sizes decide on, move pooling into look-ups, let neighbours share a matrix, correct ONNX Runtime's results
            for empty lists.
    """
    return _carve_found(whole, find_tables(whole.model.graph, whole.weights, min_rows), merge=merge)


def keep_whole(whole: CanonicalModel, min_rows: int) -> CarvedModel:
    """The same for a model whose tables all stay in the dense network."""
    search = find_tables(whole.model.graph, whole.weights, min_rows)
    dense = {**search.dense, **dict.fromkeys(search.tables, "cannot be taken out without changing the answers")}
    return carve_tables(whole, [], dense, merge=False)


def _carve_found(whole: CanonicalModel, search: TableSearch, *, merge: bool) -> CarvedModel:
    while True:
        try:
            return carve_tables(whole, search.tables, search.dense, merge=merge)
        except StaysDenseError as error:  # noqa: PERF203  each time there is one table less
            search.tables.remove(error.table)
            search.dense[error.table] = error.reason


def carve_tables(
    whole: CanonicalModel, table_names: list[str], stays_dense: Mapping[str, str], *, merge: bool
) -> CarvedModel:
    """The same, with these tables and no others.

    Raises:
        StaysDenseError: one of them cannot be taken out.
    """
    model, weights, names = whole.copied(), whole.weights, whole.names
    if merge:
        model = take_decided_branches(model, weights)
    tables = {name: weights[name] for name in table_names}
    read_directly(model.graph, weights, table_names, names)
    edited = EditedModel(model, tables, names, Types(model, weights))
    read_negative_keys(edited)
    skip_same_casts(edited)
    ask_keys_for_shapes(model.graph, weights, table_names, names)
    edited.types = Types(model, weights)
    Hoister(edited).run()
    edited.types = Types(model, weights)
    if merge:
        correct_empty_sums(edited)
    lookups = take_lookups(edited)
    if merge:
        pool_bags(edited, lookups)
        pool_lookups(edited, lookups)
        lookups = share_matrices(edited, lookups)
        read_columns(edited, lookups)
    read = {lookup.table for lookup in lookups}
    unread = dict.fromkeys(set(tables) - read, CONSTANT_KEYS_ONLY)
    keys = _keys_network(edited, lookups)
    if keys and merge:
        stack_columns(edited, keys, lookups)
    dense = _dense_network(edited, lookups, declare_shapes=merge)
    return CarvedModel(
        dense,
        _weights_of(dense, weights),
        keys,
        _weights_of(keys, weights) if keys else [],
        lookups,
        [tables[name] for name in table_names if name in read],
        {**stays_dense, **unread},
    )


def _dense_network(edited: EditedModel, lookups: list[GraphLookup], *, declare_shapes: bool) -> ModelProto:
    inputs = list(edited.graph.input)
    matrices: dict[str, Dims | None] = {}
    for lookup in lookups:
        name = lookup.matrix or lookup.vectors
        dims = (*(lookup.keys_dims or (None,))[:1], _width(lookups, name)) if lookup.matrix else lookup.dims
        matrices[name] = dims if declare_shapes else None
    inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in matrices.items()]
    return _network(edited, inputs, list(edited.graph.output))


def _width(lookups: list[GraphLookup], matrix: str) -> int | None:
    """Elements per sample of the vectors that share a matrix."""
    widths = [vectors_per_sample(lookup.dims) for lookup in lookups if lookup.matrix == matrix]
    return sum(filter(None, widths)) if None not in widths else None


def _keys_network(edited: EditedModel, lookups: list[GraphLookup]) -> ModelProto | None:
    """The network that computes the keys, and their factors, that are not themselves inputs of the model."""
    given = {value.name for value in edited.graph.input}
    wanted = dict.fromkeys(name for lookup in lookups for name in lookup.reads)
    factors = {lookup.weights for lookup in lookups}
    outputs = [_output(edited, name, is_factor=name in factors) for name in wanted if name not in given]
    return _network(edited, list(edited.graph.input), outputs) if outputs else None


def _output(edited: EditedModel, name: str, *, is_factor: bool) -> ValueInfoProto:
    elem_type = TensorProto.FLOAT if is_factor else edited.types.elem_type(name) or TensorProto.INT64
    return helper.make_tensor_value_info(name, elem_type, None)


def _network(edited: EditedModel, inputs: list[ValueInfoProto], outputs: list[ValueInfoProto]) -> ModelProto:
    """The part of a model that its outputs need, with the inputs that it reads."""
    part = part_of(edited.model, inputs, outputs, ())
    sink_constants(part.graph, edited.names)
    return part


def _weights_of(network: ModelProto, weights: dict[str, Weight]) -> list[Weight]:
    needed = {value.name for value in network.graph.output}.union(*(reads(node) for node in network.graph.node))
    return [weight for name, weight in weights.items() if name in needed]
