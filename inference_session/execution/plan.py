"""One plan per shape of batch: what follows from shapes alone, computed once, and the steps of each batch.

    plan = plans.of(batch, outputs)
    with plan.held():                       # the device, until the answers are on the host
        lookup = plan.fill(batch)           # keys go where the device reads them
        rows.look_up(lookup)                # vectors go where the network reads them
        answers = plan.run_network(batch)

Each plan keeps the memory that its batches use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.dense_engine.base import BoundRun, DenseEngine
from inference_session.device.base import Device
from inference_session.device.host import joined_keys
from inference_session.errors import InvalidRequestError
from inference_session.execution.lookups import Geometry, ModelLookups
from inference_session.kernels.records import Lookup, address_of
from inference_session.platform.bounded_memory import BoundedMemory
from inference_session.requests.batch import JoinedBatch, Part, RaggedBags, StagedValues
from inference_session.requests.outputs import Answer
from inference_session.rows.base import Rows

_MAX_PLANS = 1024
_KEY_BYTES = 8


class ExecutionPlan(ABC):
    """The steps of batches of one shape."""

    outputs: tuple[str, ...]
    """What the network computes."""

    @abstractmethod
    def held(self) -> AbstractContextManager[None]:
        """What a batch holds from `fill` until its answers are on the host."""

    @abstractmethod
    def fill(self, batch: JoinedBatch) -> Lookup:
        """The look-up of a batch: its keys are where the device reads them, and there is room for the vectors."""

    @abstractmethod
    def run_network(self, batch: JoinedBatch) -> Answer:
        """The outputs of the network, once the look-up has written its inputs; raises what DenseEngine.run does."""

    @abstractmethod
    def num_unknown(self, lookup: Lookup) -> NDArray[np.int64]:
        """Unknown keys per look-up, once the network has run; the caller owns them."""


class FreshPlan(ExecutionPlan):
    """Takes memory from the device for each batch."""

    def __init__(
        self,
        lookups: ModelLookups,
        geometry: Geometry,
        rows: Rows,
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
        self._device = rows.device
        self._dense = dense
        self._loose_names = tuple(lookups.key_names[i] for i in lookups.loose)
        loose_keys = geometry.num_keys[lookups.loose]
        self._loose_offsets = _KEY_BYTES * (np.cumsum(loose_keys) - loose_keys)
        """Where the keys of each loose look-up begin, where none of them are ragged."""
        self._prepared_lookup = rows.prepare(geometry.segments)
        self._prepared_network = dense.prepare()

    def held(self) -> AbstractContextManager[None]:
        """See ExecutionPlan."""
        return self._device.request()

    def fill(self, batch: JoinedBatch) -> Lookup:
        """See ExecutionPlan."""
        geometry, device = self._geometry, self._device
        vectors = [device.empty(shape) for shape in geometry.shapes]
        segments, num_keys = geometry.segments.copy(), geometry.num_keys
        if vectors:
            addresses = [address_of(array) for array in vectors]
            moves = addresses[0] if len(addresses) == 1 else np.array(addresses)[self._lookups.block_of]
            segments["output_address"] += moves
        self._fill_packed(segments, batch)
        self._fill_weights(segments, batch)
        if self._lookups.loose:
            num_keys = self._fill_loose(segments, batch)
        for block, array, is_bare in zip(self._lookups.blocks, vectors, geometry.bare, strict=True):
            batch.replace(block.dense_input, [array[0] if is_bare else array])
        return Lookup(segments, num_keys, device.counts(len(segments)), self._prepared_lookup)

    def run_network(self, batch: JoinedBatch) -> Answer:
        """See ExecutionPlan."""
        results = self._dense.run(self.network_inputs(batch), self.outputs, self._prepared_network)
        return dict(zip(self.outputs, results, strict=True))

    def num_unknown(self, lookup: Lookup) -> NDArray[np.int64]:
        """See ExecutionPlan."""
        self._device.wait()
        counts: NDArray[np.int64] = lookup.num_unknown.copy()
        return counts

    def network_inputs(self, batch: JoinedBatch) -> dict[str, NDArray[Any]]:
        """What the network reads, by name."""
        return {name: batch.array(name) for name in self._dense.input_names}

    def _fill_loose(self, segments: NDArray[np.void], batch: JoinedBatch) -> NDArray[np.int64]:
        """Concatenate the keys that are not columns, and enter where they are; returns the keys per look-up."""
        names, num_keys = self._loose_names, self._geometry.num_keys
        all_parts = [batch.parts(name) for name in names]
        if any(isinstance(parts[0], RaggedBags) for parts in all_parts):
            return self._fill_ragged(segments, batch, num_keys.copy())
        keys = self._device.stage_keys([part for parts in all_parts for part in parts])  # type: ignore[misc]
        addresses = self._loose_offsets + _kept(batch, names, keys)
        if len(names) == len(segments):
            segments["keys_address"] = addresses
        else:
            segments["keys_address"][self._lookups.loose] = addresses
        return num_keys

    def _fill_ragged(
        self, segments: NDArray[np.void], batch: JoinedBatch, num_keys: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """As `_fill_loose`, where bags of some look-ups have different lengths."""
        even: dict[int, list[Part]] = {}
        values: dict[tuple[int, ...], int] = {}
        """Where keys are, by the lists that they come from: look-ups may have bags in the same ones."""
        for i in self._lookups.loose:
            parts = batch.parts(self._lookups.key_names[i])
            if isinstance(parts[0], RaggedBags):
                lists = [part.values for part in parts]  # type: ignore[union-attr]  # the others are ragged as well
                case = tuple(map(id, lists))
                if case not in values:
                    values[case] = self._stage(batch, (), joined_keys(lists))
                num_keys[i], begins, ends = _joined_bags(parts)  # type: ignore[arg-type]
                segments["keys_address"][i] = values[case]
                segments["begins_address"][i] = self._stage(batch, (), begins)
                segments["ends_address"][i] = self._stage(batch, (), ends)
            else:
                even[i] = parts
        if even:
            places, counts = list(even), num_keys[list(even)]
            keys = self._device.stage_keys([part for parts in even.values() for part in parts])  # type: ignore[misc]
            address = _kept(batch, tuple(self._lookups.key_names[i] for i in places), keys)
            segments["keys_address"][places] = address + _KEY_BYTES * (np.cumsum(counts) - counts)
        return num_keys

    def _fill_packed(self, segments: NDArray[np.void], batch: JoinedBatch) -> None:
        """Enter the places of keys that are columns of a matrix."""
        for name, members in self._lookups.packed.items():
            address = self._stage(batch, (name,), batch.array(name), by_column=self._device.reads_by_column)
            if len(members.lookups) == len(segments):
                segments["keys_address"] += address
            else:
                segments["keys_address"][members.lookups] += address

    def _fill_weights(self, segments: NDArray[np.void], batch: JoinedBatch) -> None:
        """Enter the places of the weights of look-ups that have weights."""
        for i, keys_name, weights_name in self._lookups.weighted:
            keys, weights = batch.array(keys_name), batch.array(weights_name)
            if weights.shape != keys.shape:
                raise InvalidRequestError(
                    f"keys {keys_name!r} have shape {list(keys.shape)}, but their weights, {weights_name!r}, "
                    f"have {list(weights.shape)}"
                )
            segments["weights_address"][i] = self._stage(batch, (weights_name,), weights.astype(np.float32, copy=False))

    def _stage(
        self, batch: JoinedBatch, names: tuple[str, ...], array: NDArray[Any], *, by_column: bool = False
    ) -> int:
        """Where the device reads an array, which is kept alive as long as the batch."""
        staged = self._device.stage(array.T).T if by_column else self._device.stage(array)
        return _kept(batch, names, staged)


class RecordedPlan(ExecutionPlan):
    """Batches always use the same memory, so that nothing is computed again between their launches.

    A request leaves no state in this memory, and all requests of one shape use the same places.
    The host only has to copy the inputs, launch the look-up, run the network, wait, and copy the outputs: about
    half of the work of a batch that comes for the first time.
    """

    def __init__(
        self, device: Device, lookup: Lookup, network: BoundRun, staged: list[StagedValues], outputs: tuple[str, ...]
    ) -> None:
        """`staged`: the memory of all inputs."""
        self.outputs = outputs
        self.staged, self.network = staged, network
        self._device, self._lookup = device, lookup

    def held(self) -> AbstractContextManager[None]:
        """See ExecutionPlan."""
        return self._device.held()

    def fill(self, batch: JoinedBatch) -> Lookup:
        """See ExecutionPlan."""
        for staged in self.staged:
            staged.fill(batch)
        return self.cleared()

    def cleared(self) -> Lookup:
        """The look-up of the keys that are in their places, with nothing counted."""
        self._lookup.num_unknown[:] = 0
        return self._lookup

    def run_network(self, batch: JoinedBatch) -> Answer:  # noqa: ARG002  its inputs are in their places
        """See ExecutionPlan."""
        return dict(zip(self.outputs, self.network.run(), strict=True))

    def num_unknown(self, lookup: Lookup) -> NDArray[np.int64]:
        """See ExecutionPlan. Running the network has waited for the look-up."""
        counts: NDArray[np.int64] = lookup.num_unknown.copy()
        return counts


class ExecutionPlans:
    """The plans of one model by shape, in one bounded memory. Safe to use from several threads."""

    def __init__(self, lookups: ModelLookups, rows: Rows, dense: DenseEngine, computed: Collection[str]) -> None:
        """`computed`: names that batches have in addition to their inputs, as outputs of a key graph."""
        self._lookups = lookups
        self._rows = rows
        self._dense = dense
        self._computed = sorted(computed)
        self.may_record = rows.is_launched and lookups.follow_shapes
        self._plans: BoundedMemory[Any, FreshPlan | RecordedPlan] = BoundedMemory(_MAX_PLANS)

    def of(self, batch: JoinedBatch, outputs: tuple[str, ...]) -> ExecutionPlan:
        """The plan of a batch; InvalidRequestError where its keys do not fit each other."""
        self._lookups.cut_bags(batch)
        shape = self._shape(batch, outputs)
        plan = known = self._plans.get(shape)
        if plan is None:
            plan = self._fresh(batch, outputs)
            self._plans.put(shape, plan)
        # Shapes that lengths of lists make may never come again: recording one takes as long as some batches.
        may_come_again = known is not None or not self._lookups.irregular_shapes(batch)
        if isinstance(plan, FreshPlan) and plan.may_record and may_come_again and self._dense.may_bind(outputs):
            plan = self._recorded(plan, batch)
            self._plans.put(shape, plan)
        return plan

    def known(self, batch: JoinedBatch, outputs: tuple[str, ...]) -> ExecutionPlan | None:
        """The plan of a batch whose keys need not be cut, if there is one already."""
        return self._plans.get(self._shape(batch, outputs))

    def _shape(self, batch: JoinedBatch, outputs: tuple[str, ...]) -> Hashable:
        """The properties that batches of one plan share."""
        computed = [batch.array(name).shape for name in self._computed] if self.may_record else ()
        return (batch.num_samples, batch.shapes, self._lookups.irregular_shapes(batch), outputs, *computed)

    def _fresh(self, batch: JoinedBatch, outputs: tuple[str, ...]) -> FreshPlan:
        # Ragged keys are placed anew in each batch.
        may_record = self.may_record and not self._lookups.is_ragged(batch)
        geometry = self._lookups.geometry(batch)
        return FreshPlan(self._lookups, geometry, self._rows, self._dense, outputs, may_record=may_record)

    def _recorded(self, plan: FreshPlan, batch: JoinedBatch) -> FreshPlan | RecordedPlan:
        """The same plan with fixed places, unless the batch or the network cannot be bound to them."""
        plan.may_record = False
        if not batch.is_on_host:  # each batch has its own places
            return plan
        trial = batch.copy()
        with plan.held():
            lookup = plan.fill(trial)
            network = self._dense.bind(plan.network_inputs(trial), plan.outputs)
            if network is None:
                return plan
            lookup.repeat = self._rows.prepare(lookup.segments).repeated(address_of(lookup.num_unknown))
        places = [StagedValues((name,), array) for name, array in network.places.items()]
        return RecordedPlan(self._rows.device, lookup, network, [*trial.staged, *places], plan.outputs)


def _kept(batch: JoinedBatch, names: tuple[str, ...], staged: NDArray[Any]) -> int:
    """The address of an array, which is kept alive as long as the batch."""
    batch.staged.append(StagedValues(names, staged))
    return address_of(staged)


def _joined_bags(parts: list[RaggedBags]) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
    """How many keys the bags of several requests hold, and where they begin and end once their lists are joined."""
    if len(parts) == 1:
        return parts[0].num_keys, parts[0].begins, parts[0].ends
    shifts = np.cumsum([0, *(part.values.size for part in parts[:-1])])
    begins = np.concatenate([part.begins + shift for part, shift in zip(parts, shifts, strict=True)])
    ends = np.concatenate([part.ends + shift for part, shift in zip(parts, shifts, strict=True)])
    return sum(part.num_keys for part in parts), begins, ends
