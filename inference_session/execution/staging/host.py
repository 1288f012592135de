"""The fast path on the processor (base.py): the memory that compiled code fills, and the network bound to it.

Compiled code reads the arrays where the requests have them and describes the look-up; forms.py has a form for each
layout of requests that it knows. Vectors and outputs lie in fixed memory, to which the network is bound
once per shape. So do the keys that a key graph computes: it is bound to what it reads and to its results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from inference_session.dense_engine.base import BoundRun
from inference_session.device.host import zeros_at_line
from inference_session.execution.lookups import ModelLookups, VectorInput
from inference_session.execution.network import Network
from inference_session.execution.staging.base import Arrays, StagedBatch, StagingPool
from inference_session.execution.staging.forms import (
    ArrayForm,
    Memory,
    Shapes,
    compile_kernels,
    create_form,
    given_inputs,
    has_form,
    view,
)
from inference_session.execution.staging.key_graph import MAX_BYTES, MAX_PLANS, HostKeyGraph, are_full
from inference_session.kernels.array_headers import can_read_arrays
from inference_session.kernels.cpu.requests.staging import NO_ROOM, STAGED, VECTOR_INPUT
from inference_session.kernels.records import FLOAT_BYTES, SEGMENT, Lookup, address_of
from inference_session.model_spec import ModelSpec, NamedArrays
from inference_session.requests.batch import RequestLayout
from inference_session.requests.outputs import Outputs

_FIRST_REQUESTS, MAX_REQUESTS = 16, 4096

_Case: TypeAlias = "tuple[bytes, int, tuple[str, ...] | None]"
"""What tells batches apart: their open sizes and the shapes of computed keys, the number of requests, the outputs that
these ask for.
"""


class _RequestRecords(NamedTuple):
    """The parts of a Staging's records that this many requests use."""

    lookup: Lookup
    look_up: Callable[[], object]
    """The bound look-up, where rows have one (RowReader.bound_lookups)."""
    counts: NDArray[np.int64]
    """The samples of each request."""


class HostStaging:
    """The memory that batches use. For one thread.

    Three dictionaries keep what many batches have in common: `_records` the look-up of a number of requests, `_runs`
    the network bound to certain shapes, and `_batches` both of them for a case.
    """

    def __init__(
        self, spec: ModelSpec, lookups: ModelLookups, network: Network, outputs: Outputs, form: ArrayForm
    ) -> None:
        self._spec, self._network, self._outputs, self._form = spec, network, outputs, form
        self._dense, self._reader = network.dense, network.reader
        self.held = None
        self._bound_lookups = self._reader.bound_lookups()
        self._ranks = bool(spec.context)
        self._vector_inputs = lookups.vector_inputs
        self._inputs, self._lookups = form.inputs, form.lookups
        self._num_inputs = len(form.dtypes)
        self._vector_records = _vector_records(lookups.vector_inputs)
        self._open_sizes = np.zeros(form.num_open_sizes, np.int64)
        self._memory: Memory = {}
        self._runs: dict[tuple[bytes, tuple[str, ...]], BoundRun | None] = {}
        """By the shapes of a batch and what is computed. None: `run_many` refuses such requests."""
        self._key_graph = None
        if network.keys is not None:
            self._key_graph = HostKeyGraph(network.keys, network.key_names, form, self._memory, self._open_sizes)
        self._make_room(_FIRST_REQUESTS)

    def fill(self, arrays: Arrays, num_requests: int, outputs: Collection[str] | None) -> StagedBatch | None:
        """See Staging. None also where the batch is too large."""
        if len(arrays) != num_requests * self._num_inputs:
            return None
        for step in self._steps:
            status = step(id(arrays), num_requests)
            if status == NO_ROOM:
                return self.fill(arrays, num_requests, outputs) if self._grow(num_requests) else None
            if status != STAGED:
                return None
        shapes = self._open_sizes.tobytes()
        if self._key_graph is not None:
            shapes += self._key_graph.shapes
        try:
            case = shapes, num_requests, None if outputs is None else tuple(outputs)
            batch = self._batches[case]
        except KeyError:
            batch = self._batch(case)
        except TypeError:  # outputs that are no names: `run_many` says so
            return None
        if batch is None or self._bound_lookups is not None:
            return batch
        lookup = self._records[num_requests].lookup  # `RowReader.look_up` may replace parts of a Lookup
        batch.lookup = lookup = Lookup(lookup.segments, lookup.num_keys, lookup.num_unknown)
        batch.look_up = partial(self._reader.look_up, lookup)
        return batch

    def _batch(self, case: _Case) -> StagedBatch | None:
        """What all batches of a case have in common: making it takes longer than staging a request."""
        shapes, num_requests, outputs = case
        wanted = self._outputs.wanted(outputs)
        if len(self._batches) >= MAX_PLANS:
            self._batches.clear()
        run, batch = self._run_of(shapes, wanted.computed), None
        if run is not None:
            records = self._records.get(num_requests) or self._records_of(num_requests)
            num_samples = int(self._open_sizes[0])
            num_contexts = num_requests if self._ranks else num_samples
            batch = StagedBatch(records.lookup, records.look_up, run, records.counts, num_samples, num_contexts, wanted)
        self._batches[case] = batch
        return batch

    def _records_of(self, num_requests: int) -> _RequestRecords:
        own = slice(num_requests * len(self._lookups))
        lookup = Lookup(self._segments[own], self._num_keys[own], self._num_unknown[own])
        lookup.places = lookup.find_places()
        bound = self._bound_lookups
        look_up = partial(self._reader.look_up, lookup) if bound is None else bound.bind(lookup)
        records = self._records[num_requests] = _RequestRecords(lookup, look_up, self._counts[:num_requests])
        return records

    def _make_room(self, num_requests: int) -> None:
        counts = np.zeros(num_requests, np.int64)
        segments = np.zeros(num_requests * len(self._lookups), SEGMENT)
        num_keys, num_unknown = np.zeros(len(segments), np.int64), np.zeros(len(segments), np.int64)
        # Replaced all together: after a MemoryError compiled code still uses the old ones.
        first, *others = self._form.kernels_into(self._vector_records, self._open_sizes, counts, segments, num_keys)
        self._steps = (first, self._key_graph.compute, *others) if self._key_graph is not None else (first,)
        self._counts, self._segments, self._num_keys, self._num_unknown = counts, segments, num_keys, num_unknown
        self._records: dict[int, _RequestRecords] = {}
        """By the number of requests."""
        self._batches: dict[_Case, StagedBatch | None] = {}
        """None: `run_many` refuses such requests."""

    def _grow(self, num_requests: int) -> bool:
        """Make room for a batch that did not fit; False: it is too large."""
        if num_requests > len(self._counts):
            if num_requests > MAX_REQUESTS:
                return False
            self._make_room(_power_of_two(num_requests))
            return True
        if self._inputs["wanted_bytes"].sum() + self._vector_records["wanted_bytes"].sum() > MAX_BYTES:
            return False
        self._forget_runs()  # they use the memory that is replaced
        for kind, records in (("input", self._inputs), ("vectors", self._vector_records)):
            for i in np.flatnonzero(records["wanted_bytes"] > records["num_bytes"]).tolist():
                num_bytes = _power_of_two(int(records["wanted_bytes"][i]))
                memory = self._memory[kind, i] = zeros_at_line(1, num_bytes).reshape(-1)
                records["address"][i], records["num_bytes"][i] = address_of(memory), num_bytes
        return True

    def _run_of(self, shapes: bytes, computed: tuple[str, ...]) -> BoundRun | None:
        """The network bound to the memory of batches of the last one's shapes, to compute these outputs."""
        if (shapes, computed) in self._runs:
            return self._runs[shapes, computed]
        if are_full(self._runs.values()):
            self._forget_runs()
        own = self._form.shapes(self._open_sizes)
        run = self._dense.bind(self._network_inputs(own), computed) if self._form.fits(own) else None
        self._runs[shapes, computed] = run
        return run

    def _forget_runs(self) -> None:
        self._runs.clear()
        if self._key_graph is not None:
            self._key_graph.forget()
        self._batches.clear()

    def _network_inputs(self, shapes: Shapes) -> NamedArrays:
        """What the network reads, in the shapes of the batch that was staged last."""
        vectors = [
            view(self._memory, ("vectors", v), self._vectors_shape(vector_input, shapes), np.dtype(np.float32))
            for v, vector_input in enumerate(self._vector_inputs)
        ]
        inputs = dict(zip([each.dense_input for each in self._vector_inputs], vectors, strict=True))
        for name, record in zip(self._form.names, self._inputs, strict=True):
            if record["vector_input"] >= 0:
                first, width = record["column_bytes"] // FLOAT_BYTES, math.prod(shapes[name][1:])
                inputs[name] = vectors[record["vector_input"]][:, first : first + width]
        others = self._dense.input_names - inputs.keys()
        inputs.update(given_inputs(self._form, self._memory, self._open_sizes, others))
        return inputs

    def _vectors_shape(self, vector_input: VectorInput, shapes: Shapes) -> tuple[int, ...]:
        first = self._spec.lookups[vector_input.members[0]]
        if vector_input.is_matrix:
            record = self._vector_records[self._vector_inputs.index(vector_input)]
            num_rows = self._open_sizes[-1 if record["is_contexts"] else 0]
            return int(num_rows), int(record["row_bytes"]) // FLOAT_BYTES
        table = self._spec.table_in(first.table)
        if first.pooling != "none":
            return (*shapes[first.keys][:-1], table.embedding_dim)
        # Rows of one number each, without a dimension of their own, have the shape ().
        row_shape = (table.embedding_dim,) if table.row_shape is None else table.row_shape
        return (*shapes[first.keys], *row_shape)


def stage_on_host(spec: ModelSpec, layout: RequestLayout, network: Network) -> StagingPool | None:
    """What stages requests to a model; None: the model needs something that only `run_many` supports."""
    if not can_read_arrays() or not has_form(spec, layout, network):
        return None
    compile_kernels(spec, network)
    concat_inputs = network.dense.concat_inputs
    lookups = ModelLookups(spec, by_column=False, keys_follow_inputs=True, concat_inputs=concat_inputs)

    def new() -> HostStaging:
        return HostStaging(spec, lookups, network, layout.outputs, create_form(spec, layout, lookups, network))

    return StagingPool(new)


def _vector_records(vector_inputs: Sequence[VectorInput]) -> NDArray[np.void]:
    records = np.zeros(len(vector_inputs), VECTOR_INPUT)
    for record, vector_input in zip(records, vector_inputs, strict=True):
        if (concat := vector_input.concat_input) is not None:
            record["vector_bytes"] = FLOAT_BYTES * concat.first_given
            record["given_bytes"] = FLOAT_BYTES * (concat.width - concat.first_given)
    return records


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
