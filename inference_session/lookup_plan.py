"""From keys to the dense network's inputs: what is known before a request comes, and what is filled in when it does.

Everything that depends on the model and on the shapes of the keys is computed once and kept as an array of `SEGMENT`
records; a batch then costs a copy of that array, the addresses of its keys, and one call of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.batch import Array, Ragged
from inference_session.embedding_cache.kernels import cpu
from inference_session.embedding_cache.kernels.layout import SEGMENT, PoolingCode
from inference_session.errors import InvalidRequestError
from inference_session.formats.native import LookupSpec, ModelSpec, TableSpec

_MAX_GEOMETRIES = 64
_FLOAT_BYTES = 4
_NO_COUNTS = np.empty(0, np.int64)
_NO_POSITIONS = np.empty(0, np.int64)


class LookedUp(NamedTuple):
    """What one batch's look-up gave."""

    vectors: dict[str, NDArray[np.float32]]
    """The dense network's inputs."""
    num_keys: NDArray[np.int64]
    """Keys per look-up."""
    num_unknown: NDArray[np.int64]
    """Keys per look-up that were answered with the default vector."""


@dataclass(frozen=True)
class _Block:
    """One input of the dense network, and the look-ups that fill it."""

    dense_input: str
    members: tuple[int, ...]
    joined: bool


@dataclass(frozen=True)
class _Geometry:
    """All that follows from the key arrays' shapes but for their first dimension."""

    segments: NDArray[np.void]
    """Addresses are 0, `num_rows` is that of one step along the first dimension of the keys, and
    `output_address` the offset within the block."""
    shapes: tuple[tuple[int, ...], ...]
    """Per block, the shape of its array without the first dimension."""


class LookupPlan:
    """The look-ups of one model, over its tables. Immutable but for a bounded memory of shapes seen."""

    def __init__(self, spec: ModelSpec, tables: NDArray[np.void], *, num_threads: int) -> None:
        """`tables`: one TABLE record per table of the spec, in its order, then any that they point to."""
        self._lookups = spec.lookups
        self._tables = tables
        self._num_threads = num_threads
        position = {table.folder: i for i, table in enumerate(spec.tables)}
        self._table_positions = [position[lookup.table] for lookup in spec.lookups]
        self._table_specs = [spec.tables[i] for i in self._table_positions]
        self._blocks = _blocks(spec.lookups)
        self._block_of = np.empty(len(spec.lookups), np.intp)
        for number, block in enumerate(self._blocks):
            self._block_of[list(block.members)] = number
        self._geometries: dict[tuple[tuple[int, ...], ...], _Geometry] = {}

    def run(self, arrays: Mapping[str, Array]) -> LookedUp:
        """Look up all keys of a batch in one call of the kernel.

        `arrays` holds what the look-ups name: keys int64 or int32, weights float32.
        """
        if not self._lookups:
            return LookedUp({}, _NO_COUNTS, _NO_COUNTS)
        keys = [_bags(arrays[lookup.keys], lookup) for lookup in self._lookups]
        geometry = self._geometry(tuple([(bags.values.itemsize, *bags.shape[1:]) for bags in keys]))
        segments = geometry.segments.copy()
        leading = [bags.shape[0] for bags in keys]
        vectors = [
            np.empty((leading[block.members[0]], *shape), np.float32)
            for block, shape in zip(self._blocks, geometry.shapes, strict=True)
        ]
        segments["keys_address"] = [_address(bags.values) for bags in keys]
        segments["num_rows"] *= leading
        segments["output_address"] += np.array([_address(v) for v in vectors], np.int64)[self._block_of]
        num_keys = segments["num_rows"] * segments["keys_per_row"]
        # Held until the kernel is done: it reads them by address.
        extras = self._fill_extras(segments, keys, num_keys, arrays)
        num_unknown = np.zeros(len(segments), np.int64)
        cpu.lookup(self._tables, segments, num_unknown, _NO_POSITIONS, self._num_threads)
        del extras
        outputs = {block.dense_input: v for block, v in zip(self._blocks, vectors, strict=True)}
        for name in _scalar_inputs(self._blocks, self._lookups, arrays):
            outputs[name] = outputs[name][0]
        return LookedUp(outputs, num_keys, num_unknown)

    def _fill_extras(
        self, segments: NDArray[np.void], keys: list[_Bags], num_keys: NDArray[np.int64], arrays: Mapping[str, Array]
    ) -> list[NDArray[Any]]:
        """Offsets of ragged bags and weights, for the few look-ups that have them; returns what must stay alive."""
        extras: list[NDArray[Any]] = []
        for i, lookup in enumerate(self._lookups):
            begins, ends = keys[i].begins, keys[i].ends
            if begins is not None and ends is not None:
                segments["begins_address"][i] = _address(begins)
                segments["ends_address"][i] = _address(ends)
                num_keys[i] = int((ends - begins).sum())
            if lookup.weights is not None:
                weights = np.ascontiguousarray(arrays[lookup.weights], np.float32)
                if weights.size != keys[i].values.size:
                    raise InvalidRequestError(
                        f"{lookup.weights!r} has {weights.size} weights for {keys[i].values.size} keys"
                    )
                segments["weights_address"][i] = _address(weights)
                extras.append(weights)
        return extras

    def _geometry(self, shapes: tuple[tuple[int, ...], ...]) -> _Geometry:
        geometry = self._geometries.get(shapes)
        if geometry is None:
            geometry = self._describe(shapes)
            if len(self._geometries) >= _MAX_GEOMETRIES:
                self._geometries.clear()
            self._geometries[shapes] = geometry
        return geometry

    def _describe(self, shapes: tuple[tuple[int, ...], ...]) -> _Geometry:
        segments = np.zeros(len(shapes), SEGMENT)
        block_shapes = []
        for block in self._blocks:
            if block.joined:
                block_shapes.append((self._describe_joined(block, segments, shapes),))
            else:
                block_shapes.append(self._describe_alone(block.members[0], segments, shapes))
        return _Geometry(segments, tuple(block_shapes))

    def _describe_joined(self, block: _Block, segments: NDArray[np.void], shapes: tuple[tuple[int, ...], ...]) -> int:
        """Members side by side in one matrix; returns its number of columns."""
        column = 0
        for i in block.members:
            _, *tail = shapes[i]
            segment, dim = segments[i : i + 1], self._table_specs[i].embedding_dim
            self._describe_keys(segment, i, shapes[i], num_rows=1, keys_per_row=math.prod(tail))
            segment["output_address"] = column * _FLOAT_BYTES
            column += dim if self._lookups[i].pooling != "none" else dim * math.prod(tail)
        segments["output_stride"][list(block.members)] = column * _FLOAT_BYTES
        return column

    def _describe_alone(
        self, i: int, segments: NDArray[np.void], shapes: tuple[tuple[int, ...], ...]
    ) -> tuple[int, ...]:
        """One look-up with an array of its own; returns that array's shape without the first dimension."""
        table, pooled = self._table_specs[i], self._lookups[i].pooling != "none"
        _, *tail = shapes[i]
        rows, keys_per_row = (tail[:-1], tail[-1]) if pooled else (tail, 1)
        segment = segments[i : i + 1]
        self._describe_keys(segment, i, shapes[i], num_rows=math.prod(rows), keys_per_row=keys_per_row)
        segment["output_stride"] = table.embedding_dim * _FLOAT_BYTES
        return (*rows, *_row_shape(table))

    def _describe_keys(
        self, segment: NDArray[np.void], i: int, shape: tuple[int, ...], *, num_rows: int, keys_per_row: int
    ) -> None:
        key_bytes = shape[0]
        segment["table"] = self._table_positions[i]
        segment["pooling"] = PoolingCode[self._lookups[i].pooling.upper()]
        segment["key_bytes"] = segment["key_stride"] = key_bytes
        segment["row_stride"] = keys_per_row * key_bytes
        segment["num_rows"] = num_rows
        segment["keys_per_row"] = keys_per_row


class _Bags(NamedTuple):
    """Keys of one look-up, contiguous, at least one row (and one bag, where pooled) deep."""

    values: NDArray[Any]
    shape: tuple[int, ...]
    begins: NDArray[np.int64] | None = None
    ends: NDArray[np.int64] | None = None


def _bags(keys: Array, lookup: LookupSpec) -> _Bags:
    if isinstance(keys, Ragged):
        # The last dimension, the length of the bags, is given by their ends.
        return _Bags(keys.values, (*keys.shape, 0), keys.begins, keys.ends)
    values = np.ascontiguousarray(keys)
    shape = keys.shape
    return _Bags(values, shape if len(shape) > (lookup.pooling != "none") else (1, *shape))


def _blocks(lookups: Sequence[LookupSpec]) -> tuple[_Block, ...]:
    members: dict[str, list[int]] = {}
    for i, lookup in enumerate(lookups):
        members.setdefault(lookup.dense_input, []).append(i)
    return tuple(_Block(name, tuple(m), lookups[m[0]].joined) for name, m in members.items())


def _scalar_inputs(blocks: Sequence[_Block], lookups: Sequence[LookupSpec], arrays: Mapping[str, Array]) -> list[str]:
    """Inputs whose keys have no dimension but that of their bag: `_bags` gave them one that must go again."""
    names = []
    for block in blocks:
        lookup = lookups[block.members[0]]
        keys = arrays[lookup.keys]
        if not block.joined and len(keys.shape) <= (lookup.pooling != "none") and not isinstance(keys, Ragged):
            names.append(block.dense_input)
    return names


def _row_shape(table: TableSpec) -> tuple[int, ...]:
    return (table.embedding_dim,) if table.row_shape is None else table.row_shape


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
