"""GpuEmbeddingCache: rows in device memory, looked up by one kernel launch for all tables of a request.

Only the thread that holds its device reads or writes it. So no thread writes while a look-up runs, or allocates memory
while a CUDA graph is recorded, and a write is done when it returns. Large writes are split, and requests run
in between.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import cupy
import numpy as np
from numpy.typing import ArrayLike, NDArray

from inference_session.device.cuda import CudaDevice
from inference_session.device.cuda_memory import check_free, memory_checked
from inference_session.embedding_cache.base import EmbeddingCache, Misses
from inference_session.embedding_cache.gpu_budget import buckets_per_table, buckets_to_hold, fixed_bytes
from inference_session.embedding_cache.gpu_misses import GpuMisses, MissingBits, PooledGpuMisses, parts_within
from inference_session.embedding_cache.gpu_writes import GivenKeys, GivenRows, Piece, Uploads, as_array
from inference_session.embedding_cache.missing_rows import MissingRows
from inference_session.embedding_cache.stats import CacheStats, RowCounts
from inference_session.errors import UnavailableError
from inference_session.kernels.cpu import missing
from inference_session.kernels.cuda import launch as gpu
from inference_session.kernels.cuda.records import (
    BUCKET_BYTES,
    EVENTS,
    GPU_TABLE,
    INDEX,
    SLOTS,
    TARGET,
    aligned,
    rows_by_slot,
    table_bytes,
    table_record,
    zero_bytes,
)
from inference_session.kernels.records import Lookup, address_of
from inference_session.model_spec import bytes_per_row
from inference_session.platform.pacing import Rests

_KEYS_AT_ONCE, _BUCKETS_AT_ONCE = 1 << 14, 1 << 10
"""Rows erased or read back at once: few enough not to delay a request that waits for the device meanwhile."""
_FREE, _BUSY = 0, 255
"""Tags of slots that hold no row."""


class GpuEmbeddingCache(EmbeddingCache):
    """The GPU twin. Tables have the same number of rows, or all they need.

    Keys and vectors to write may be arrays on the same device as well: CuPy's, or any with `__cuda_array_interface__`.

    It caches within sets of 62 rows, not freely as the CPU twin does: from about seven tenths of its capacity on, a row
    may be evicted while there is space elsewhere.
    """

    inserts_late = True

    def __init__(
        self,
        dims: Mapping[str, int],
        cache_bytes: int,
        device: CudaDevice,
        *,
        num_rows: Mapping[str, int] | None = None,
        row_numbers: Mapping[str, int] | None = None,
    ) -> None:
        """Allocate the cache.

        Args:
            dims: embedding_dim of each table by name.
            cache_bytes: upper bound on all memory that the cache keeps on the device; what a look-up or a write needs
                meanwhile is not part of it.
            device: the GPU.
            num_rows: rows that tables have in all, as far as known; the others share what they do not need.
            row_numbers: tables whose keys are row numbers, and how many rows they have. Look-ups may ask for a row by
                its negative number from the end; writes give its number from the start.

        Raises:
            ConfigurationError: cache_bytes is too small for the tables, or the device has too little memory free; the
                message says how much there is.
        """
        super().__init__(dims)
        self.cache_bytes = cache_bytes
        self.device = self._cuda = device
        self._row_bytes = [bytes_per_row(dim, "float32") for dim in dims.values()]
        self._row_numbers = [(row_numbers or {}).get(table, 0) for table in dims]
        limits = [buckets_to_hold((num_rows or {}).get(table)) for table in dims]
        self._num_buckets = buckets_per_table(cache_bytes, self._row_bytes, limits)
        self._rests = Rests()
        self._uploads, self._bits = Uploads(device), MissingBits()
        self._seeds = itertools.count()
        with device.request(), memory_checked(device.device_id, "use a smaller cache or free some memory"):
            gpu.compile_kernels()
            missing.compile_kernels(gpu=True)
            self._allocate()
            self._upload_tables()
        self._last_stats = self.stats()

    def prepare(self, segments: NDArray[np.void]) -> gpu.Launch:
        with self._cuda.request():  # kernels are those of the current device
            return gpu.prepare(segments, self._tables_address)

    def look_up(self, lookup: Lookup) -> int:
        """See EmbeddingCache. Waits for the look-up: only then the missing keys are known."""
        self._check_open()
        launch = gpu.launch_of(lookup, self._tables_address)
        launch.run(
            lookup.segments,
            missing_bits_address=0 if launch.tiles.pooled else self._bits.address_for(launch),
            num_unknown_address=address_of(lookup.num_unknown),
            seed=next(self._seeds) & 0xFFFFFFFF,
        )
        self._count_keys(lookup)
        self._cuda.wait()
        if not np.count_nonzero(lookup.num_unknown):  # as usual, and adding up takes several times as long
            return 0
        num_missing = int(lookup.num_unknown.sum())
        if not launch.tiles.pooled:
            _, positions = self._bits.take(launch.tiles)
            if len(positions) == num_missing:  # else Ctrl-C has interrupted a look-up: these keys are looked up again
                lookup.missing_positions = positions
        return num_missing

    def misses(self, lookup: Lookup) -> Iterator[Misses]:
        """See EmbeddingCache: where keys are pooled, in parts that need a bounded amount of device memory."""
        if lookup.missing_positions is not None:
            with self._cuda.scratch():
                yield GpuMisses(self._cuda, self._dims, lookup)
            return
        for numbers in parts_within(lookup, self._dims):
            self._check_open()  # other threads may use the device, and close the cache, before each further part
            with self._cuda.scratch():
                tables_address = self._uncounted.data.ptr
                yield PooledGpuMisses(
                    self._cuda, self._dims, lookup, numbers=numbers, tables_address=tables_address, bits=self._bits
                )

    def insert(self, table: str, keys: ArrayLike, vectors: ArrayLike) -> None:
        self._write(table, keys, vectors, may_insert=True)

    def insert_missing(self, missing: Sequence[MissingRows]) -> None:
        """See EmbeddingCache: all of them in one transfer, if they are not very many."""
        if self._uploads.takes_at_once(missing):
            self._write_pieces(self._uploads.missing(missing), may_insert=True)
        else:
            super().insert_missing(missing)

    def update(self, table: str, keys: ArrayLike, vectors: ArrayLike) -> None:
        self._write(table, keys, vectors, may_insert=False)

    def erase(self, table: str, keys: ArrayLike) -> None:
        given = GivenKeys(self._cuda, self._checked_keys(table, keys))
        record = self._records[self._positions[table]]
        index, events_address = np.array(record["cached"], INDEX), int(record["events_address"])
        for begin in range(0, len(given.keys) if index["num_buckets"] else 0, _KEYS_AT_ONCE):
            with self._cuda.request():
                self._check_open()
                gpu.erase(index, events_address, given.part(slice(begin, begin + _KEYS_AT_ONCE)))
            self._rests.rest()

    def dump(self, table: str) -> NDArray[np.int64]:
        self._check(table)
        return np.concatenate([np.empty(0, np.int64), *(keys for keys, _ in self._cached(table))])

    def hottest(self, table: str) -> NDArray[np.int64]:
        """See EmbeddingCache: the rows with the highest marks come first."""
        self._check(table)
        cached = [(np.empty(0, np.int64), np.empty(0, np.uint8)), *self._cached(table)]
        keys, marks = map(np.concatenate, zip(*cached, strict=True))
        return keys[np.argsort(np.uint8(255) - marks, kind="stable")]

    def stats(self) -> CacheStats:
        """See EmbeddingCache; on a GPU that has failed, what was known last."""
        self._check_open()
        with contextlib.suppress(UnavailableError), self._cuda.request():
            self._events = self._read_events()
            self._last_stats = super().stats()
        return self._last_stats

    def close(self) -> None:
        """See EmbeddingCache. A failed GPU frees no memory until the process ends."""
        with contextlib.suppress(UnavailableError), self._cuda.request():
            if self._closed:
                return
            self._closed = True
            self._uploads.close()
            self._cuda.wait()
            del self._memory, self._uncounted
            # The next user of the device can use all of the memory.
            cupy.get_default_memory_pool().free_all_blocks()
        self._closed = True

    def _allocate(self) -> None:
        """One piece of device memory for everything."""
        sizes = [table_bytes(*pair) for pair in zip(self._num_buckets, self._row_bytes, strict=True)]
        self._fixed_bytes = fixed_bytes(len(sizes))
        total = self._fixed_bytes + sum(sizes)
        check_free(total, self._cuda.device_id)
        self._memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(total), 0)
        self._memory.memset_async(0, self._fixed_bytes)
        self._events_address: int = self._memory.ptr
        self._tables_address = self._events_address + aligned(len(sizes) * len(EVENTS) * 8)
        self._records, self._targets = np.zeros(len(sizes), GPU_TABLE), np.zeros(len(sizes), TARGET)
        offset = self._fixed_bytes
        for t, (num_buckets, size) in enumerate(zip(self._num_buckets, sizes, strict=True)):
            record = self._records[t] = self._describe(t, offset, num_buckets)
            self._targets[t]["index"], self._targets[t]["rows"] = record["cached"], record["cached_rows"]
            self._targets[t]["events_address"] = record["events_address"]
            (self._memory + offset).memset_async(0, zero_bytes(num_buckets, marks=True))
            offset += size

    def _describe(self, t: int, offset: int, num_buckets: int) -> np.void:
        """The record of a table's part of the memory."""
        dim = int(self._dims[t])
        index, rows = rows_by_slot(self._memory.ptr + offset, num_buckets, dim)
        return table_record(
            dim,
            cached=index,
            cached_rows=rows,
            num_row_numbers=self._row_numbers[t],
            events_address=self._events_address + t * len(EVENTS) * 8,
        )

    def _upload_tables(self) -> None:
        """The records where look-ups read them, and again for look-ups that count nothing."""
        place = self._memory + (self._tables_address - self._memory.ptr)
        cupy.ndarray(self._records.nbytes, np.uint8, place).set(self._records.view(np.uint8).reshape(-1))
        uncounted = self._records.copy()
        uncounted["events_address"] = 0
        self._uncounted: Any = cupy.asarray(uncounted.view(np.uint8).reshape(-1))

    def _as_array(self, values: ArrayLike) -> NDArray[Any]:
        """See EmbeddingCache. Arrays on the device stay there."""
        return as_array(values, self._cuda)

    def _write(self, table: str, keys: ArrayLike, vectors: ArrayLike, *, may_insert: bool) -> None:
        arrays = self._checked_rows(table, keys, vectors)
        given = GivenRows(self._cuda, self._positions[table], *arrays)
        self._write_pieces(self._uploads.pieces(given), may_insert=may_insert)

    def _write_pieces(self, pieces: Iterator[Piece], *, may_insert: bool) -> None:
        for number, piece in enumerate(pieces):
            if number:
                self._rests.rest()
            with self._cuda.request():
                self._check_open()
                addresses, _kept = piece.arrived(self._cuda)
                targets = self._targets[piece.part.tables]
                targets["keys_address"], targets["vectors_address"] = addresses.T
                targets["num_keys"] = piece.part.num_keys
                for some in np.split(targets, piece.part.splits):
                    gpu.write_rows(some, may_insert=may_insert, may_evict=may_insert)

    def _cached(self, table: str) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
        """Keys and marks of the rows that are cached, some buckets at a time: a row never leaves its bucket."""
        index = self._records[self._positions[table]]["cached"]
        num_buckets = int(index["num_buckets"])
        for begin in range(0, num_buckets, _BUCKETS_AT_ONCE):
            buckets = begin, min(_BUCKETS_AT_ONCE, num_buckets - begin)
            with self._cuda.request():
                self._check_open()
                tags = self._read(index["tags_address"], *buckets, BUCKET_BYTES, np.uint8)[:, :SLOTS]
                marks = self._read(index["marks_address"], *buckets, BUCKET_BYTES, np.uint8)[:, :SLOTS]
                keys = self._read(index["keys_address"], *buckets, SLOTS, np.int64)
            cached = (tags != _FREE) & (tags != _BUSY)
            yield keys[cached], marks[cached]
            self._rests.rest()

    def _read(self, address: np.int64, begin: int, num_buckets: int, per_bucket: int, dtype: Any) -> NDArray[Any]:
        """The content of some buckets: [num_buckets, per_bucket]."""
        offset = int(address) - self._memory.ptr + begin * per_bucket * np.dtype(dtype).itemsize
        array = cupy.ndarray((num_buckets, per_bucket), dtype, self._memory + offset)
        return np.asarray(cupy.asnumpy(array))

    def _read_events(self) -> NDArray[np.int64]:
        """Counts by table and event, between two writes."""
        memory = self._memory + (self._events_address - self._memory.ptr)
        counts = cupy.ndarray((len(self.dims), len(EVENTS)), np.int64, memory)
        return np.asarray(cupy.asnumpy(counts))

    def _lookup_counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        with self._count_lock:
            return self._num_keys.copy(), self._events[:, EVENTS.index("misses")]

    def _row_counts(self, table: str) -> RowCounts:
        t = self._positions[table]
        inserts, updates, evictions, erases = self._events[t, :4].tolist()
        num_buckets = self._num_buckets[t]
        num_bytes = table_bytes(num_buckets, self._row_bytes[t]) + (self._fixed_bytes if t == 0 else 0)
        rows = inserts - evictions - erases
        return RowCounts(inserts, updates, evictions, erases, rows, SLOTS * num_buckets, num_bytes)
