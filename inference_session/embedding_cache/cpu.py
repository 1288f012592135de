"""CpuEmbeddingCache: rows in host memory, read by the look-up kernel without a lock while others write.

Look-ups announce themselves in a set for as long as they run. A writer never touches a row that the index leads to; it
retires rows instead (kernels/cpu/cache.py), and when it has used up the free ones, waits until the look-ups that were
under way have ended. So a look-up never waits for a writer, and a writer waits for one look-up at most.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inference_session.device.host import LINE_BYTES, zeros_at_line
from inference_session.device.readers import Readers
from inference_session.embedding_cache.base import check_range
from inference_session.embedding_cache.host import HostCache
from inference_session.embedding_cache.stats import RowCounts
from inference_session.errors import ConfigurationError, InvalidRequestError
from inference_session.kernels.cpu import cache as cpu_cache
from inference_session.kernels.cpu import lookup as cpu
from inference_session.kernels.cpu.cache import CacheArrays
from inference_session.kernels.cpu.hash_index import BUCKET_BYTES, MAX_ROWS
from inference_session.kernels.records import MAX_MARK, TABLE, VectorCode, address_of, table_record
from inference_session.model_spec import VectorType, bytes_per_row
from inference_session.tables.quantized_rows import quantize_int8

ROWS_PER_BUCKET = 6
"""Half of its slots, so that a bucket hardly ever overflows."""
GHOSTS_PER_ROW = 2
_SPARE_PARTS, _MAX_SPARE_ROWS = 16, 4096
"""One row in this many is kept free for writers, up to a limit."""
_MOST_ROWS = MAX_ROWS - cpu_cache.NUM_LISTS
_AS_COMPILED: tuple[Literal["C"], Literal["A"], Literal["W"]] = ("C", "A", "W")
"""Arrays of any other kind, such as views of a message's bytes, would make Numba compile the kernels again."""


class CpuEmbeddingCache(HostCache):
    """The CPU twin. Every table has a share of the budget that allows all of them the same number of rows."""

    def __init__(
        self,
        dims: Mapping[str, int],
        cache_bytes: int,
        *,
        dtype: VectorType = "float32",
        num_rows: Mapping[str, int] | None = None,
        num_threads: int = 1,
    ) -> None:
        """Allocate the cache.

        Args:
            dims: embedding_dim of each table by name.
            cache_bytes: upper bound on all memory that the cache allocates; results of look-ups are the caller's.
            dtype: how rows are held. float16 rounds to nearest, int8 as `quantize_int8` says.
            num_rows: rows that tables have in all, as far as known; the others share what they do not need.
            num_threads: threads over which a large look-up is split.

        Raises:
            ConfigurationError: cache_bytes is too small for one row per table (the message says what would do), or
                more than there is.
        """
        super().__init__(dims, num_threads=num_threads)
        if dtype not in get_args(VectorType):
            raise ConfigurationError(f"dtype {dtype!r} is not one of {', '.join(get_args(VectorType))}")
        self.cache_bytes = cache_bytes
        self.dtype = dtype
        row_bytes = [bytes_per_row(dim, dtype) for dim in dims.values()]
        limits = [_rows_to_hold((num_rows or {}).get(table, _MOST_ROWS)) for table in dims]
        rows = _rows_per_table(cache_bytes, row_bytes, limits)
        try:
            self.arrays = {t: allocate(n, size) for t, n, size in zip(dims, rows, row_bytes, strict=True)}
        except MemoryError as error:
            message = f"cache_bytes is {cache_bytes}, more memory than this process can allocate: {error}"
            raise ConfigurationError(message) from error
        self._capacities = {table: n - _spare_rows(n) for table, n in zip(dims, rows, strict=True)}
        self.records = _describe(self.arrays.values(), dims.values(), dtype)
        """TABLE records of them, which look-ups read."""
        self.readers = Readers()
        """Look-ups under way: what they may read stays as it is until they end."""
        self._write_lock = Lock()
        cpu.compile_kernels()
        for arrays in self.arrays.values():
            cpu_cache.compile_kernels(arrays)

    @contextlib.contextmanager
    def reading(self) -> Iterator[NDArray[np.void]]:
        """See HostCache."""
        reader = self.readers.enter()
        try:
            # Checked after we enter the set: `close` sets it, then waits for all look-ups in the set.
            self._check_open()
            yield self.records
        finally:
            self.readers.leave(reader)

    def insert(self, table: str, keys: ArrayLike, vectors: ArrayLike) -> None:
        """See EmbeddingCache."""
        self._write(table, keys, vectors, may_insert=True)

    def update(self, table: str, keys: ArrayLike, vectors: ArrayLike) -> None:
        """See EmbeddingCache."""
        self._write(table, keys, vectors, may_insert=False)

    def erase(self, table: str, keys: ArrayLike) -> None:
        """See EmbeddingCache."""
        checked = np.require(self._checked_keys(table, keys), np.int64, _AS_COMPILED)
        with self._write_lock:
            self._check(table)
            cpu_cache.erase_rows(self.arrays[table], checked)

    def dump(self, table: str) -> NDArray[np.int64]:
        """See EmbeddingCache."""
        with self._write_lock:
            self._check(table)
            arrays = self.arrays[table]
            return arrays.keys[arrays.lists >= cpu_cache.SMALL]

    def hottest(self, table: str) -> NDArray[np.int64]:
        """See EmbeddingCache."""
        with self._write_lock:
            self._check(table)
            arrays = self.arrays[table]
            cached = np.flatnonzero(arrays.lists >= cpu_cache.SMALL)
            keys, lists, marks = arrays.keys[cached], arrays.lists[cached], arrays.marks[cached]
        heat = marks + np.uint8(MAX_MARK + 1) * (lists == cpu_cache.MAIN)
        return keys[np.argsort(np.uint8(255) - heat, kind="stable")]

    def close(self) -> None:
        """See EmbeddingCache."""
        with self._write_lock:
            if self._closed:
                return
            self._closed = True
            self._await_readers()
            self.arrays = {}

    def __repr__(self) -> str:
        if self._closed:
            return "<CpuEmbeddingCache closed>"
        stats = self.stats()
        return f"<CpuEmbeddingCache [{len(self.dims)} tables, {stats.rows} of {stats.capacity} rows]>"

    def _write(self, table: str, keys: ArrayLike, vectors: ArrayLike, *, may_insert: bool) -> None:
        checked, floats = self._checked_rows(table, keys, vectors)
        rows = self._encode(table, floats)
        checked = np.require(checked, np.int64, _AS_COMPILED)
        with self._write_lock:
            self._check(table)
            arrays, capacity = self.arrays[table], self._capacities[table]
            done = cpu_cache.write_rows(arrays, capacity, checked, rows, 0, may_insert)
            while done < len(checked):
                self._await_readers()
                cpu_cache.free_retired(arrays)
                done = cpu_cache.write_rows(arrays, capacity, checked, rows, done, may_insert)

    def _await_readers(self) -> None:
        """Wait until the look-ups under way have ended; later ones see what was written before.

        Must be called while holding the write lock.
        """
        if self.readers.includes_this_thread:
            raise InvalidRequestError("a thread cannot write to or close an embedding cache that it is reading()")
        self.readers.wait_for_those_under_way()

    def _encode(self, table: str, vectors: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
        """Vectors as rows of the cache: uint8 [n, row_bytes]."""
        check_range(table, vectors, self.dtype)
        if self.dtype == "int8":
            return quantize_int8(vectors)
        with np.errstate(over="ignore"):
            return np.require(vectors, self.dtype, _AS_COMPILED).view(np.uint8)

    def _row_counts(self, table: str) -> RowCounts:
        with self._write_lock:
            self._check(table)
            arrays = self.arrays[table]
            rows = arrays.counts[cpu_cache.SMALL] + arrays.counts[cpu_cache.MAIN]
            num_bytes = _num_bytes(len(arrays.keys), arrays.vectors.shape[1])
            inserts, updates, evictions, erases = arrays.events.tolist()
            return RowCounts(inserts, updates, evictions, erases, int(rows), self._capacities[table], num_bytes)


def bytes_to_hold(dims: Mapping[str, int], num_rows: Mapping[str, int], dtype: VectorType = "float32") -> int:
    """The cache_bytes that a cache for this many rows of each table takes."""
    return sum(_num_bytes(_rows_to_hold(num_rows[table]), bytes_per_row(dim, dtype)) for table, dim in dims.items())


def rows_held(
    dims: Mapping[str, int],
    cache_bytes: int,
    num_rows: Mapping[str, int] | None = None,
    dtype: VectorType = "float32",
) -> dict[str, int]:
    """The rows of each table that a cache of this many bytes keeps; ConfigurationError where it cannot keep any."""
    row_bytes = [bytes_per_row(dim, dtype) for dim in dims.values()]
    limits = [_rows_to_hold((num_rows or {}).get(table, _MOST_ROWS)) for table in dims]
    rows = _rows_per_table(cache_bytes, row_bytes, limits)
    return {table: n - _spare_rows(n) for table, n in zip(dims, rows, strict=True)}


def count_hits(keys: NDArray[np.int64], *, capacity: int) -> int:
    """How many of the keys, int64 [n], a cache made to hold this many rows (bytes_to_hold) would have had, if it
    got each missing one at once.
    """
    num_rows = _rows_to_hold(capacity)
    arrays = allocate(num_rows, row_bytes=0)
    asked = np.require(keys, np.int64, _AS_COMPILED)
    return int(cpu_cache.replay_keys(arrays, num_rows - _spare_rows(num_rows), asked))


def _rows_to_hold(num_rows: int) -> int:
    """Rows, spare ones included, that a table of this many rows needs."""
    return min(num_rows + min(num_rows // (_SPARE_PARTS - 1), _MAX_SPARE_ROWS) + 2, _MOST_ROWS)


def _spare_rows(num_rows: int) -> int:
    return min(max(num_rows // _SPARE_PARTS, 1), _MAX_SPARE_ROWS)


def _rows_per_table(cache_bytes: int, row_bytes: Sequence[int], limits: Sequence[int]) -> list[int]:
    """The same number of rows for each table, or its limit, such that all fit."""
    least = sum(_num_bytes(2, size) for size in row_bytes)
    if cache_bytes < least:
        raise ConfigurationError(
            f"cache_bytes is {cache_bytes}, too little for {len(row_bytes)} tables: set at least {least}, or 0 "
            "for no cache"
        )
    rows = list(limits)
    low, high = 2, max(limits, default=2)
    while low < high:
        middle = (low + high + 1) // 2
        rows = [min(middle, limit) for limit in limits]
        fits = sum(_num_bytes(n, size) for n, size in zip(rows, row_bytes, strict=True)) <= cache_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return [min(low, limit) for limit in limits]


def _num_bytes(num_rows: int, row_bytes: int) -> int:
    """The memory of a table with this many rows."""
    num_buckets = -(-num_rows // ROWS_PER_BUCKET)
    per_row = row_bytes + 8 + 1 + 1 + 2 * 4 + 2 * GHOSTS_PER_ROW
    heads_and_counts = cpu_cache.NUM_LISTS * (2 * 4 + 8) + 8 * cpu_cache.NUM_EVENTS
    return num_buckets * BUCKET_BYTES + num_rows * per_row + heads_and_counts + 2 * LINE_BYTES + TABLE.itemsize


def allocate(num_rows: int, row_bytes: int) -> CacheArrays:
    """The memory of an empty cache of one table."""
    num_buckets = -(-num_rows // ROWS_PER_BUCKET)
    arrays = CacheArrays(
        buckets=zeros_at_line(num_buckets, BUCKET_BYTES),
        keys=np.zeros(num_rows, np.int64),
        vectors=zeros_at_line(num_rows, row_bytes),
        marks=np.zeros(num_rows, np.uint8),
        lists=np.zeros(num_rows, np.uint8),
        links=np.zeros((num_rows + cpu_cache.NUM_LISTS, 2), np.uint32),
        counts=np.zeros(cpu_cache.NUM_LISTS, np.int64),
        ghosts=np.zeros(GHOSTS_PER_ROW * num_rows, np.uint16),
        events=np.zeros(cpu_cache.NUM_EVENTS, np.int64),
    )
    cpu_cache.link_all_free(arrays)
    return arrays


def _describe(tables: Iterable[CacheArrays], dims: Iterable[int], dtype: VectorType) -> NDArray[np.void]:
    records = [
        table_record(
            arrays.vectors,
            dim,
            code=VectorCode[dtype.upper()],
            keys=arrays.keys,
            index_address=address_of(arrays.buckets),
            num_buckets=len(arrays.buckets),
            marks=arrays.marks,
        )
        for arrays, dim in zip(tables, dims, strict=True)
    ]
    return np.array(records, TABLE)
