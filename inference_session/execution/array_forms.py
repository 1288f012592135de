"""The layouts of requests that compiled code stages: what each array of a request is, and how a batch follows.

A form belongs to one HostStaging: its records hold addresses of that object's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from inference_session.dense_engine.base import DenseEngine, JoinedInput
from inference_session.execution.lookups import ModelLookups, VectorInput
from inference_session.kernels.array_headers import dtype_addresses
from inference_session.kernels.cpu import bag_staging, staging
from inference_session.kernels.cpu.arguments import Arguments
from inference_session.kernels.cpu.staging import DIFFERING, INPUT, LOOKUP, MAX_RANK, OPEN
from inference_session.kernels.machine_code import of_ints
from inference_session.kernels.records import PoolingCode
from inference_session.model_spec import BLOCK_CONTEXT, ROW_CONTEXT, LookupSpec, ModelSpec, TensorSpec
from inference_session.requests.batch import RequestLayout
from inference_session.requests.tensor_layout import TensorLayout

if TYPE_CHECKING:  # the reader of HugeCTR's requests takes half a second to load
    from inference_session.requests.hugectr_layout import HugectrLayout

Shapes: TypeAlias = "dict[str, tuple[int, ...]]"
ARRAY_TYPE = id(np.ndarray)

StageKernel: TypeAlias = "Callable[[int, int], int]"
"""Reads the arrays of some requests, and describes their look-up. Takes the address of a list of arrays and the number
of requests; returns STAGED, NOT_STAGED or NO_ROOM.
"""


class ArrayForm(Protocol):
    """The arrays that requests of one layout carry."""

    inputs: NDArray[np.void]
    """INPUT records, one for each array of a request."""
    names: tuple[str, ...]
    """What the network calls each of them, where it reads it."""
    lookups: NDArray[np.void]
    """LOOKUP records."""
    num_open_sizes: int
    """Sizes that tell batches apart, the number of samples first."""

    def stage_into(self, *records: NDArray[Any]) -> StageKernel:
        """The kernel `stage` or `stage_bags`, with these records as its last arguments."""

    def shapes(self, open_sizes: NDArray[np.int64]) -> Shapes:
        """Shapes of the keys, and of what the network reads other than vectors, in the batch that was staged last."""

    def constants(self, open_sizes: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        """What the network reads that is the same for all batches of these sizes."""

    def fits(self, shapes: Shapes) -> bool:
        """Whether the sizes that must be equal are equal."""


class TensorForm:
    """A model's own inputs."""

    def __init__(self, spec: ModelSpec, layout: TensorLayout, lookups: ModelLookups, dense: DenseEngine) -> None:
        self.inputs = input_records(spec, layout, dense.input_names)
        _place_given(self.inputs, [tensor.name for tensor in spec.inputs], lookups.vector_inputs, dense.joined)
        self.names = tuple(tensor.name for tensor in spec.inputs)
        self.lookups = _lookup_records(spec, lookups)
        self._ranks = bool(spec.context)
        self.num_open_sizes = 1 + int((self.inputs["expected"] == OPEN).sum()) + self._ranks
        self._spec = spec
        self._max_elements = layout.max_elements

    def stage_into(self, *records: NDArray[Any]) -> StageKernel:
        """See ArrayForm."""
        arguments = Arguments(ARRAY_TYPE, self._max_elements, self.inputs, self.lookups, *records)
        return arguments.bound_to(of_ints(staging.stage))

    def shapes(self, open_sizes: NDArray[np.int64]) -> Shapes:
        """See ArrayForm."""
        # The number of samples, and that of requests, each of which has one context.
        first = int(open_sizes[0]), int(open_sizes[-1])
        return {
            tensor.name: (first[tensor.context], *record["sizes"][1 : record["rank"]].tolist())
            for tensor, record in zip(self._spec.inputs, self.inputs, strict=True)
        }

    def constants(self, open_sizes: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        """See ArrayForm: of requests with a context, whose candidates are one block."""
        if not self._ranks:
            return {}
        contexts = np.arange(int(open_sizes[-1]))
        return {ROW_CONTEXT: np.repeat(contexts, open_sizes[0] // len(contexts)), BLOCK_CONTEXT: contexts}

    def fits(self, shapes: Shapes) -> bool:
        """See ArrayForm. Where it does not, `run_many` says what is wrong."""
        for group in self._spec.equal_sizes:
            if len({shapes[name][axis] for name, axis in group}) > 1:
                return False
        weighted = [lookup for lookup in self._spec.lookups if lookup.weights is not None]
        return all(shapes[lookup.weights or ""] == shapes[lookup.keys] for lookup in weighted)


class BagForm:
    """DES, CATCOLUMN and ROWINDEX, as HugeCTR's clients send them."""

    def __init__(self, spec: ModelSpec, layout: HugectrLayout, lookups: ModelLookups, dense: DenseEngine) -> None:
        request = layout.format
        self.names: tuple[str, ...] = (layout.dense_input, "", "")
        self.inputs = np.zeros(len(spec.inputs), INPUT)
        for record, tensor, name in zip(self.inputs, spec.inputs, self.names, strict=True):
            dtype = np.dtype(tensor.dtype)
            record["dtypes"], record["element_bytes"] = dtype_addresses(dtype), dtype.itemsize
            record["is_read"], record["vector_input"] = name in dense.input_names, -1
        self.lookups = _plain_lookup_records(spec, lookups)
        self.lookups["rows_per_sample"] = request.slots
        self.num_open_sizes = 1
        self._slots = np.array(request.slots, np.int64)
        self._form = np.zeros(1, bag_staging.FORM)
        self._form[0] = request.dense_dim, sum(request.slots), request.max_samples or 0
        self._keys = [lookup.keys for lookup in spec.lookups]
        self._max_elements = layout.max_elements

    def stage_into(self, *records: NDArray[Any]) -> StageKernel:
        """See ArrayForm."""
        form = self._form, self._slots
        arguments = Arguments(ARRAY_TYPE, self._max_elements, *form, self.inputs, self.lookups, *records)
        return arguments.bound_to(of_ints(bag_staging.stage_bags))

    def shapes(self, open_sizes: NDArray[np.int64]) -> Shapes:
        """See ArrayForm."""
        num_samples = int(open_sizes[0])
        bags = {keys: (num_samples, slots, 0) for keys, slots in zip(self._keys, self._slots.tolist(), strict=True)}
        return {self.names[0]: (num_samples, int(self._form["dense_dim"][0])), **bags}

    def constants(self, open_sizes: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:  # noqa: ARG002
        """See ArrayForm."""
        return {}

    def fits(self, shapes: Shapes) -> bool:  # noqa: ARG002
        """See ArrayForm."""
        return True


def has_form(spec: ModelSpec, layout: RequestLayout, dense: DenseEngine) -> bool:
    """Whether the requests of a model have a form, and their look-ups are of the kinds that kernels know."""
    if not spec.batched or not spec.inputs:
        return False
    if spec.takes_hugectr_requests:
        return _has_bags(spec, cast("HugectrLayout", layout), dense)
    tensors = {tensor.name: tensor for tensor in spec.inputs}
    known = {*tensors, *(lookup.dense_input for lookup in spec.lookups)}
    known |= {ROW_CONTEXT, BLOCK_CONTEXT} if spec.context else set()
    return (
        isinstance(layout, TensorLayout)
        and all(map(is_readable, spec.inputs))
        and dense.input_names <= known
        and all(_is_stageable(lookup, tensors) for lookup in spec.lookups)
    )


def create_form(spec: ModelSpec, layout: RequestLayout, lookups: ModelLookups, dense: DenseEngine) -> ArrayForm:
    """The form of a model's requests, which `has_form`."""
    if spec.takes_hugectr_requests:
        return BagForm(spec, cast("HugectrLayout", layout), lookups, dense)
    return TensorForm(spec, cast("TensorLayout", layout), lookups, dense)


def compile_kernels(spec: ModelSpec) -> None:
    """Compile or load the kernel of a model's form."""
    (bag_staging if spec.takes_hugectr_requests else staging).compile_kernels()


def _has_bags(spec: ModelSpec, layout: HugectrLayout, dense: DenseEngine) -> bool:
    """Whether there is a look-up for each table of ROWINDEX, in their order."""
    slots, lookups = layout.format.slots, spec.lookups
    known = {layout.dense_input, *(lookup.dense_input for lookup in lookups)}
    return (
        [lookup.keys for lookup in lookups] == [name for name, _ in layout.parts]
        and all(width > 0 for width in slots)
        and all(lookup.pooling != "none" and not lookup.joined and not lookup.weights for lookup in lookups)
        and len({lookup.dense_input for lookup in lookups}) == len(lookups)
        and dense.input_names <= known
    )


def is_readable(tensor: TensorSpec) -> bool:
    """Whether compiled code reads arrays of this type and rank. NumPy keeps the dtype objects of numbers for good, so
    that the address of one means that type.
    """
    return np.dtype(tensor.dtype).kind in "biufc" and 0 < len(tensor.shape) <= MAX_RANK


def _is_stageable(lookup: LookupSpec, tensors: Mapping[str, TensorSpec]) -> bool:
    """Whether the keys of a look-up, and their weights, are inputs of types that the kernels read."""
    keys, weights = tensors.get(lookup.keys), tensors.get(lookup.weights or "")
    if keys is None or lookup.bags is not None or np.dtype(keys.dtype) not in (np.int64, np.int32):
        return False
    if lookup.pooling != "none" and len(keys.shape) < 2:
        return False
    return lookup.weights is None or (weights is not None and np.dtype(weights.dtype) == np.float32)


def input_records(spec: ModelSpec, layout: TensorLayout, read: Collection[str]) -> NDArray[np.void]:
    """INPUT records of a model's inputs; `read`: those that the network reads."""
    records = np.zeros(len(spec.inputs), INPUT)
    bound_sizes = {pair for group in spec.equal_sizes for pair in group}
    for record, tensor in zip(records, spec.inputs, strict=True):
        dtype, rank = np.dtype(tensor.dtype), len(tensor.shape)
        record["dtypes"], record["element_bytes"], record["rank"] = dtype_addresses(dtype), dtype.itemsize, rank
        record["expected"] = -3
        record["expected"][1:rank] = tensor.shape[1:]
        if tensor.name in layout.ragged and (tensor.name, rank - 1) not in bound_sizes:
            record["expected"][rank - 1] = DIFFERING
        record["sizes"] = np.maximum(record["expected"], 0)
        record["is_read"], record["is_contexts"] = tensor.name in read, tensor.context
    records["vector_input"] = -1
    return records


def _place_given(
    records: NDArray[np.void], names: list[str], vector_inputs: Sequence[VectorInput], joined: Collection[JoinedInput]
) -> None:
    """Enter in INPUT records which of them are columns of joined inputs."""
    numbers = {each.dense_input: number for number, each in enumerate(vector_inputs)}
    for each in joined:
        column = each.first_given
        for given in each.given:
            record = records[names.index(given.name)]
            record["vector_input"], record["column_bytes"] = numbers[each.name], column * record["element_bytes"]
            column += given.width


def _lookup_records(spec: ModelSpec, lookups: ModelLookups) -> NDArray[np.void]:
    records = _plain_lookup_records(spec, lookups)
    inputs = {tensor.name: i for i, tensor in enumerate(spec.inputs)}
    for record, lookup in zip(records, spec.lookups, strict=True):
        first, last = lookup.columns or (-1, -1)
        record["keys"] = inputs[lookup.keys]
        record["weights"] = inputs[lookup.weights] if lookup.weights else -1
        record["first_column"], record["num_columns"] = first, last - first
        record["is_contexts"] = spec.inputs[record["keys"]].context
    return records


def _plain_lookup_records(spec: ModelSpec, lookups: ModelLookups) -> NDArray[np.void]:
    """LOOKUP records that say which table is looked up, and which vector input they fill."""
    records = np.zeros(len(spec.lookups), LOOKUP)
    tables = {table.folder: i for i, table in enumerate(spec.tables)}
    for record, lookup, number in zip(records, spec.lookups, lookups.vector_input_of, strict=True):
        record["table"], record["pooling"] = tables[lookup.table], PoolingCode[lookup.pooling.upper()]
        record["embedding_dim"] = spec.tables[record["table"]].embedding_dim
        record["vector_input"], record["joined"] = number, lookups.vector_inputs[number].joined
    return records
