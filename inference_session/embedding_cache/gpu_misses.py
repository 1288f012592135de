"""The missing keys of a look-up in the GPU's cache: which they are, and how their rows get into the outputs.

The look-up itself only counts what the cache lacks. The segments concerned are looked up again, each key separately
and those of bags into other memory, which gives the positions of the missing keys. These are fetched, each once, while
other requests use the device.

The same kernel fills in their vectors, treating them as rows of a table without a cache: the *key* at a
position is now the number of a fetched row or, where the cache had the row, a number beyond them all, which leaves the
output unchanged. The same kernel pools bags at the end, from rows whose numbers are their positions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.device.cuda import CudaDevice
from inference_session.embedding_cache.base import Misses
from inference_session.embedding_cache.missing_rows import MissingRows
from inference_session.kernels.cuda import launch as gpu
from inference_session.kernels.cuda.records import Tiles, numbered_tables
from inference_session.kernels.records import FLOAT_BYTES, KEY_BYTES, Lookup, PoolingCode, VectorCode, address_of

_BEYOND_ALL_ROWS = np.iinfo(np.int64).max
_MOST_BYTES = 1 << 28
"""Device memory for the vectors of bags that have missing keys; a single look-up may need more."""


def parts_within(lookup: Lookup, dims: NDArray[np.int64]) -> Sequence[NDArray[np.intp]]:
    """The segments that have missing keys, in parts such that `_MOST_BYTES` do for each."""
    numbers = np.flatnonzero(lookup.num_unknown)
    missed = lookup.segments[numbers]
    if not missed["pooling"].any():
        return [numbers] if len(numbers) else []
    num_floats = _num_positions(missed) * dims[missed["table"]] * (missed["pooling"] != PoolingCode.NONE)
    part = np.cumsum(num_floats * FLOAT_BYTES) // _MOST_BYTES
    return np.split(numbers, np.flatnonzero(np.diff(part)) + 1)


class GpuMisses(Misses):
    """The missing keys of some segments of a look-up, within `CudaDevice.scratch`."""

    def __init__(
        self,
        device: CudaDevice,
        dims: NDArray[np.int64],
        tables_address: int,
        lookup: Lookup,
        numbers: NDArray[np.intp],
    ) -> None:
        """Look the missing keys up again.

        Args:
            device: of the cache.
            dims: embedding_dim of each table.
            tables_address: of the cache's GPU_TABLE records, without addresses to count events at.
            lookup: what was looked up.
            numbers: which of its segments, all of them with missing keys.
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
        self.rows = self._collect()

    def paused(self) -> AbstractContextManager[None]:
        return self._device.paused()

    def complete(self) -> None:
        """See Misses: launched, not waited for."""
        fills, pools = self._alone.copy(), self._segments[self._pooled]
        rows, numbers = self._row_numbers(), self._device.pinned((int(self._num_keys.max()),), np.int64)
        numbers[:] = np.arange(len(numbers))
        fills["keys_address"] = address_of(rows) + KEY_BYTES * _begins(self._num_keys)
        pools["keys_address"] = address_of(numbers)
        pools["table"] = len(self._dims) + np.arange(len(pools))
        tables = self._tables()
        for segments, tiles in ((fills, self._tiles), (pools, None)):
            segments["key_bytes"] = segments["key_stride"] = KEY_BYTES
            segments["row_stride"] = segments["keys_per_row"] * KEY_BYTES
            if len(segments):
                gpu.prepare(segments, address_of(tables), tiles=tiles).run()
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

    def _collect(self) -> MissingRows:
        """The missing keys."""
        launch = gpu.prepare(self._alone, self._tables_address)
        bits = self._device.pinned((launch.num_tiles,), np.uint32)
        launch.run(missing_bits_address=address_of(bits))
        self._device.wait()
        self._tiles = launch.tiles
        counts, positions = _missing(bits, launch.tiles)
        if self._segments["begins_address"].any():
            parts = np.split(positions, np.cumsum(counts)[:-1])
            parts = [_in_bags(*each) for each in zip(self._segments, self._num_keys.tolist(), parts, strict=True)]
            counts, positions = np.array([len(part) for part in parts], np.int64), np.concatenate(parts)
        return MissingRows(self._dims, self._segments, counts, positions)

    def _row_numbers(self) -> NDArray[np.int64]:
        """For each position, segment after segment, the missing row, or one beyond all where nothing is missing."""
        numbers = self._device.pinned((int(self._num_keys.sum()),), np.int64)
        numbers[:] = _BEYOND_ALL_ROWS
        numbers[np.repeat(_begins(self._num_keys), self.rows.counts) + self.rows.positions] = self.rows.row_numbers
        return numbers

    def _tables(self) -> Any:
        """GPU_TABLE records on the device: one per table of the missing rows, then one per pooled segment."""
        alone, missing = self._alone[self._pooled], self.rows.records
        moved = address_of(self._device.stage(self.rows.vectors)) - address_of(self.rows.vectors)
        dims = np.concatenate([self._dims, self._dims[alone["table"]]])
        addresses = np.concatenate([missing["vectors_address"] + moved, alone["output_address"]])
        num_rows = np.concatenate([missing["num_rows"], self._num_keys[self._pooled]])
        records = numbered_tables(dims, addresses, num_rows)
        on_device = self._device.empty((records.nbytes,), np.uint8)
        on_device.set(self._device.stage(records.view(np.uint8)), stream=self._device.stream)
        return on_device


def _num_positions(segments: NDArray[np.void]) -> NDArray[np.int64]:
    """Keys of each segment, those between bags included."""
    num_positions: NDArray[np.int64] = segments["num_rows"] * segments["keys_per_row"]
    for i in np.flatnonzero(segments["begins_address"]).tolist():
        num_positions[i] = _array_at(segments["ends_address"][i], int(segments["num_rows"][i])).max(initial=0)
    return num_positions


def _missing(bits: NDArray[np.uint32], tiles: Tiles) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many keys of each segment are missing, and at which of its positions, segment after segment."""
    by_tile = np.unpackbits(bits.view(np.uint8), bitorder="little").reshape(-1, 32)[:, : tiles.keys_per_tile]
    positions = np.flatnonzero(by_tile)
    begins = tiles.first.astype(np.int64) * tiles.keys_per_tile
    of_segment = np.searchsorted(begins, positions, side="right") - 1
    return np.bincount(of_segment, minlength=len(begins) - 1), positions - begins[of_segment]


def _in_bags(segment: np.void, num_keys: int, positions: NDArray[np.intp]) -> NDArray[np.intp]:
    """The positions as often as bags hold them, where there are bags of any length."""
    if not segment["begins_address"]:
        return positions
    begins, ends = (_array_at(segment[name], int(segment["num_rows"])) for name in ("begins_address", "ends_address"))
    steps = np.bincount(begins, minlength=num_keys + 1) - np.bincount(ends, minlength=num_keys + 1)
    return np.repeat(positions, np.cumsum(steps)[positions])


def _array_at(address: Any, num_elements: int) -> NDArray[np.int64]:
    return np.ctypeslib.as_array((ctypes.c_int64 * num_elements).from_address(int(address)))


def _begins(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.cumsum(counts) - counts
