"""The fast path on a GPU (base.py): arrays are copied to the memory that a recorded batch of their shape reads.

Compiled code checks the arrays and copies them (kernels/cpu/requests/gathering.py); the look-up and the network are
launched as they were recorded. What only the network reads is copied once the look-up has been launched: the GPU looks
the keys up meanwhile. A key graph runs on the processor, bound to memory of its own, and its results are copied to
where inputs would be. `InferenceSession.run_many` records shapes that recur.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from inference_session.dense_engine.base import BoundRun
from inference_session.execution.network import Network
from inference_session.execution.plan import RecordedPlan
from inference_session.execution.staging.base import Arrays, StagedBatch, StagingPool
from inference_session.execution.staging.forms import ARRAY_TYPE, input_records, is_readable
from inference_session.kernels.array_headers import can_read_arrays, dtype_addresses
from inference_session.kernels.cpu.requests.gathering import (
    COPY,
    FROM_INT32,
    FROM_UINT32,
    PACKED,
    SAME,
    check_packed,
    check_tensors,
    compile_kernels,
    gather,
)
from inference_session.kernels.cpu.requests.staging import DIFFERING, INPUT, OPEN
from inference_session.kernels.records import Lookup, address_of
from inference_session.model_spec import BLOCK_CONTEXT, ROW_CONTEXT, ModelSpec
from inference_session.platform.bounded_memory import BoundedMemory
from inference_session.requests.batch import JoinedBatch, Request, RequestLayout, StagedValues
from inference_session.requests.hugectr_csr import DENSE, KEYS, OFFSETS
from inference_session.requests.hugectr_layout import HugectrLayout
from inference_session.requests.tensor_layout import TensorLayout

_MAX_REQUESTS, _MAX_PLANS = 4096, 1024
_MAX_MISSES = 8
"""A shape that has come this often, and has no recorded batch, gets none: recording happens at the second or third."""
_Case: TypeAlias = tuple[bytes, tuple[str, ...]]
"""The open sizes of a batch, and the outputs that it computes."""
_ONE_SAMPLE = np.ones(1, np.int64)
_CONVERSIONS = {"int32": FROM_INT32, "uint32": FROM_UINT32}
"""From other integers to int64."""


class Source(NamedTuple):
    """Where in an input, or in a result of the key graph, the values of one of a batch's names are."""

    input: int
    """Its number; results follow the inputs."""
    dtype: str
    row_elements: int
    """Elements of a sample in the input; a result counts as one sample."""
    first: int
    num: int
    is_contexts: bool = False
    """Each request has one row."""


class _KeyGraph(NamedTuple):
    """The key graph, bound to memory of a recorded batch's shape."""

    run: BoundRun
    inputs: NDArray[np.void]
    """COPY records of what it reads."""
    results: NDArray[np.void]
    """COPY records of what the look-up reads of its results."""


class _Target(NamedTuple):
    """A recorded batch, and how its inputs are filled."""

    plan: RecordedPlan
    key_graph: _KeyGraph | None
    """None: all keys are inputs."""
    keys: NDArray[np.void]
    """COPY records of what the look-up reads."""
    inputs: NDArray[np.void]
    """COPY records of what only the network reads."""
    constants: list[tuple[NDArray[Any], NDArray[Any]]]
    """Pairs of an array and the values that it has in all batches of these sizes."""
    num_blocks: int
    num_rows: int
    """Rows of all blocks."""
    output_rows: NDArray[np.int64] | None
    """See JoinedBatch.output_rows."""


class GatheredForm(ABC):
    """How requests carry the values of a batch; checks them without Python per input."""

    inputs: NDArray[np.void]
    """INPUT records."""
    num_open_sizes: int

    @abstractmethod
    def check(self, items: int, num_requests: int, open_sizes: NDArray[np.int64], counts: NDArray[np.int64]) -> bool:
        """Whether the arrays in a list at that address are requests of one shape; see `check_tensors`."""

    @abstractmethod
    def sources(self, batch: JoinedBatch) -> Mapping[str, Source]:
        """Where in the inputs the batch's values are, by the batch's names."""


class GatheredTensorForm(GatheredForm):
    """The model's own inputs."""

    def __init__(self, spec: ModelSpec, layout: TensorLayout) -> None:
        self._tensors = spec.inputs
        self._max_elements = layout.max_elements
        self.inputs = input_records(spec, layout, frozenset())
        # Lists of different lengths have no common shape.
        self.inputs["expected"][self.inputs["expected"] == DIFFERING] = OPEN
        self.num_open_sizes = 1 + int((self.inputs["expected"] == OPEN).sum()) + bool(spec.context)

    def check(self, items: int, num_requests: int, open_sizes: NDArray[np.int64], counts: NDArray[np.int64]) -> bool:
        return bool(check_tensors(items, num_requests, ARRAY_TYPE, self._max_elements, self.inputs, open_sizes, counts))

    def sources(self, batch: JoinedBatch) -> Mapping[str, Source]:
        sources = {}
        for i, tensor in enumerate(self._tensors):
            elements = math.prod(batch.parts(tensor.name)[0].shape[1:])
            sources[tensor.name] = Source(i, tensor.dtype, elements, 0, elements, tensor.context)
        return sources


class GatheredBagForm(GatheredForm):
    """HugeCTR's inputs, with one key per slot."""

    def __init__(self, spec: ModelSpec, layout: HugectrLayout) -> None:
        names = [tensor.name for tensor in spec.inputs]
        self._max_elements = layout.max_elements
        form = layout.format
        self.inputs = np.zeros(len(names), INPUT)
        for record, tensor in zip(self.inputs, spec.inputs, strict=True):
            record["dtypes"] = dtype_addresses(np.dtype(tensor.dtype))
        self.num_open_sizes = 1
        self._slots = np.array(form.slots, np.int64)
        self._packed = np.zeros(1, PACKED)
        for field, name in (("dense", DENSE), ("keys", KEYS), ("offsets", OFFSETS)):
            self._packed[field] = names.index(name)
        self._packed["dense_dim"], self._packed["num_tables"] = form.dense_dim, len(form.slots)
        self._packed["num_slots"] = num_slots = sum(form.slots)
        self._packed["max_samples"] = form.max_samples or np.iinfo(np.int64).max
        dense, keys = names.index(DENSE), names.index(KEYS)
        self._sources = {layout.dense_input: Source(dense, spec.inputs[dense].dtype, form.dense_dim, 0, form.dense_dim)}
        for name, own in layout.columns.items():
            columns = own.start, own.stop - own.start
            self._sources[name] = Source(keys, spec.inputs[keys].dtype, num_slots, *columns)

    def check(self, items: int, num_requests: int, open_sizes: NDArray[np.int64], counts: NDArray[np.int64]) -> bool:
        form = self.inputs, self._packed, self._slots
        return bool(check_packed(items, num_requests, ARRAY_TYPE, self._max_elements, *form, open_sizes, counts))

    def sources(self, batch: JoinedBatch) -> Mapping[str, Source]:  # noqa: ARG002  they do not depend on it
        return self._sources


class CudaStaging:
    """The recorded batches of a model, and how they are filled with requests. Safe to use from several threads."""

    def __init__(self, spec: ModelSpec, layout: RequestLayout, form: GatheredForm, network: Network) -> None:
        self._spec, self._layout, self._form, self._network = spec, layout, form, network
        self._ranks = bool(spec.context)
        self._targets: dict[_Case, _Target | None] = {}
        """None: batches of this kind are not recorded."""
        self._num_misses: BoundedMemory[_Case, int] = BoundedMemory(_MAX_PLANS)

    @property
    def held(self) -> AbstractContextManager[object]:
        """See Staging."""
        return self._network.reader.device.held()

    def fill(self, arrays: Arrays, num_requests: int, outputs: Collection[str] | None) -> StagedBatch | None:
        """While the device is held: the look-up of a batch, its keys copied to its memory; see Staging.fill."""
        if num_requests > _MAX_REQUESTS or len(arrays) != num_requests * len(self._form.inputs):
            return None
        items = id(arrays)
        counts, open_sizes = np.empty(num_requests, np.int64), np.empty(self._form.num_open_sizes, np.int64)
        if not self._form.check(items, num_requests, open_sizes, counts):
            return None
        wanted = self._layout.outputs.wanted(outputs)
        case = open_sizes.tobytes(), wanted.computed
        target = self._targets[case] if case in self._targets else self._find(case, arrays)
        if target is None:
            return None
        num_blocks, num_rows = (target.num_blocks, target.num_rows) if self._ranks else (num_requests, open_sizes[0])
        copy = partial(gather, items, num_requests, len(self._form.inputs), num_blocks, int(num_rows), counts)
        copy(target.keys)
        if target.key_graph is not None and not _compute_keys(target.key_graph, copy):
            self._targets[case] = None
            return None
        for array, values in target.constants:
            array[...] = values
        num_samples = int(open_sizes[0])
        num_contexts = num_requests if self._ranks else num_samples
        lookup = target.plan.cleared()
        look_up = partial(self._look_up, lookup, partial(copy, target.inputs))
        run, output_rows = target.plan.network, target.output_rows
        return StagedBatch(lookup, look_up, run, counts, num_samples, num_contexts, wanted, output_rows)

    def _look_up(self, lookup: Lookup, copy_inputs: Callable[[], object]) -> None:
        """Launch the look-up, and copy the inputs of the network while the GPU computes it."""
        self._network.reader.look_up(lookup)
        copy_inputs()

    def _find(self, case: _Case, arrays: Arrays) -> _Target | None:
        """The recorded batch of this shape; None: there is none, or none yet."""
        num_inputs = len(self._form.inputs)
        names = [tensor.name for tensor in self._spec.inputs]
        parts = [arrays[begin : begin + num_inputs] for begin in range(0, len(arrays), num_inputs)]
        requests = [Request(dict(zip(names, part, strict=True)), None) for part in parts]
        batch = self._layout.join([self._layout.check(request) for request in requests])
        plan = self._network.known_plan(batch, case[1])
        target = self._target(plan, batch) if isinstance(plan, RecordedPlan) else None
        num_misses = 1 + (self._num_misses.get(case) or 0)
        self._num_misses.put(case, num_misses)
        if target is not None or num_misses >= _MAX_MISSES:
            self._remember(case, target)
        return target

    def _target(self, plan: RecordedPlan, batch: JoinedBatch) -> _Target | None:
        constants = [
            (staged.array, batch.array(staged.names[0]))
            for staged in (*plan.keys, *plan.inputs)
            if staged.names in ((ROW_CONTEXT,), (BLOCK_CONTEXT,))
        ]
        sources = {**self._form.sources(batch), **self._results(batch)}
        keys, inputs = (_copies(staged, batch, sources) for staged in (plan.keys, plan.inputs))
        key_graph = self._bind_key_graph(batch, sources, keys)
        if keys is None or inputs is None or (self._network.keys is not None and key_graph is None):
            return None
        num_blocks = len(batch.array(BLOCK_CONTEXT)) if self._ranks else 0
        given = keys[keys["input"] < len(self._spec.inputs)]
        return _Target(plan, key_graph, given, inputs, constants, num_blocks, batch.num_samples, batch.output_rows)

    def _results(self, batch: JoinedBatch) -> Mapping[str, Source]:
        """Where the key graph's results are."""
        arrays = {name: batch.array(name) for name in self._network.key_names}
        numbered = enumerate(arrays.items(), len(self._spec.inputs))
        return {name: Source(i, array.dtype.name, array.size, 0, array.size) for i, (name, array) in numbered}

    def _bind_key_graph(
        self, batch: JoinedBatch, sources: Mapping[str, Source], keys: NDArray[np.void] | None
    ) -> _KeyGraph | None:
        """The key graph for batches of this one's shape; None: there is none, or it cannot be bound.

        `keys`: COPY records of what the look-up reads.
        """
        graph, num_inputs = self._network.keys, len(self._spec.inputs)
        if graph is None or keys is None:
            return None
        arrays = {name: batch.array(name).copy() for name in graph.input_names}
        inputs = _copies([StagedValues((name,), array) for name, array in arrays.items()], batch, sources)
        run = graph.bind(arrays, self._network.key_names)
        if run is None or inputs is None:
            return None
        run.run()  # binds the results
        results = keys[keys["input"] >= num_inputs]
        results["input"] -= num_inputs
        return _KeyGraph(run, inputs, results) if run.results is not None else None

    def _remember(self, case: _Case, target: _Target | None) -> None:
        if len(self._targets) >= _MAX_PLANS:
            self._targets.clear()
        self._targets[case] = target


def stage_on_gpu(spec: ModelSpec, layout: RequestLayout, network: Network) -> StagingPool | None:
    """What stages requests to a model; None: the model needs something that only `run_many` supports."""
    if not can_read_arrays() or not spec.batched or not network.may_record or any(each.bags for each in spec.lookups):
        return None
    form: GatheredForm
    if isinstance(layout, TensorLayout) and all(map(is_readable, spec.inputs)):
        form = GatheredTensorForm(spec, layout)
    elif isinstance(layout, HugectrLayout):
        form = GatheredBagForm(spec, layout)
    else:
        return None
    compile_kernels()
    staging = CudaStaging(spec, layout, form, network)
    # Its memory is that of the recorded batches, which the thread that holds the device owns.
    return StagingPool(lambda: staging)


def _compute_keys(graph: _KeyGraph, copy: Callable[[NDArray[np.void]], object]) -> bool:
    """Run the key graph; False: its results have other shapes than those of the recorded batch.

    `copy`: copies from the requests.
    """
    copy(graph.inputs)
    results = graph.run.run()
    if results is not graph.run.results:
        return False
    gather(id(results), 1, len(results), 1, 1, _ONE_SAMPLE, graph.results)
    return True


def _copies(
    all_staged: Sequence[StagedValues], batch: JoinedBatch, sources: Mapping[str, Source]
) -> NDArray[np.void] | None:
    """COPY records for arrays of a recorded batch; None if one of them has anything but what sources have."""
    copies = []
    for staged in all_staged:
        if staged.names in ((ROW_CONTEXT,), (BLOCK_CONTEXT,)):
            continue
        address = address_of(staged.array)
        for name in staged.names:
            source = sources.get(name)
            conversion = None if source is None else _conversion(source.dtype, staged.array.dtype)
            if source is None or conversion is None:
                return None
            places = source.row_elements, source.first, source.num, *_steps(staged.array, source.num)
            element_bytes = np.dtype(source.dtype).itemsize
            copies.append((source.input, address, element_bytes, conversion, *places, source.is_contexts))
            address += batch.array(name).size * staged.array.itemsize
        if not staged.names:
            return None
    return np.array(copies, COPY)


def _steps(array: NDArray[Any], row_elements: int) -> tuple[int, int]:
    """Elements from one of a sample to the next, and from one sample to the next."""
    if array.flags.c_contiguous:
        return 1, row_elements
    to_next_sample, to_next_element = (stride // array.itemsize for stride in array.strides)
    return to_next_element, to_next_sample


def _conversion(given: str, wanted: np.dtype[Any]) -> int | None:
    """The code for converting elements from one type to another; None: compiled code cannot."""
    if np.dtype(given) == wanted:
        return SAME
    return _CONVERSIONS.get(given) if wanted == np.int64 else None
