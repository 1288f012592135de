"""From keys to the dense network's inputs: what is known before a request comes, and what is filled in when it does.

Everything that depends on the model and on the shapes of the keys is computed once and kept as an array of `SEGMENT`
records; a batch then costs a copy of that array, the addresses of its keys, and one call of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import InvalidRequestError
from inference_session.kernels.records import SEGMENT, PoolingCode, address_of
from inference_session.model_spec import LookupSpec, ModelSpec
from inference_session.requests.batch import JoinedBatch, Part, Ragged, Staged
from inference_session.rows import RowSource
from inference_session.sizing.key_recorder import KeyRecorder

_MAX_GEOMETRIES = 1024
_FLOAT_BYTES = 4
_KEY_BYTES = 8
_NO_COUNTS = np.empty(0, np.int64)


class PlacedKeys(NamedTuple):
    """A batch's look-up, and where its results are. Whatever the kernel reads by address is held here."""

    segments: NDArray[np.void]
    num_keys: NDArray[np.int64]
    """Per look-up."""
    num_unknown: NDArray[np.int64]
    """Keys per look-up that were answered with the default vector; zeros until it is run."""
    vectors: dict[str, NDArray[np.float32]]
    """The dense network's inputs."""
    staged: list[Staged]


@dataclass(frozen=True)
class _Block:
    """One input of the dense network, and the look-ups that fill it."""

    dense_input: str
    members: tuple[int, ...]
    joined: bool


@dataclass(frozen=True)
class _Geometry:
    """All that follows from the shapes of the keys."""

    segments: NDArray[np.void]
    """Complete but for addresses: an output's is its offset within the block, a key's within its matrix."""
    num_keys: NDArray[np.int64]
    """Per look-up; 0 where bags are ragged."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the array of each block."""


class _Packed(NamedTuple):
    """Look-ups that read columns of one matrix of keys."""

    lookups: list[int]
    columns: NDArray[np.int64]
    """The first of each look-up."""
    key_bytes: int
    row_stride: int
    """Bytes from one row of the matrix to the next."""


class LookupPlan:
    """The look-ups of one model, over its tables. Immutable but for a bounded memory of shapes seen."""

    def __init__(self, spec: ModelSpec, rows: RowSource) -> None:
        self._lookups = spec.lookups
        self._counts_samples = spec.batched
        self._rows = rows
        self.recorder: KeyRecorder | None = None
        """Is told all keys that were looked up."""
        position = {table.folder: i for i, table in enumerate(spec.tables)}
        self._table_positions = [position[lookup.table] for lookup in spec.lookups]
        self._table_specs = [spec.tables[i] for i in self._table_positions]
        self._blocks = _blocks(spec.lookups)
        self._block_of = np.empty(len(spec.lookups), np.intp)
        for number, block in enumerate(self._blocks):
            self._block_of[list(block.members)] = number
        self._key_names = [lookup.dense_input if lookup.bags else lookup.keys for lookup in spec.lookups]
        self._bagged = [lookup for lookup in spec.lookups if lookup.bags]
        self._weighted = [(i, lookup.keys, lookup.weights) for i, lookup in enumerate(spec.lookups) if lookup.weights]
        self._packed = _packed(spec)
        self._loose = [i for i, lookup in enumerate(spec.lookups) if lookup.columns is None]
        """Look-ups with keys of their own, not columns of a matrix."""
        self._irregular = [i for i, lookup in enumerate(spec.lookups) if not _is_regular(lookup, spec)]
        self._geometries: dict[Hashable, _Geometry] = {}

    def run(self, batch: JoinedBatch) -> PlacedKeys:
        """Look up all keys of a batch at once; raises what RowSource.look_up does."""
        if not self._lookups:
            return PlacedKeys(np.empty(0, SEGMENT), _NO_COUNTS, _NO_COUNTS, {}, [])
        placed = self.place(batch)
        self._rows.look_up(placed.segments, placed.num_keys, placed.num_unknown)
        self.record(placed)
        return placed

    def follows_shapes(self, computed: Collection[str]) -> bool:
        """Whether all is laid out alike in batches with the same number of samples, the same `shapes`, and the same
        shapes of what is `computed` out of their inputs.
        """
        if not self._lookups or not self._counts_samples:  # where samples are not counted, `shapes` tell nothing
            return False
        irregular = [self._lookups[i] for i in self._irregular]
        return all(lookup.keys in computed and not lookup.bags for lookup in irregular)

    def record(self, placed: PlacedKeys) -> None:
        """Tell the recorder what was looked up."""
        if self.recorder is not None:
            self.recorder.record(placed.segments, placed.num_keys)

    def place(self, batch: JoinedBatch) -> PlacedKeys:
        """Lay out the keys of a batch, and room for the vectors."""
        for lookup in self._bagged:
            batch.replace(lookup.dense_input, [_cut(batch, lookup)])
        geometry = self._geometry(batch)
        vectors = [self._rows.empty(shape) for shape in geometry.shapes]
        segments = geometry.segments.copy()
        addresses = [address_of(array) for array in vectors]
        segments["output_address"] += addresses[0] if len(addresses) == 1 else np.array(addresses)[self._block_of]
        num_keys = geometry.num_keys
        held = [*self._fill_packed(segments, batch), *self._fill_weights(segments, batch)]
        if self._loose:
            num_keys = num_keys.copy()
            held += self._fill_loose(segments, batch, num_keys)
        num_unknown = self._rows.counts(len(segments))
        return PlacedKeys(segments, num_keys, num_unknown, self._inputs(vectors, batch), held)

    def _fill_loose(self, segments: NDArray[np.void], batch: JoinedBatch, num_keys: NDArray[np.int64]) -> list[Staged]:
        """Lay the keys that are no columns behind each other and enter where; returns what must stay alive."""
        held: list[Staged] = []
        even: dict[int, list[Part]] = {}
        for i in self._loose:
            parts = batch.parts(self._key_names[i])
            if isinstance(parts[0], Ragged):
                bags = _joined_bags(parts)  # type: ignore[arg-type]  # the others are ragged as well
                num_keys[i] = bags.num_keys
                staged = [self._rows.stage(array) for array in (bags.values, bags.begins, bags.ends)]
                for field, array in zip(("keys_address", "begins_address", "ends_address"), staged, strict=True):
                    segments[field][i] = address_of(array)
                held += [Staged((), array) for array in staged]
            else:
                even[i] = parts
        if even:
            places = list(even)
            keys = _laid_out([part for parts in even.values() for part in parts])  # type: ignore[misc]
            staged_keys = self._rows.stage(keys)
            held.append(Staged(tuple(self._key_names[i] for i in places), staged_keys))
            counts = num_keys[places]
            segments["keys_address"][places] = address_of(staged_keys) + _KEY_BYTES * (np.cumsum(counts) - counts)
        return held

    def _fill_packed(self, segments: NDArray[np.void], batch: JoinedBatch) -> list[Staged]:
        """Enter the keys that are columns of a matrix, where they lie; returns what must stay alive."""
        held = []
        for name, members in self._packed.items():
            keys = batch.array(name)
            if self._rows.by_column:
                matrix = self._rows.stage(keys.T).T
            else:
                matrix = self._rows.stage(np.ascontiguousarray(keys))
            if len(members.lookups) == len(segments):
                segments["keys_address"] += address_of(matrix)
            else:
                segments["keys_address"][members.lookups] += address_of(matrix)
            held.append(Staged((name,), matrix))
        return held

    def _fill_weights(self, segments: NDArray[np.void], batch: JoinedBatch) -> list[Staged]:
        """Enter the weights of the look-ups that have any; returns what must stay alive."""
        held = []
        for i, keys_name, weights_name in self._weighted:
            keys, weights = batch.array(keys_name), batch.array(weights_name)
            if weights.shape != keys.shape:
                raise InvalidRequestError(
                    f"keys {keys_name!r} have shape {list(keys.shape)}, but their factors, {weights_name!r}, "
                    f"have {list(weights.shape)}"
                )
            staged = self._rows.stage(np.ascontiguousarray(weights, np.float32))
            held.append(Staged((weights_name,), staged))
            segments["weights_address"][i] = address_of(staged)
        return held

    def _inputs(self, vectors: list[NDArray[np.float32]], batch: JoinedBatch) -> dict[str, NDArray[np.float32]]:
        """The blocks by name; keys without a first dimension were given one, which goes again."""
        inputs = {}
        for block, array in zip(self._blocks, vectors, strict=True):
            first = block.members[0]
            bare = not block.joined and _is_bare(batch.parts(self._key_names[first])[0], self._lookups[first])
            inputs[block.dense_input] = array[0] if bare else array
        return inputs

    def _shape(self, i: int, batch: JoinedBatch) -> tuple[int, ...]:
        return _shape(batch.parts(self._key_names[i]), self._lookups[i])

    def _geometry(self, batch: JoinedBatch) -> _Geometry:
        """The geometry of a batch, which the shapes of its requests and of the irregular keys determine."""
        irregular = tuple([self._shape(i, batch) for i in self._irregular])
        seen = (batch.num_samples, batch.shapes, irregular)
        geometry = self._geometries.get(seen)
        if geometry is None:
            geometry = self._describe(tuple(self._shape(i, batch) for i in range(len(self._lookups))))
            if len(self._geometries) >= _MAX_GEOMETRIES:
                self._geometries.clear()
            self._geometries[seen] = geometry
        return geometry

    def _describe(self, keys: Sequence[tuple[int, ...]]) -> _Geometry:
        """The geometry of keys of these shapes, at least one row deep."""
        segments = np.zeros(len(keys), SEGMENT)
        segments["table"] = self._table_positions
        segments["pooling"] = [PoolingCode[lookup.pooling.upper()] for lookup in self._lookups]
        segments["key_bytes"] = segments["key_stride"] = _KEY_BYTES
        shapes = [
            self._describe_joined(block, segments, keys)
            if block.joined
            else self._describe_alone(block.members[0], segments, keys)
            for block in self._blocks
        ]
        segments["row_stride"] = segments["keys_per_row"] * _KEY_BYTES
        for members in self._packed.values():
            num_rows = keys[members.lookups[0]][0]
            strides = members.key_bytes, num_rows * members.key_bytes
            row_stride, key_stride = strides if self._rows.by_column else (members.row_stride, members.key_bytes)
            segments["key_bytes"][members.lookups] = members.key_bytes
            segments["row_stride"][members.lookups] = row_stride
            segments["key_stride"][members.lookups] = key_stride
            segments["keys_address"][members.lookups] = members.columns * key_stride
        num_keys = np.array([math.prod(shape) for shape in keys], np.int64)
        return _Geometry(segments, num_keys, tuple(shapes))

    def _describe_joined(
        self, block: _Block, segments: NDArray[np.void], keys: Sequence[tuple[int, ...]]
    ) -> tuple[int, ...]:
        """Members side by side in one matrix; returns its shape."""
        self._check_samples(block, keys)
        column = 0
        for i in block.members:
            num_samples, *rest = keys[i]
            keys_per_sample = math.prod(rest)
            segments["num_rows"][i] = num_samples
            segments["keys_per_row"][i] = keys_per_sample
            segments["output_address"][i] = column * _FLOAT_BYTES
            pooled = self._lookups[i].pooling != "none"
            column += self._table_specs[i].embedding_dim * (1 if pooled else keys_per_sample)
        segments["output_stride"][list(block.members)] = column * _FLOAT_BYTES
        return (keys[block.members[0]][0], column)

    def _check_samples(self, block: _Block, keys: Sequence[tuple[int, ...]]) -> None:
        """Refuse keys that cannot stand side by side: the kernel would write beyond the matrix."""
        first, *others = block.members
        for i in others:
            if keys[i][0] != keys[first][0]:
                raise InvalidRequestError(
                    f"keys {self._lookups[i].keys!r} are of {keys[i][0]} samples, but {self._lookups[first].keys!r}, "
                    f"whose vectors stand beside theirs, of {keys[first][0]}"
                )

    def _describe_alone(self, i: int, segments: NDArray[np.void], keys: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """One look-up with an array of its own; returns that array's shape."""
        table, shape = self._table_specs[i], keys[i]
        pooled = self._lookups[i].pooling != "none"
        rows, keys_per_row = (shape[:-1], shape[-1]) if pooled else (shape, 1)
        segments["num_rows"][i] = math.prod(rows)
        segments["keys_per_row"][i] = keys_per_row
        segments["output_stride"][i] = table.embedding_dim * _FLOAT_BYTES
        return (*rows, table.embedding_dim) if pooled or table.row_shape is None else (*rows, *table.row_shape)


def _blocks(lookups: Sequence[LookupSpec]) -> tuple[_Block, ...]:
    members: dict[str, list[int]] = {}
    for i, lookup in enumerate(lookups):
        members.setdefault(lookup.dense_input, []).append(i)
    return tuple(_Block(name, tuple(m), lookups[m[0]].joined) for name, m in members.items())


def _is_bare(keys: Part, lookup: LookupSpec) -> bool:
    """Whether the keys have no dimension but, where they are pooled, that of their one bag."""
    return len(keys.shape) <= (lookup.pooling != "none") and not isinstance(keys, Ragged)


def _packed(spec: ModelSpec) -> dict[str, _Packed]:
    """The look-ups that read columns of a matrix, by the matrix's name."""
    packed = {}
    for tensor in spec.inputs:
        lookups = [i for i, lookup in enumerate(spec.lookups) if lookup.keys == tensor.name and lookup.columns]
        if lookups:
            key_bytes = np.dtype(tensor.dtype).itemsize
            begins = np.array([(spec.lookups[i].columns or (0, 0))[0] for i in lookups], np.int64)
            packed[tensor.name] = _Packed(lookups, begins, key_bytes, tensor.shape[1] * key_bytes)
    return packed


def _is_regular(lookup: LookupSpec, spec: ModelSpec) -> bool:
    """Whether the keys are [samples, …] with all but the first size told by the shapes of the requests."""
    if spec.layout != "tensors" or not spec.batched:
        return False
    shapes = [tensor.shape for tensor in spec.inputs if tensor.name == lookup.keys]
    if lookup.columns is not None:
        return True
    return bool(shapes) and (lookup.pooling == "none" or (len(shapes[0]) > 1 and shapes[0][-1] >= 0))


def _shape(parts: list[Part], lookup: LookupSpec) -> tuple[int, ...]:
    """The shape of all keys of a look-up, at least one row (and one bag, where pooled) deep."""
    first = parts[0]
    shape = first.shape
    if lookup.columns is not None:
        shape = (shape[0], lookup.columns[1] - lookup.columns[0])
    elif isinstance(first, Ragged):
        shape = (*shape, 0)  # no one length is true of the bags
    elif _is_bare(first, lookup):
        shape = (1, *shape)
    if len(parts) == 1:
        return shape
    return (sum(part.shape[0] for part in parts), *shape[1:])


def _laid_out(keys: list[NDArray[Any]]) -> NDArray[np.int64]:
    """All keys behind each other as int64, in one pass; a single array is not copied."""
    if len(keys) == 1:
        return np.ascontiguousarray(keys[0], np.int64)
    return np.concatenate(keys, axis=None, dtype=np.int64) if keys else _NO_COUNTS


def _cut(batch: JoinedBatch, lookup: LookupSpec) -> Ragged:
    """The bags of a list of keys, cut as by ONNX's Slice: beyond the end is the end, negative counts from it."""
    keys, *offsets = (batch.array(name) for name in (lookup.keys, *(lookup.bags or ())))
    begins, ends = (np.where(at < 0, at + len(keys), at).clip(0, len(keys)) for at in offsets)
    if begins.ndim != 1 or begins.shape != ends.shape:
        raise InvalidRequestError(
            f"bags of {lookup.keys!r} begin at {list(begins.shape)} and end at {list(ends.shape)}"
        )
    ends = np.maximum(begins, ends)
    num_keys = int((ends - begins).sum())
    if num_keys > len(keys):
        raise InvalidRequestError(f"bags of {lookup.keys!r} overlap: they hold {num_keys} keys, of {len(keys)}")
    return Ragged(keys, begins, ends, begins.shape, num_keys)


def _joined_bags(parts: list[Ragged]) -> Ragged:
    """Ragged bags of several requests behind each other."""
    if len(parts) == 1:
        bags = parts[0]
        return bags if bags.values.dtype == np.int64 else bags._replace(values=bags.values.astype(np.int64))
    shifts = np.cumsum([0, *(part.values.size for part in parts[:-1])])
    begins = np.concatenate([part.begins + shift for part, shift in zip(parts, shifts, strict=True)])
    ends = np.concatenate([part.ends + shift for part, shift in zip(parts, shifts, strict=True)])
    num_keys = sum(part.num_keys for part in parts)
    return Ragged(_laid_out([part.values for part in parts]), begins, ends, parts[0].shape, num_keys)
