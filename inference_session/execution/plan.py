"""One plan per shape of batch: what follows from shapes alone, computed once, and the steps of each batch.

    plan = network.plan(batch, outputs)     # kept by shape (network.py)
    with plan.held():                       # the device, until the answers are on the host
        lookup = plan.fill(batch)           # keys go where the device reads them
        reader.look_up(lookup)              # vectors go where the network reads them
        answers = plan.run_network(batch)

Each plan keeps the memory that its batches use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from inference_session.dense_engine.base import BoundRun, DenseEngine
from inference_session.device.base import Device, UsedMemory
from inference_session.execution.key_stager import KeyStager
from inference_session.execution.lookups import Geometry, ModelLookups
from inference_session.kernels.records import Lookup, address_of
from inference_session.model_spec import NamedArrays
from inference_session.requests.batch import JoinedBatch, StagedValues
from inference_session.requests.outputs import Answer
from inference_session.tables.base import RowReader

Vectors: TypeAlias = dict[str, Any]
"""Arrays on the device that look-ups write, by the names that the network has for them."""


class ExecutionPlan(ABC):
    """The steps of batches of one shape."""

    outputs: tuple[str, ...]
    """What the network computes."""

    @abstractmethod
    def held(self) -> AbstractContextManager[None]:
        """Hold what a batch needs for itself, from `fill` until its answers are on the host."""

    @abstractmethod
    def fill(self, batch: JoinedBatch) -> Lookup:
        """The look-up of a batch: its keys are where the device reads them, and there is room for the vectors."""

    @abstractmethod
    def run_network(self, batch: JoinedBatch) -> Answer:
        """The outputs of the network, once the look-up has written its inputs; raises what DenseEngine.run does."""

    @abstractmethod
    def num_unknown(self, lookup: Lookup) -> NDArray[np.int64]:
        """The unknown keys of each look-up, int64 [look-ups], as the caller's own. Call it when the network has run."""


class FreshPlan(ExecutionPlan):
    """Takes memory from the device for each batch."""

    def __init__(
        self,
        lookups: ModelLookups,
        geometry: Geometry,
        reader: RowReader,
        dense: DenseEngine,
        outputs: tuple[str, ...],
        *,
        may_record: bool,
    ) -> None:
        """`may_record`: whether a RecordedPlan may take its place."""
        self.outputs = outputs
        self.may_record = may_record
        self._lookups = lookups
        self._geometry = geometry
        self._reader, self._device = reader, reader.device
        self._dense = dense
        self.keys = KeyStager(lookups, geometry.num_keys, reader.device)
        self._prepared_lookup = reader.prepare(geometry.segments)
        """What look-ups of these shapes share; see Lookup.prepared."""
        self._prepared_network = dense.prepare()

    def held(self) -> AbstractContextManager[None]:
        return self._device.request()

    def fill(self, batch: JoinedBatch) -> Lookup:
        segments, vectors = self._take_vectors()
        num_keys = self.keys.stage(segments, batch)
        _give_vectors(batch, vectors)
        batch.copies = self._allocate_separate_outputs(segments, vectors)
        return Lookup(segments, num_keys, self._device.counts(len(segments)), self._prepared_lookup)

    def _take_vectors(self) -> tuple[NDArray[np.void], Vectors]:
        """Allocate memory for the vectors; returns segments that point there, and its arrays by network input."""
        geometry, dtypes = self._geometry, [each.dtype for each in self._lookups.vector_inputs]
        arrays = [self._device.empty(*each) for each in zip(geometry.shapes, dtypes, strict=True)]
        segments = geometry.segments.copy()
        if arrays:
            addresses = [address_of(array) for array in arrays]
            moves = addresses[0] if len(addresses) == 1 else np.array(addresses)[self._lookups.vector_input_of]
            segments["output_address"] += moves
        named = zip(self._lookups.vector_inputs, arrays, geometry.bare, strict=True)
        return segments, {each.dense_input: array[0] if is_bare else array for each, array, is_bare in named}

    def _allocate_separate_outputs(self, segments: NDArray[np.void], vectors: Vectors) -> list[Callable[[], object]]:
        """Allocate memory of their own for some vectors; returns what copies it to its place, whenever it is called."""
        copies = []
        for output in self._geometry.separate_outputs:
            matrix = vectors[output.vector_input]
            pooled = self._device.empty((len(matrix), output.width), matrix.dtype)
            segments["output_address"][output.lookup] = address_of(pooled)
            copies.append(self._device.column_copy(pooled, matrix, output.first))
        return copies

    def run_network(self, batch: JoinedBatch) -> Answer:
        for copy in batch.copies:
            copy()
        # There is room for few CUDA graphs: a plan that will be replaced by a RecordedPlan takes none.
        prepared = None if self.may_record else self._prepared_network
        results = self._dense.run(self._network_inputs(batch), self.outputs, prepared)
        return dict(zip(self.outputs, results, strict=True))

    def num_unknown(self, lookup: Lookup) -> NDArray[np.int64]:
        self._device.wait()
        counts: NDArray[np.int64] = lookup.num_unknown.copy()
        return counts

    def _network_inputs(self, batch: JoinedBatch) -> NamedArrays:
        """What the network reads, by name."""
        return {name: batch.array(name) for name in self._dense.input_names}

    def recorded(self, batch: JoinedBatch) -> FreshPlan | BoundPlan:
        """The same plan with fixed memory, unless the batch or the network cannot be bound to it."""
        self.may_record = False
        if not batch.is_on_host:  # a caller's arrays are in other memory each time
            return self
        device, inputs, trial = self._device, batch.copy(), batch.copy()
        with self.held():
            # Keys come last: so one CUDA graph serves all batches of one size, however many keys they have.
            segments, vectors = self._take_vectors()
            _give_vectors(inputs, vectors)
            network = self._dense.bind(self._network_inputs(inputs), self.outputs)
            if network is None:
                return self
            copies = self._allocate_separate_outputs(segments, vectors)
            staged = [StagedValues((name,), array) for name, array in network.inputs.items()]
            lookup = Lookup(segments, self.keys.num_keys, device.counts(len(segments)), self._prepared_lookup)
            if self._lookups.is_ragged(batch):
                used = device.used()
                return RaggedPlan(device, self, lookup, network, copies=copies, staged=staged, used=used)
            if copies:  # which the fast path does not make
                return self
            lookup.num_keys = self.keys.stage(segments, trial)
            lookup.repeat = self._reader.repeated(lookup)
            lookup.places = lookup.find_places()
        return RecordedPlan(device, lookup, network, keys=trial.staged, inputs=staged, outputs=self.outputs)


class BoundPlan(ExecutionPlan):
    """The network is bound to memory that all batches use."""

    def __init__(self, device: Device, network: BoundRun, outputs: tuple[str, ...]) -> None:
        self.outputs, self.network, self._device = outputs, network, device

    def run_network(self, batch: JoinedBatch) -> Answer:
        for copy in batch.copies:
            copy()
        return dict(zip(self.outputs, self.network.run(), strict=True))

    def num_unknown(self, lookup: Lookup) -> NDArray[np.int64]:
        """See ExecutionPlan. Running the network has waited for the look-up."""
        counts: NDArray[np.int64] = lookup.num_unknown.copy()
        return counts


class RecordedPlan(BoundPlan):
    """Batches always use the same memory, so that nothing is computed again between their launches.

    A request leaves no state in this memory, and all requests of one shape use the same memory.
    The host only has to copy the inputs, launch the look-up, run the network, wait, and copy the outputs: about
    half of the work of a batch that comes for the first time.
    """

    def __init__(
        self,
        device: Device,
        lookup: Lookup,
        network: BoundRun,
        *,
        keys: list[StagedValues],
        inputs: list[StagedValues],
        outputs: tuple[str, ...],
    ) -> None:
        """`keys`: the memory that the look-up reads; `inputs`: the memory that only the network reads."""
        super().__init__(device, network, outputs)
        self.keys, self.inputs, self._lookup = keys, inputs, lookup

    def held(self) -> AbstractContextManager[None]:
        return self._device.held()

    def fill(self, batch: JoinedBatch) -> Lookup:
        for staged in (*self.keys, *self.inputs):
            staged.fill(batch)
        return self.cleared()

    def cleared(self) -> Lookup:
        """The look-up of the keys that have been staged, with nothing counted."""
        self._lookup.num_unknown[:] = 0
        return self._lookup


class RaggedPlan(BoundPlan):
    """For batches whose bags of keys differ in length. Only keys get new memory, behind what all batches use."""

    def __init__(
        self,
        device: Device,
        plan: FreshPlan,
        lookup: Lookup,
        network: BoundRun,
        *,
        copies: list[Callable[[], object]],
        staged: list[StagedValues],
        used: UsedMemory | None,
    ) -> None:
        """Describe what all batches use.

        Args:
            device: of the rows.
            plan: stages the keys.
            lookup: its segments point to the vectors that the network reads.
            network: the bound network.
            copies: see JoinedBatch.
            staged: the memory of the inputs that the network reads.
            used: the device's memory up to here is used (Device.used).
        """
        super().__init__(device, network, plan.outputs)
        self._plan, self._lookup, self._copies, self._staged, self._used = plan, lookup, copies, staged, used

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._device.request():
            self._device.skip(self._used)
            yield

    def fill(self, batch: JoinedBatch) -> Lookup:
        segments, num_unknown = self._lookup.segments.copy(), self._lookup.num_unknown
        num_keys = self._plan.keys.stage(segments, batch)
        for staged in self._staged:
            staged.fill(batch)
        batch.copies = self._copies
        num_unknown[:] = 0
        return Lookup(segments, num_keys, num_unknown, self._lookup.prepared)


def _give_vectors(batch: JoinedBatch, vectors: Vectors) -> None:
    """Have the network read these vectors, in place of the keys of the batch where they have the same names."""
    for name, array in vectors.items():
        batch.replace(name, [array])
