"""GpuCachedRows: the rows of a parameter server, the hottest of them in device memory.

A look-up is one launch, which leaves what the cache has in the dense network's input and counts what it has not. If
there is such, the segments concerned are looked up once more, each key on its own and those of bags into other memory,
which tells the positions of the missing keys. These are fetched, each once, while others have the device.

Their vectors are filled in by the same kernel, which takes them for rows of a table without a cache: the *key* at a
position is now the number of a fetched row or, where the cache had the row, a number beyond them all, which leaves the
output as it is. Bags are pooled at the end, again by the same kernel, from rows whose numbers are their positions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.device.cuda import GpuContext
from inference_session.embedding_cache.gpu_session import SessionGpuCache
from inference_session.kernels.cpu.lookup import NO_POSITIONS
from inference_session.kernels.cuda import launch as gpu
from inference_session.kernels.cuda.records import GPU_TABLE, Tiles, divide
from inference_session.kernels.records import SEGMENT, PoolingCode, VectorCode, address_of
from inference_session.model_spec import TableSpec
from inference_session.parameter_server.server import ParameterServer
from inference_session.rows.gpu_source import GpuSource
from inference_session.rows.late_inserts import LateInserts
from inference_session.rows.overlay import Overlay
from inference_session.rows.stored import StoredRows

_INSERTS_AT_ONCE = 64
_KEYS_PER_FETCH = 1 << 16
_BEYOND_ALL_ROWS = np.iinfo(np.int64).max
_KEY_BYTES, _FLOAT_BYTES = 8, 4
_MOST_BYTES = 1 << 28
"""Of device memory for the vectors of bags that have missing keys; a single look-up may need more."""


class _Missed(NamedTuple):
    """The segments of a look-up that have missing keys."""

    segments: NDArray[np.void]
    alone: NDArray[np.void]
    """The same, but that each key has a vector of its own: row i of the output is that of the key at position i."""
    num_keys: NDArray[np.int64]
    """Positions of each."""
    pooled: NDArray[np.intp]
    """Which of them are pooled."""


class GpuCachedRows(GpuSource, StoredRows):
    """StoredRows that a GPU looks up. Missing rows go into the cache after the look-up has been answered."""

    _cache: SessionGpuCache
    _late: LateInserts[Overlay]

    def __init__(
        self,
        specs: Sequence[TableSpec],
        cache: SessionGpuCache,
        server: ParameterServer,
        context: GpuContext,
        *,
        refresh_interval_s: float = 0.0,
        async_from: float | None = None,
    ) -> None:
        """As StoredRows; `context`: the cache's."""
        self._context = context
        super().__init__(
            specs,
            cache,
            server,
            refresh_interval_s=refresh_interval_s,
            async_from=async_from,
            inserts_at_once=_INSERTS_AT_ONCE,
        )
        Overlay(self._dims, np.zeros(0, SEGMENT), NO_POSITIONS, NO_POSITIONS)  # compiles

    def look_up(self, segments: NDArray[np.void], num_keys: NDArray[np.int64], num_unknown: NDArray[np.int64]) -> None:
        """See RowSource and CachedRows.look_up. Waited for: what is missing is known only then."""
        self._cache.look_up(segments, num_keys, num_unknown)
        self._context.wait()
        if not num_unknown.any():
            return
        waits = self._waits(int(num_unknown.sum()), int(num_keys.sum()))
        for places in self._groups(segments, np.flatnonzero(num_unknown)):
            with self._context.scratch():
                num_unknown[places] = self._complete(segments[places], waits)

    def fetch(self, table: int, keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        """See RowSource."""
        for begin in range(0, len(keys), _KEYS_PER_FETCH):
            part = slice(begin, begin + _KEYS_PER_FETCH)
            with self.request():
                vectors = self._context.pinned(out[part].shape, np.float32)
                super().fetch(table, self.stage(keys[part]), vectors)
                out[part] = vectors

    def stats(self) -> dict[str, Any]:
        """See RowSource. `gpu`: as GpuRows says of its tables, of the cache."""
        stats = super().stats()
        where = {"device": f"cuda:{self._context.device_id}", "bytes": stats["cache"]["bytes"], "on_host": []}
        return {**stats, "gpu": where}

    def _groups(self, segments: NDArray[np.void], places: NDArray[np.intp]) -> list[NDArray[np.intp]]:
        """The places of segments that have missing keys, parted such that `_MOST_BYTES` do for each part."""
        missed = segments[places]
        if not missed["pooling"].any():
            return [places]
        num_floats = _num_positions(missed) * self._dims[missed["table"]] * (missed["pooling"] != PoolingCode.NONE)
        part = np.cumsum(num_floats * _FLOAT_BYTES) // _MOST_BYTES
        return np.split(places, np.flatnonzero(np.diff(part)) + 1)

    def _complete(self, segments: NDArray[np.void], waits: bool) -> NDArray[np.int64]:
        """Answer the keys that the cache lacks of segments that have such; returns the unknown keys per segment.

        `waits`: whether they are fetched before, else after they have been answered by default.
        """
        missed = self._each_key_alone(segments)
        overlay = self._collect(missed)
        if waits:
            with self._context.paused():
                self._fetch(overlay)
        else:
            self._fill_by_default(overlay)
        self._fill_in(missed, overlay)
        num_unknown = overlay.num_unknown()
        if overlay.parts:  # else others have brought in all of it since it was missed
            self._late.put(overlay)
        return num_unknown

    def _each_key_alone(self, segments: NDArray[np.void]) -> _Missed:
        pooled, ragged = np.flatnonzero(segments["pooling"] != PoolingCode.NONE), segments["begins_address"] != 0
        alone, num_keys = segments.copy(), _num_positions(segments)
        alone["num_rows"][ragged], alone["keys_per_row"][ragged] = num_keys[ragged], 1
        alone["row_stride"][ragged] = alone["key_stride"][ragged]
        for i in pooled.tolist():
            shape = (int(alone["num_rows"][i]), int(alone["keys_per_row"][i] * self._dims[alone["table"][i]]))
            alone["output_address"][i] = address_of(self._context.empty(shape))
            alone["output_stride"][i] = shape[1] * _FLOAT_BYTES
        for field in ("pooling", "weights_address", "begins_address", "ends_address"):
            alone[field] = 0
        return _Missed(segments, alone, num_keys, pooled)

    def _collect(self, missed: _Missed) -> Overlay:
        """The missing keys."""
        bits = self._cache.look_up_again(missed.alone)
        self._context.wait()
        counts, positions = _missing(bits, divide(missed.alone))
        if missed.segments["begins_address"].any():
            parts = np.split(positions, np.cumsum(counts)[:-1])
            parts = [_in_bags(*each) for each in zip(missed.segments, missed.num_keys.tolist(), parts, strict=True)]
            counts, positions = np.array([len(part) for part in parts], np.int64), np.concatenate(parts)
        return Overlay(self._dims, missed.segments, counts, positions)

    def _fill_in(self, missed: _Missed, overlay: Overlay) -> None:
        """Launch what completes the outputs from the vectors of the overlay and of the bags' keys."""
        fills, pools = missed.alone.copy(), missed.segments[missed.pooled]
        rows, numbers = self._rows_of(missed, overlay), self._context.pinned((int(missed.num_keys.max()),), np.int64)
        numbers[:] = np.arange(len(numbers))
        fills["keys_address"] = address_of(rows) + _KEY_BYTES * _begins(missed.num_keys)
        pools["keys_address"] = address_of(numbers)
        pools["table"] = len(self._dims) + np.arange(len(pools))
        tables = self._tables(missed, overlay)
        for segments in (fills, pools):
            segments["key_bytes"] = segments["key_stride"] = _KEY_BYTES
            segments["row_stride"] = segments["keys_per_row"] * _KEY_BYTES
            if len(segments):
                gpu.Launch(segments, divide(segments), tables_address=address_of(tables)).run()

    def _rows_of(self, missed: _Missed, overlay: Overlay) -> NDArray[np.int64]:
        """By position, segment after segment: the row in the overlay, or one beyond all where nothing is missing."""
        rows = self._context.pinned((int(missed.num_keys.sum()),), np.int64)
        rows[:] = _BEYOND_ALL_ROWS
        rows[np.repeat(_begins(missed.num_keys), overlay.counts) + overlay.positions] = overlay.rows
        return rows

    def _tables(self, missed: _Missed, overlay: Overlay) -> Any:
        """GPU_TABLE records on the device: one per table of the overlay, then one per pooled segment."""
        alone = missed.alone[missed.pooled]
        moved = address_of(self.stage(overlay.vectors)) - address_of(overlay.vectors)
        dims = np.concatenate([self._dims, self._dims[alone["table"]]])
        addresses = np.concatenate([overlay.records["vectors_address"] + moved, alone["output_address"]])
        records = np.zeros(len(dims), GPU_TABLE)
        records["num_base_rows"] = np.concatenate([overlay.records["num_rows"], missed.num_keys[missed.pooled]])
        records["base_by_number"] = records["cached_rows"]["wide"] = 1
        records["embedding_dim"] = dims
        rows = records["base_rows"]
        rows["vectors_address"], rows["row_bytes"], rows["vector_code"] = (
            addresses,
            _FLOAT_BYTES * dims,
            VectorCode.FLOAT32,
        )
        rows["wide"] = (dims % 4 == 0) & (addresses % (4 * _FLOAT_BYTES) == 0)
        on_device = self._context.empty((records.nbytes,), np.uint8)
        on_device.set(self.stage(records.view(np.uint8)), stream=self._context.stream)
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
    places = np.flatnonzero(by_tile)
    begins = tiles.first.astype(np.int64) * tiles.keys_per_tile
    of_segment = np.searchsorted(begins, places, side="right") - 1
    return np.bincount(of_segment, minlength=len(begins) - 1), places - begins[of_segment]


def _in_bags(segment: np.void, num_keys: int, positions: NDArray[np.intp]) -> NDArray[np.intp]:
    """The positions as often as bags hold them, where there are bags of any length."""
    if not segment["begins_address"]:
        return positions
    begins, ends = (_array_at(segment[name], int(segment["num_rows"])) for name in ("begins_address", "ends_address"))
    steps = np.bincount(begins, minlength=num_keys + 1) - np.bincount(ends, minlength=num_keys + 1)
    return np.repeat(positions, np.cumsum(steps)[positions])


def _array_at(address: Any, num_elements: int) -> NDArray[np.int64]:
    array: NDArray[np.int64] = np.ctypeslib.as_array((ctypes.c_int64 * num_elements).from_address(int(address)))
    return array


def _begins(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    begins: NDArray[np.int64] = np.cumsum(counts) - counts
    return begins
