"""The look-ups of a model, and the records that describe them, as far as they follow from the shapes of keys alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.dense_engine.base import ConcatInput
from inference_session.errors import InvalidRequestError
from inference_session.kernels.records import KEY_BYTES, SEGMENT, PoolingCode, VectorCode
from inference_session.model_spec import LookupSpec, ModelSpec
from inference_session.requests.batch import JoinedBatch, Part, RaggedBags


@dataclass(frozen=True)
class VectorInput:
    """One input of the dense network, and the look-ups that fill it."""

    dense_input: str
    members: tuple[int, ...]
    is_matrix: bool
    """Whether the vectors of its look-ups are side by side in a matrix (LookupSpec.joined)."""
    dtype: np.dtype[Any]
    """The type of the vectors: float32, or float16."""
    concat_input: ConcatInput | None
    """What it is where requests fill some of its columns; None: look-ups fill all of it."""

    def width(self, num_columns: int) -> int:
        """Columns of the matrix, with these for vectors; InvalidRequestError where the network reads others."""
        if self.concat_input is None:
            return num_columns
        if num_columns != self.concat_input.first_given:
            raise InvalidRequestError(
                f"the network cannot compute these values: vectors for {', '.join(self.concat_input.vectors)} have"
                f" {num_columns} elements for each sample, expected {self.concat_input.first_given}"
            )
        return self.concat_input.width


class SeparateOutput(NamedTuple):
    """A look-up of several bags in each sample, whose vectors are pooled bag after bag into memory of their own, and
    then copied into the columns of a matrix.
    """

    lookup: int
    vector_input: str
    """That is the matrix."""
    first: int
    """The first of the columns."""
    width: int


@dataclass(frozen=True)
class Geometry:
    """All that follows from the shapes of the keys."""

    segments: NDArray[np.void]
    """Complete except for addresses. They count from the start of the vector input (outputs) or the matrix (keys)."""
    num_keys: NDArray[np.int64]
    """Per look-up; 0 where bags are ragged."""
    shapes: tuple[tuple[int, ...], ...]
    """The shape of each vector input's array."""
    bare: tuple[bool, ...]
    """For each vector input, whether its keys have no first dimension. They get one for look-ups; vectors lose it."""
    separate_outputs: tuple[SeparateOutput, ...]


class MatrixLookups(NamedTuple):
    """Look-ups that read columns of one matrix of keys."""

    lookups: list[int]
    columns: NDArray[np.int64]
    """The first column of each look-up."""
    key_bytes: int
    row_stride: int
    """Bytes from one row of the matrix to the next."""


class ModelLookups:
    """The look-ups of one model: which keys they read from a batch, and how their segments follow from its shapes."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        by_column: bool,
        keys_follow_inputs: bool,
        narrow_inputs: Collection[str] = (),
        concat_inputs: Collection[ConcatInput] = (),
    ) -> None:
        """Describe what follows from the model alone.

        Args:
            spec: the model.
            by_column: whether matrices of keys are staged column by column (Device.reads_by_column).
            keys_follow_inputs: whether a look-up's keys are an input of the model (RequestLayout.keys_follow_inputs).
            narrow_inputs: inputs of the dense network that it takes in float16 (DenseEngine.narrow_inputs).
            concat_inputs: those that look-ups fill together with inputs of requests (DenseEngine.concat_inputs).
        """
        self.lookups = spec.lookups
        self._by_column = by_column
        self._counts_samples = spec.batched
        self._tables = spec.looked_up_tables
        self._table_specs = [spec.tables[number] for number in self._tables]
        self.vector_inputs = _vector_inputs(spec.lookups, narrow_inputs, concat_inputs)
        self.vector_input_of = np.empty(len(spec.lookups), np.intp)
        """For each look-up, the number of its vector input."""
        for number, vector_input in enumerate(self.vector_inputs):
            self.vector_input_of[list(vector_input.members)] = number
        self.key_names = [lookup.dense_input if lookup.bags else lookup.keys for lookup in spec.lookups]
        self._bagged = [lookup for lookup in spec.lookups if lookup.bags]
        self.weighted = [(i, lookup.keys, lookup.weights) for i, lookup in enumerate(spec.lookups) if lookup.weights]
        self.packed = _packed(spec)
        """Look-ups that read columns of one matrix of keys, by its name."""
        self.loose = [i for i, lookup in enumerate(spec.lookups) if lookup.columns is None]
        """Look-ups with keys of their own, not columns of a matrix."""
        regular = keys_follow_inputs and spec.batched
        self._irregular = [i for i, lookup in enumerate(spec.lookups) if not (regular and _is_regular(lookup, spec))]

    def cut_bags(self, batch: JoinedBatch) -> None:
        """Make bags of the lists of keys that are divided by offsets."""
        for lookup in self._bagged:
            batch.replace(lookup.dense_input, [_cut(batch, lookup)])

    def irregular_shapes(self, batch: JoinedBatch) -> tuple[tuple[int, ...], ...]:
        """The shapes of keys that do not follow from the shapes of the requests."""
        ranks = [len(batch.parts(self.key_names[i])[0].shape) for i in self._irregular]
        return tuple([(rank, *self._shape(i, batch)) for rank, i in zip(ranks, self._irregular, strict=True)])

    @property
    def follow_shapes(self) -> bool:
        """Whether batches are laid out alike that have the same number of samples, the same `shapes`, the same
        `irregular_shapes`, and no ragged keys.
        """
        return bool(self.lookups) and self._counts_samples  # where samples are not counted, `shapes` is not enough

    def is_ragged(self, batch: JoinedBatch) -> bool:
        """Whether any keys are bags of different lengths."""
        return any(isinstance(batch.parts(self.key_names[i])[0], RaggedBags) for i in self._irregular)

    def geometry(self, batch: JoinedBatch) -> Geometry:
        """The geometry of the keys of a batch. Scalars count as one row."""
        keys = tuple(self._shape(i, batch) for i in range(len(self.lookups)))
        segments = np.zeros(len(keys), SEGMENT)
        segments["table"] = self._tables
        segments["pooling"] = [PoolingCode[lookup.pooling.upper()] for lookup in self.lookups]
        segments["key_bytes"] = segments["key_stride"] = KEY_BYTES
        described = [
            self._describe_matrix(each, segments, keys)
            if each.is_matrix
            else (self._describe_alone(each, segments, keys), [])
            for each in self.vector_inputs
        ]
        segments["row_stride"] = segments["keys_per_row"] * KEY_BYTES
        for members in self.packed.values():
            self._describe_packed(members, segments, keys[members.lookups[0]][0])
        num_keys = np.array([math.prod(shape) for shape in keys], np.int64)
        bare = tuple(self._is_bare(each, batch) for each in self.vector_inputs)
        separate = tuple(each for _, found in described for each in found)
        return Geometry(segments, num_keys, tuple(shape for shape, _ in described), bare, separate)

    def _is_bare(self, vector_input: VectorInput, batch: JoinedBatch) -> bool:
        """Whether its keys have no first dimension."""
        first = vector_input.members[0]
        return not vector_input.is_matrix and _is_bare(batch.parts(self.key_names[first])[0], self.lookups[first])

    def _shape(self, i: int, batch: JoinedBatch) -> tuple[int, ...]:
        return _shape(batch.parts(self.key_names[i]), self.lookups[i])

    def _describe_packed(self, members: MatrixLookups, segments: NDArray[np.void], num_rows: int) -> None:
        """Enter where in the matrix of keys each look-up finds its keys."""
        strides = members.key_bytes, num_rows * members.key_bytes
        row_stride, key_stride = strides if self._by_column else (members.row_stride, members.key_bytes)
        segments["key_bytes"][members.lookups] = members.key_bytes
        segments["row_stride"][members.lookups] = row_stride
        segments["key_stride"][members.lookups] = key_stride
        segments["keys_address"][members.lookups] = members.columns * key_stride

    def _describe_matrix(
        self, vector_input: VectorInput, segments: NDArray[np.void], keys: Sequence[tuple[int, ...]]
    ) -> tuple[tuple[int, ...], list[SeparateOutput]]:
        """Put the vectors of its look-ups side by side in one matrix; returns its shape, and what is copied there."""
        self._check_samples(vector_input, keys)
        members, item_bytes = vector_input.members, vector_input.dtype.itemsize
        num_samples, bags = keys[members[0]][0], [self._bags(i, keys[i]) for i in members]
        dims = [self._table_specs[i].embedding_dim for i in members]
        ends = list(accumulate(num_bags * dim for (num_bags, _), dim in zip(bags, dims, strict=True)))
        width, begin, separate = vector_input.width(ends[-1]), 0, []
        for i, (num_bags, bag_keys), dim, end in zip(members, bags, dims, ends, strict=True):
            if num_bags > 1 and self._pools(i, bag_keys):
                separate.append(SeparateOutput(i, vector_input.dense_input, begin, end - begin))
                rows = num_samples * num_bags, bag_keys, dim * item_bytes
            else:
                rows = num_samples, num_bags * bag_keys, width * item_bytes
            segments["num_rows"][i], segments["keys_per_row"][i], segments["output_stride"][i] = rows
            segments["output_address"][i] = begin * item_bytes
            if not self._pools(i, bag_keys):
                segments["pooling"][i] = PoolingCode.NONE
            begin = end
        segments["output_code"][list(members)] = _code_of(vector_input)
        return (num_samples, width), separate

    def _pools(self, i: int, bag_keys: int) -> bool:
        """Whether vectors are pooled: a bag of one key is that key's vector."""
        return bag_keys != 1 or self.lookups[i].weights is not None

    def _bags(self, i: int, keys: tuple[int, ...]) -> tuple[int, int]:
        """Bags of a sample, and keys of a bag; keys that are not pooled count as bags of one."""
        if self.lookups[i].pooling == "none":
            return math.prod(keys[1:]), 1
        return math.prod(keys[1:-1]), keys[-1]

    def _check_samples(self, vector_input: VectorInput, keys: Sequence[tuple[int, ...]]) -> None:
        """Refuse keys that cannot stand side by side: the kernel would write past the end of the matrix."""
        first, *others = vector_input.members
        for i in others:
            if keys[i][0] != keys[first][0]:
                raise InvalidRequestError(
                    f"keys {self.lookups[i].keys!r} have {keys[i][0]} samples, but {self.lookups[first].keys!r} have "
                    f"{keys[first][0]}: their vectors form one matrix, so both must have the same number"
                )

    def _describe_alone(
        self, vector_input: VectorInput, segments: NDArray[np.void], keys: Sequence[tuple[int, ...]]
    ) -> tuple[int, ...]:
        """Give a look-up an array of its own; returns the shape."""
        i = vector_input.members[0]
        table, shape = self._table_specs[i], keys[i]
        pooled = self.lookups[i].pooling != "none"
        rows, keys_per_row = (shape[:-1], shape[-1]) if pooled else (shape, 1)
        segments["num_rows"][i] = math.prod(rows)
        segments["keys_per_row"][i] = keys_per_row
        if not self._pools(i, keys_per_row):
            segments["pooling"][i] = PoolingCode.NONE
        segments["output_stride"][i] = table.embedding_dim * vector_input.dtype.itemsize
        segments["output_code"][i] = _code_of(vector_input)
        return (*rows, table.embedding_dim) if pooled or table.row_shape is None else (*rows, *table.row_shape)


def _vector_inputs(
    lookups: Sequence[LookupSpec], narrow_inputs: Collection[str], concat_inputs: Collection[ConcatInput]
) -> tuple[VectorInput, ...]:
    members: dict[str, list[int]] = {}
    for i, lookup in enumerate(lookups):
        members.setdefault(lookup.dense_input, []).append(i)
    dtypes = {name: np.dtype(np.float16 if name in narrow_inputs else np.float32) for name in members}
    found = {each.name: each for each in concat_inputs}
    return tuple(
        VectorInput(name, tuple(m), lookups[m[0]].joined, dtypes[name], found.get(name)) for name, m in members.items()
    )


def _code_of(vector_input: VectorInput) -> VectorCode:
    return VectorCode[vector_input.dtype.name.upper()]


def _is_bare(keys: Part, lookup: LookupSpec) -> bool:
    """Whether the keys are a scalar or, where they are pooled, one bag."""
    return len(keys.shape) <= (lookup.pooling != "none") and not isinstance(keys, RaggedBags)


def _packed(spec: ModelSpec) -> dict[str, MatrixLookups]:
    """The look-ups that read columns of a matrix, by the matrix's name."""
    packed = {}
    for tensor in spec.inputs:
        lookups = [i for i, lookup in enumerate(spec.lookups) if lookup.keys == tensor.name and lookup.columns]
        if lookups:
            key_bytes = np.dtype(tensor.dtype).itemsize
            begins = np.array([(spec.lookups[i].columns or (0, 0))[0] for i in lookups], np.int64)
            packed[tensor.name] = MatrixLookups(lookups, begins, key_bytes, tensor.shape[1] * key_bytes)
    return packed


def _is_regular(lookup: LookupSpec, spec: ModelSpec) -> bool:
    """Whether the keys are [samples, …] where the shapes of the requests determine all sizes but the first."""
    shapes = [tensor.shape for tensor in spec.inputs if tensor.name == lookup.keys]
    if lookup.columns is not None:
        return True
    return bool(shapes) and (lookup.pooling == "none" or (len(shapes[0]) > 1 and shapes[0][-1] >= 0))


def _shape(parts: list[Part], lookup: LookupSpec) -> tuple[int, ...]:
    """The shape of all keys of a look-up. A scalar counts as a row, and pooled keys without bags as one bag."""
    first = parts[0]
    shape = first.shape
    if lookup.columns is not None:
        shape = (shape[0], lookup.columns[1] - lookup.columns[0])
    elif isinstance(first, RaggedBags):
        shape = (*shape, 0)  # the bags have different lengths
    elif _is_bare(first, lookup):
        shape = (1, *shape)
    if len(parts) == 1:
        return shape
    return (sum(part.shape[0] for part in parts), *shape[1:])


def _cut(batch: JoinedBatch, lookup: LookupSpec) -> RaggedBags:
    """Cut a list of keys into bags as ONNX's Slice does: negative positions count from the end, larger ones are it."""
    keys, begins, ends = (batch.array(name) for name in (lookup.keys, *(lookup.bags or ())))
    if begins.ndim != 1 or begins.shape != ends.shape:
        raise InvalidRequestError(
            f"the bags of {lookup.keys!r} have begins of shape {list(begins.shape)} and ends of shape"
            f" {list(ends.shape)}, expected one begin and one end for each bag, [n]"
        )
    if len(begins) and (begins.min() < 0 or ends.max() > len(keys) or (begins > ends).any()):  # unusual
        begins, ends = (np.where(at < 0, at + len(keys), at).clip(0, len(keys)) for at in (begins, ends))
        ends = np.maximum(begins, ends)
    num_keys = int((ends - begins).sum())
    if num_keys > len(keys):
        raise InvalidRequestError(
            f"the bags of {lookup.keys!r} overlap: they hold {num_keys} keys, but the list has {len(keys)}"
        )
    return RaggedBags(keys, begins, ends, begins.shape, num_keys)
