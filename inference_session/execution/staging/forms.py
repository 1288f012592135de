"""The layouts of requests that compiled code stages: what each array of a request is, and how a batch follows.

A form belongs to one HostStaging: its records hold addresses of that object's memory.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from inference_session.dense_engine.base import ConcatInput, DenseEngine
from inference_session.execution.lookups import ModelLookups, VectorInput
from inference_session.execution.network import Network
from inference_session.kernels.array_headers import dtype_addresses
from inference_session.kernels.cpu.arguments import Arguments
from inference_session.kernels.cpu.requests import bag_staging, staging
from inference_session.kernels.cpu.requests.staging import DIFFERING, INPUT, LOOKUP, MAX_RANK, OPEN
from inference_session.kernels.machine_code import of_ints
from inference_session.kernels.records import PoolingCode, address_of
from inference_session.model_spec import BLOCK_CONTEXT, ROW_CONTEXT, LookupSpec, ModelSpec, NamedArrays, TensorSpec
from inference_session.requests.batch import RequestLayout
from inference_session.requests.tensor_layout import TensorLayout

if TYPE_CHECKING:  # the reader of HugeCTR's requests takes half a second to load
    from inference_session.requests.hugectr_layout import HugectrLayout

Shapes: TypeAlias = "dict[str, tuple[int, ...]]"
Memory: TypeAlias = "dict[tuple[str, int], NDArray[np.uint8]]"
"""What networks read: by kind, `input` or `vectors`, and number."""
ARRAY_TYPE = id(np.ndarray)

StagingStep: TypeAlias = "Callable[[int, int], int]"
"""A step on the way from the arrays of some requests to their look-up. Takes the address of a list of arrays and the
number of requests; returns STAGED, NOT_STAGED or NO_ROOM.
"""


class ArrayForm(ABC):
    """The arrays that requests of one layout carry."""

    inputs: NDArray[np.void]
    """INPUT records, one for each array of a request, then one for each result of the key graph."""
    names: tuple[str, ...]
    """What networks call each of them, where they read it."""
    dtypes: tuple[np.dtype[Any], ...]
    """Of the arrays of a request."""
    lookups: NDArray[np.void]
    """LOOKUP records."""
    num_open_sizes: int
    """Sizes that tell batches apart, the number of samples first."""
    ranks = False
    """Requests have a context; the number of requests is the last of these sizes."""

    @abstractmethod
    def kernels_into(self, *records: NDArray[Any]) -> tuple[StagingStep, ...]:
        """The kernel `stage` or `stage_bags`, with these records as its last arguments.

        Where there is a key graph, the two parts of it between which the keys are computed.
        """

    @abstractmethod
    def shapes(self, open_sizes: NDArray[np.int64]) -> Shapes:
        """Shapes of the keys, and of what the network reads other than vectors, in the batch that was staged last.

        open_sizes: int64 [num_open_sizes].
        """

    def constants(self, open_sizes: NDArray[np.int64]) -> NamedArrays:  # noqa: ARG002
        """What the network reads that is the same for all batches of these sizes."""
        return {}

    def fits(self, shapes: Shapes) -> bool:  # noqa: ARG002
        """Whether the sizes that must be equal are equal."""
        return True


class TensorForm(ArrayForm):
    """A model's own inputs."""

    def __init__(self, spec: ModelSpec, layout: TensorLayout, lookups: ModelLookups, network: Network) -> None:
        self._kernels = _kernels(network)
        makes_keys = network.keys.input_names if network.keys else frozenset()
        given = input_records(spec, layout, network.dense.input_names | makes_keys)
        self.names = (*(tensor.name for tensor in spec.inputs), *network.key_names)
        self.dtypes = tuple(np.dtype(tensor.dtype) for tensor in spec.inputs)
        self.inputs = np.zeros(len(self.names), INPUT)
        self.inputs[: len(given)] = given
        self.inputs["makes_keys"] = [name in makes_keys for name in self.names]
        self.inputs["vector_input"][len(given) :] = -1
        _place_given(self.inputs, self.names, lookups.vector_inputs, network.dense.concat_inputs)
        self.lookups = _lookup_records(spec, lookups, self.names)
        self.ranks = bool(spec.context)
        self.num_open_sizes = 1 + int((self.inputs["expected"] == OPEN).sum()) + self.ranks
        self._spec = spec
        self._max_elements = layout.max_elements

    def kernels_into(self, *records: NDArray[Any]) -> tuple[StagingStep, ...]:
        tensors = len(self.dtypes), self.inputs, self.lookups
        arguments = Arguments(ARRAY_TYPE, self._max_elements, *tensors, *records)
        return tuple(arguments.bound_to(of_ints(kernel)) for kernel in self._kernels)

    def shapes(self, open_sizes: NDArray[np.int64]) -> Shapes:
        # The number of samples, and that of requests, each of which has one context.
        first = int(open_sizes[0]), int(open_sizes[-1])
        shapes: Shapes = {}
        for name, record in zip(self.names, self.inputs, strict=True):
            num_rows, sizes = first[record["is_contexts"]], record["sizes"][1 : record["rank"]].tolist()
            shapes[name] = (num_rows * sizes[0], *sizes[1:]) if record["is_flat"] else (num_rows, *sizes)
        return shapes

    def constants(self, open_sizes: NDArray[np.int64]) -> NamedArrays:
        """See ArrayForm: of requests with a context, whose candidates are one block."""
        if not self.ranks:
            return {}
        contexts = np.arange(int(open_sizes[-1]))
        return {ROW_CONTEXT: np.repeat(contexts, open_sizes[0] // len(contexts)), BLOCK_CONTEXT: contexts}

    def fits(self, shapes: Shapes) -> bool:
        """See ArrayForm. Where it does not, `run_many` says what is wrong."""
        for group in self._spec.equal_sizes:
            if len({shapes[name][axis] for name, axis in group}) > 1:
                return False
        return all(
            (lookup.weights is None or shapes[lookup.weights] == shapes[lookup.keys])
            and (lookup.pooling == "none" or len(shapes[lookup.keys]) > 1)
            for lookup in self._spec.lookups
        )


class BagForm(ArrayForm):
    """DES, CATCOLUMN and ROWINDEX, as HugeCTR's clients send them."""

    def __init__(self, spec: ModelSpec, layout: HugectrLayout, lookups: ModelLookups, network: Network) -> None:
        request = layout.format
        self.names: tuple[str, ...] = (layout.dense_input, "", "")
        self.dtypes = tuple(np.dtype(tensor.dtype) for tensor in spec.inputs)
        self.inputs = np.zeros(len(spec.inputs), INPUT)
        for record, dtype, name in zip(self.inputs, self.dtypes, self.names, strict=True):
            record["dtypes"], record["element_bytes"] = dtype_addresses(dtype), dtype.itemsize
            record["is_read"], record["vector_input"] = name in network.dense.input_names, -1
        self.lookups = _plain_lookup_records(spec, lookups)
        self.lookups["rows_per_sample"] = request.slots
        self.num_open_sizes = 1
        self._slots = np.array(request.slots, np.int64)
        self._form = np.zeros(1, bag_staging.FORM)
        self._form[0] = request.dense_dim, sum(request.slots), request.max_samples or 0
        self._keys = [lookup.keys for lookup in spec.lookups]
        self._max_elements = layout.max_elements

    def kernels_into(self, *records: NDArray[Any]) -> tuple[StagingStep, ...]:
        form = self._form, self._slots
        arguments = Arguments(ARRAY_TYPE, self._max_elements, *form, self.inputs, self.lookups, *records)
        return (arguments.bound_to(of_ints(bag_staging.stage_bags)),)

    def shapes(self, open_sizes: NDArray[np.int64]) -> Shapes:
        num_samples = int(open_sizes[0])
        bags = {keys: (num_samples, slots, 0) for keys, slots in zip(self._keys, self._slots.tolist(), strict=True)}
        return {self.names[0]: (num_samples, int(self._form["dense_dim"][0])), **bags}


def given_inputs(form: ArrayForm, memory: Memory, open_sizes: NDArray[np.int64], names: Collection[str]) -> NamedArrays:
    """Those of these inputs of a network that requests give, or that follow from sizes, for the batch staged last."""
    shapes = form.shapes(open_sizes)
    inputs = {name: array for name, array in form.constants(open_sizes).items() if name in names}
    for i, dtype in enumerate(form.dtypes):
        if form.names[i] in names:
            inputs[form.names[i]] = view(memory, ("input", i), shapes[form.names[i]], dtype)
    return inputs


def enter_results(form: ArrayForm, results: Sequence[NDArray[Any]], open_sizes: NDArray[np.int64]) -> bool:
    """Enter the key graph's results for a batch in their INPUT records; False: their rows are other than samples.

    Several rows for each sample, as `keys.view(-1)` gives, are divided evenly among requests: all that matters is that
    the vectors have the order of the keys.
    """
    num_given = len(form.dtypes)
    num_rows = open_sizes[[0, -1] if form.ranks else [0]].tolist()
    in_parts = (form.lookups["first_column"] >= 0) | (form.lookups["in_matrix"] != 0)
    samplewise = {*form.lookups["keys"][in_parts].tolist()}
    for number, (record, array) in enumerate(zip(form.inputs[num_given:], results, strict=True), num_given):
        is_flat = array.ndim > 0 and len(array) not in num_rows
        if is_flat and (form.ranks or number in samplewise or not len(array) or len(array) % num_rows[0]):
            return False
        sizes = (num_rows[0], len(array) // num_rows[0], *array.shape[1:]) if is_flat else array.shape
        if not 0 < len(sizes) <= MAX_RANK:
            return False
        record["element_bytes"], record["rank"], record["address"] = array.itemsize, len(sizes), address_of(array)
        record["sizes"][: len(sizes)] = sizes
        record["is_contexts"], record["is_flat"] = not is_flat and sizes[0] != num_rows[0], is_flat
    return True


def view(memory: Memory, key: tuple[str, int], shape: Sequence[int], dtype: Any) -> NDArray[Any]:
    """The beginning of some memory as an array. An empty array needs no memory."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return np.empty(shape, dtype)
    array: NDArray[Any] = memory[key][:num_bytes].view(dtype).reshape(shape)
    return array


def has_form(spec: ModelSpec, layout: RequestLayout, network: Network) -> bool:
    """Whether the requests of a model have a form, and their look-ups are of the kinds that kernels know."""
    if not spec.batched or not spec.inputs:
        return False
    if spec.takes_hugectr_requests:
        return network.keys is None and _has_bags(spec, cast("HugectrLayout", layout), network.dense)
    types = {tensor.name: tensor.dtype for tensor in spec.inputs}
    known = {*types, *(lookup.dense_input for lookup in spec.lookups)}
    known |= {ROW_CONTEXT, BLOCK_CONTEXT} if spec.context else set()
    types.update(network.keys.output_types if network.keys else {})
    return (
        isinstance(layout, TensorLayout)
        and all(map(is_readable, spec.inputs))
        and network.dense.input_names <= known
        and all(_is_stageable(lookup, types) for lookup in spec.lookups)
    )


def create_form(spec: ModelSpec, layout: RequestLayout, lookups: ModelLookups, network: Network) -> ArrayForm:
    """The form of a model's requests, which `has_form`."""
    if spec.takes_hugectr_requests:
        return BagForm(spec, cast("HugectrLayout", layout), lookups, network)
    return TensorForm(spec, cast("TensorLayout", layout), lookups, network)


def compile_kernels(spec: ModelSpec, network: Network) -> None:
    """Compile or load the kernels of a model's form."""
    if spec.takes_hugectr_requests:
        bag_staging.compile_kernels()
    else:
        staging.compile_kernels(*_kernels(network))


def _kernels(network: Network) -> tuple[Callable[[int, int, int], int], ...]:
    """Those of a TensorForm."""
    return (staging.stage,) if network.keys is None else (staging.read, staging.describe)


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


def _is_stageable(lookup: LookupSpec, types: Mapping[str, str]) -> bool:
    """Whether the keys of a look-up, and their weights, are of types that the kernels read."""
    return (
        lookup.bags is None
        and types[lookup.keys] in ("int64", "int32")
        and (lookup.weights is None or types[lookup.weights] == "float32")
    )


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
    records: NDArray[np.void],
    names: Sequence[str],
    vector_inputs: Sequence[VectorInput],
    concat_inputs: Collection[ConcatInput],
) -> None:
    """Enter in INPUT records which of them are columns of concat inputs."""
    numbers = {each.dense_input: number for number, each in enumerate(vector_inputs)}
    for each in concat_inputs:
        column = each.first_given
        for given in each.given:
            record = records[names.index(given.name)]
            record["vector_input"], record["column_bytes"] = numbers[each.name], column * record["element_bytes"]
            column += given.width


def _lookup_records(spec: ModelSpec, lookups: ModelLookups, names: Sequence[str]) -> NDArray[np.void]:
    """LOOKUP records; `names`: of the INPUT records."""
    records = _plain_lookup_records(spec, lookups)
    for record, lookup in zip(records, spec.lookups, strict=True):
        first, last = lookup.columns or (-1, -1)
        record["keys"] = names.index(lookup.keys)
        record["weights"] = names.index(lookup.weights) if lookup.weights else -1
        record["first_column"], record["num_columns"] = first, last - first
    return records


def _plain_lookup_records(spec: ModelSpec, lookups: ModelLookups) -> NDArray[np.void]:
    """LOOKUP records that say which table is looked up, and which vector input they fill."""
    records = np.zeros(len(spec.lookups), LOOKUP)
    records["table"] = spec.looked_up_tables
    for record, lookup, number in zip(records, spec.lookups, lookups.vector_input_of, strict=True):
        record["pooling"] = PoolingCode[lookup.pooling.upper()]
        record["embedding_dim"] = spec.tables[record["table"]].embedding_dim
        record["vector_input"], record["in_matrix"] = number, lookups.vector_inputs[number].is_matrix
    return records
