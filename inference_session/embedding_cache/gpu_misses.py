"""The missing keys of a look-up in the GPU's cache, and how their rows get into the outputs.

Where nothing is pooled, the look-up itself has noted which keys the cache lacks. Otherwise it only counts them: the
segments concerned are looked up again, each key separately and those of bags into other memory.

The rows are fetched, each once, while other requests use the device. Then a kernel copies them to where the cache
would have written them, and bags are pooled, from rows whose numbers are their positions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.device.cuda import CudaDevice
from inference_session.device.pinned import pinned_empty
from inference_session.embedding_cache.base import Misses
from inference_session.embedding_cache.missing_rows import MissingRows
from inference_session.kernels.cpu.missing import describe_copies, find_positions
from inference_session.kernels.cuda import launch as gpu
from inference_session.kernels.cuda.records import Tiles, numbered_tables
from inference_session.kernels.records import (
    FLOAT_BYTES,
    KEY_BYTES,
    VECTOR_COPY,
    Lookup,
    PoolingCode,
    VectorCode,
    address_of,
)

_MOST_BYTES = 1 << 28
"""Device memory for the vectors of bags that have missing keys; a single look-up may need more."""


class MissingBits:
    """Where look-ups note which keys are missing, one at a time: pinned memory, zeros while none is under way."""

    def __init__(self) -> None:
        self._bits = np.zeros(0, np.uint32)

    def address_for(self, launch: gpu.Launch) -> int:
        """Where a look-up may note its keys; within a request."""
        if len(self._bits) < launch.num_tiles:
            self._bits = pinned_empty((2 * launch.num_tiles,), np.uint32)
            self._bits[:] = 0
        return address_of(self._bits)

    def take(self, tiles: Tiles) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """How many keys of each segment are missing, int64 [segments], and at which of its positions, int64 [missing],
        segment after segment. The bits are zeros again.
        """
        num_bits = int(tiles.first[-1]) * tiles.keys_per_tile
        counts, positions = np.empty(len(tiles.first) - 1, np.int64), np.empty(num_bits, np.int64)
        num_found = find_positions(self._bits, tiles.first, tiles.keys_per_tile, counts, positions)
        return counts, positions[:num_found].copy()

    def clear(self) -> None:
        """Forget what a look-up may have noted that was interrupted."""
        self._bits[:] = 0


class GpuMisses(Misses):
    """The missing keys of a look-up without pooling, within `CudaDevice.scratch`."""

    def __init__(self, device: CudaDevice, dims: NDArray[np.int64], lookup: Lookup) -> None:
        """Collect the keys that the cache has noted.

        Args:
            device: of the cache.
            dims: int64 [tables], the embedding_dim of each.
            lookup: what was looked up.
        """
        self._device, self._lookup = device, lookup
        assert lookup.missing_positions is not None  # noqa: S101  the cache has noted them
        self.rows = MissingRows(dims, lookup.segments, lookup.num_unknown.copy(), lookup.missing_positions)

    def paused(self) -> AbstractContextManager[None]:
        return self._device.paused()

    def complete(self) -> None:
        """See Misses: launched, not waited for."""
        _copy_vectors(self._device, self.rows, self._lookup.segments)
        self._lookup.num_unknown[:] = self.rows.num_unknown()


class PooledGpuMisses(Misses):
    """The missing keys of some segments of a look-up, within `CudaDevice.scratch`."""

    def __init__(
        self,
        device: CudaDevice,
        dims: NDArray[np.int64],
        lookup: Lookup,
        *,
        numbers: NDArray[np.intp],
        tables_address: int,
        bits: MissingBits,
    ) -> None:
        """Look the missing keys up again.

        Args:
            device: of the cache.
            dims: embedding_dim of each table.
            lookup: what was looked up.
            numbers: which of its segments, all of them with missing keys.
            tables_address: of the cache's GPU_TABLE records, without addresses to count events at.
            bits: of the cache.
        """
        self._device, self._dims, self._tables_address = device, dims, tables_address
        self._lookup, self._numbers = lookup, numbers
        self._segments: NDArray[np.void] = lookup.segments[numbers]
        self._num_keys = _num_positions(self._segments)
        """Positions of each segment."""
        self._pooled = np.flatnonzero(self._segments["pooling"] != PoolingCode.NONE)
        """Which of the segments are pooled."""
        self._alone = self._each_key_alone()
        """The same segments, but each key has its own vector: row i of the output is that of the key at
        position i.
        """
        self.rows = self._collect(bits)

    def paused(self) -> AbstractContextManager[None]:
        return self._device.paused()

    def complete(self) -> None:
        """See Misses: launched, not waited for."""
        _copy_vectors(self._device, self.rows, self._alone)
        self._pool()
        self._lookup.num_unknown[self._numbers] = self.rows.num_unknown()

    def _each_key_alone(self) -> NDArray[np.void]:
        segments, num_keys = self._segments, self._num_keys
        alone: NDArray[np.void] = segments.copy()
        ragged = segments["begins_address"] != 0
        alone["num_rows"][ragged], alone["keys_per_row"][ragged] = num_keys[ragged], 1
        alone["row_stride"][ragged] = alone["key_stride"][ragged]
        for i in self._pooled.tolist():
            shape = (int(alone["num_rows"][i]), int(alone["keys_per_row"][i] * self._dims[alone["table"][i]]))
            alone["output_address"][i] = address_of(self._device.empty(shape))
            alone["output_stride"][i], alone["output_code"][i] = shape[1] * FLOAT_BYTES, VectorCode.FLOAT32
        for field in ("pooling", "weights_address", "begins_address", "ends_address"):
            alone[field] = 0
        return alone

    def _collect(self, bits: MissingBits) -> MissingRows:
        """The missing keys."""
        launch = gpu.prepare(self._alone, self._tables_address)
        bits.clear()
        launch.run(missing_bits_address=bits.address_for(launch))
        self._device.wait()
        counts, positions = bits.take(launch.tiles)
        if self._segments["begins_address"].any():
            parts = np.split(positions, np.cumsum(counts)[:-1])
            parts = [_in_bags(*each) for each in zip(self._segments, self._num_keys.tolist(), parts, strict=True)]
            counts, positions = np.array([len(part) for part in parts], np.int64), np.concatenate(parts)
        return MissingRows(self._dims, self._segments, counts, positions)

    def _pool(self) -> None:
        """Pool the vectors that the keys have by now, as rows whose numbers are their positions."""
        if not len(self._pooled):
            return
        pools, alone, num_rows = self._segments[self._pooled], self._alone[self._pooled], self._num_keys[self._pooled]
        records = numbered_tables(self._dims[pools["table"]], alone["output_address"], num_rows)
        tables = self._device.empty((records.nbytes,), np.uint8)
        tables.set(self._device.stage(records.view(np.uint8)), stream=self._device.stream)
        numbers = self._device.pinned((int(num_rows.max()),), np.int64)
        numbers[:] = np.arange(len(numbers))
        pools["table"], pools["keys_address"] = np.arange(len(pools)), address_of(numbers)
        pools["key_bytes"] = pools["key_stride"] = KEY_BYTES
        pools["row_stride"] = pools["keys_per_row"] * KEY_BYTES
        gpu.prepare(pools, address_of(tables)).run()


def parts_within(lookup: Lookup, dims: NDArray[np.int64]) -> Sequence[NDArray[np.intp]]:
    """The numbers of segments that have missing keys, in parts such that `_MOST_BYTES` do for each. dims: [tables]."""
    numbers = np.flatnonzero(lookup.num_unknown)
    missed = lookup.segments[numbers]
    num_floats = _num_positions(missed) * dims[missed["table"]] * (missed["pooling"] != PoolingCode.NONE)
    part = np.cumsum(num_floats * FLOAT_BYTES) // _MOST_BYTES
    return np.split(numbers, np.flatnonzero(np.diff(part)) + 1) if len(numbers) else []


def _copy_vectors(device: CudaDevice, rows: MissingRows, segments: NDArray[np.void]) -> None:
    """Launch the copies of fetched vectors to the outputs of segments, none of them pooled."""
    if not len(rows.positions):  # other threads have cached all of these rows meanwhile
        return
    copies = device.pinned((len(rows.positions),), VECTOR_COPY)
    vectors = device.stage(rows.vectors)
    moved = address_of(vectors) - address_of(rows.vectors)
    describe_copies(segments, rows.counts, rows.positions, rows.records, rows.row_numbers, moved, copies)
    gpu.copy_vectors(copies)


def _num_positions(segments: NDArray[np.void]) -> NDArray[np.int64]:
    """Keys of each segment, those between bags included."""
    num_positions: NDArray[np.int64] = segments["num_rows"] * segments["keys_per_row"]
    for i in np.flatnonzero(segments["begins_address"]).tolist():
        num_positions[i] = _array_at(segments["ends_address"][i], int(segments["num_rows"][i])).max(initial=0)
    return num_positions


def _in_bags(segment: np.void, num_keys: int, positions: NDArray[np.intp]) -> NDArray[np.intp]:
    """The positions as often as bags hold them, where there are bags of any length."""
    if not segment["begins_address"]:
        return positions
    begins, ends = (_array_at(segment[name], int(segment["num_rows"])) for name in ("begins_address", "ends_address"))
    steps = np.bincount(begins, minlength=num_keys + 1) - np.bincount(ends, minlength=num_keys + 1)
    return np.repeat(positions, np.cumsum(steps)[positions])


def _array_at(address: Any, num_elements: int) -> NDArray[np.int64]:
    return np.ctypeslib.as_array((ctypes.c_int64 * num_elements).from_address(int(address)))
