"""CpuEmbeddingCache: rows in host memory, read by the look-up kernel without a lock while others write.

A look-up enters a set (`Readers`) while it runs. A writer never changes a row that the index points to. It retires the
row and writes to a free one (kernels/cpu/cache.py). When it has used up the free rows, it waits until the look-ups that
were running have ended. So a look-up never waits for a writer, and a writer waits for one look-up at most.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inference_session.device.host import HOST, Readers, zeros_at_line
from inference_session.embedding_cache import cpu_budget
from inference_session.embedding_cache.base import EmbeddingCache, Misses
from inference_session.embedding_cache.missing_rows import MissingRows, empty_tables
from inference_session.embedding_cache.stats import RowCounts
from inference_session.errors import ConfigurationError, InvalidRequestError
from inference_session.kernels.cpu import cache as cpu_cache
from inference_session.kernels.cpu import lookup as cpu
from inference_session.kernels.cpu import missing
from inference_session.kernels.cpu.cache import CacheArrays
from inference_session.kernels.cpu.hash_index import BUCKET_BYTES
from inference_session.kernels.cpu.lookup import NO_POSITIONS
from inference_session.kernels.records import MAX_MARK, TABLE, Lookup, PoolingCode, address_of, table_record
from inference_session.platform.memory import total_bytes

_Result = TypeVar("_Result")
_AS_COMPILED: tuple[Literal["C"], Literal["A"], Literal["W"]] = ("C", "A", "W")
"""Arrays of any other kind, such as views of a message's bytes, would make Numba compile the kernels again."""


class HostCache(EmbeddingCache):
    """A cache whose rows the CPU kernels read."""

    device = HOST

    def __init__(self, dims: Mapping[str, int], *, num_threads: int = 1) -> None:
        """`num_threads`: threads over which a large look-up is split."""
        super().__init__(dims)
        self.num_threads = num_threads
        self._num_missing = np.zeros(len(dims), np.int64)
        missing.compile_kernels(gpu=False)

    @abstractmethod
    def read(self, use: Callable[[NDArray[np.void]], _Result]) -> _Result:
        """Call `use` with TABLE records, in the order of `dims`, for calls of the look-up kernel until it returns.

        It should be short, and must not write to the cache: writers wait for it to end.
        """

    def look_up(self, lookup: Lookup) -> int:
        positions = np.empty(lookup.num_keys.sum(), np.int64)
        arguments = lookup.segments, lookup.num_unknown, positions, self.num_threads
        num_missing = self.read(lambda records: cpu.look_up(records, *arguments))
        lookup.missing_positions = positions[:num_missing]
        self._count(lookup, num_missing)
        return num_missing

    def _count(self, lookup: Lookup, num_missing: int) -> None:
        """Count keys and missing ones in one step: else readers would first see all as hits, then fewer."""
        asked = self._by_table(lookup.segments, lookup.num_keys)
        missing = self._by_table(lookup.segments, lookup.num_unknown) if num_missing else 0
        with self._count_lock:
            self._num_keys += asked
            self._num_missing += missing

    def misses(self, lookup: Lookup) -> Iterator[Misses]:
        """See EmbeddingCache: all of it at once."""
        positions = lookup.missing_positions
        if positions is not None and len(positions):
            yield _HostMisses(self, self._dims, lookup, positions)

    def _lookup_counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        with self._count_lock:
            return self._num_keys.copy(), self._num_missing.copy()


class CpuEmbeddingCache(HostCache):
    """The CPU twin. Every table has a share of the budget that allows all of them the same number of rows."""

    def __init__(
        self,
        dims: Mapping[str, int],
        cache_bytes: int,
        *,
        num_rows: Mapping[str, int] | None = None,
        num_threads: int = 1,
    ) -> None:
        """Allocate the cache.

        Args:
            dims: embedding_dim of each table by name.
            cache_bytes: upper bound on all memory that the cache allocates; results of look-ups are the caller's.
            num_rows: rows that tables have in all, as far as known; the others share what they do not need.
            num_threads: threads over which a large look-up is split.

        Raises:
            ConfigurationError: cache_bytes is too small for one row per table (the message says what would do), or
                more than there is.
        """
        super().__init__(dims, num_threads=num_threads)
        self.cache_bytes = cache_bytes
        rows = cpu_budget.rows_per_table(dims, cache_bytes, num_rows)
        _check_memory(cpu_budget.allocated_bytes(dims, rows))
        try:
            self.arrays = {t: allocate(n, cpu_budget.row_bytes(dims[t])) for t, n in rows.items()}
        except MemoryError as error:
            message = f"cache_bytes is {cache_bytes}, more memory than this process can allocate: {error}"
            raise ConfigurationError(message) from error
        self._capacities = {table: n - cpu_budget.spare_rows(n) for table, n in rows.items()}
        self.records = _describe(self.arrays.values(), dims.values())
        """TABLE records of them, which look-ups read."""
        self.readers = Readers()
        """Look-ups under way: what they may read stays as it is until they end."""
        self._write_lock = Lock()
        cpu.compile_kernels()
        for arrays in self.arrays.values():
            cpu_cache.compile_kernels(arrays)

    def read(self, use: Callable[[NDArray[np.void]], _Result]) -> _Result:
        def use_if_open() -> _Result:
            # Checked after we enter the set: `close` sets it, then waits for all look-ups in the set.
            self._check_open()
            return use(self.records)

        return self.readers.read(use_if_open)

    def insert(self, table: str, keys: ArrayLike, vectors: ArrayLike) -> None:
        self._write(table, keys, vectors, may_insert=True)

    def insert_missing(self, missing: Sequence[MissingRows]) -> None:
        """See EmbeddingCache: these arrays need no checks."""
        tables = list(self.dims)
        for rows in missing:
            for t, part in rows.by_table.items():
                self._write_checked(tables[t], part.keys, part.vectors.view(np.uint8), may_insert=True)

    def update(self, table: str, keys: ArrayLike, vectors: ArrayLike) -> None:
        self._write(table, keys, vectors, may_insert=False)

    def erase(self, table: str, keys: ArrayLike) -> None:
        checked = np.require(self._checked_keys(table, keys), np.int64, _AS_COMPILED)
        with self._write_lock:
            self._check(table)
            cpu_cache.erase_rows(self.arrays[table], checked)

    def dump(self, table: str) -> NDArray[np.int64]:
        with self._write_lock:
            self._check(table)
            arrays = self.arrays[table]
            return arrays.keys[arrays.lists >= cpu_cache.SMALL]

    def hottest(self, table: str) -> NDArray[np.int64]:
        with self._write_lock:
            self._check(table)
            arrays = self.arrays[table]
            cached = np.flatnonzero(arrays.lists >= cpu_cache.SMALL)
            keys, lists, marks = arrays.keys[cached], arrays.lists[cached], arrays.marks[cached]
        heat = marks + np.uint8(MAX_MARK + 1) * (lists == cpu_cache.MAIN)
        return keys[np.argsort(np.uint8(255) - heat, kind="stable")]

    def close(self) -> None:
        with self._write_lock:
            self._closed = True
            if self.arrays:  # else it has been closed before, and to its end
                self._await_readers()
                self.arrays = {}

    def _write(self, table: str, keys: ArrayLike, vectors: ArrayLike, *, may_insert: bool) -> None:
        checked, floats = self._checked_rows(table, keys, vectors)
        with np.errstate(over="ignore"):
            rows = np.require(floats, np.float32, _AS_COMPILED).view(np.uint8)
        self._write_checked(table, np.require(checked, np.int64, _AS_COMPILED), rows, may_insert=may_insert)

    def _write_checked(self, table: str, keys: NDArray[np.int64], rows: NDArray[np.uint8], *, may_insert: bool) -> None:
        """`rows`: float32 vectors as bytes, [n, 4 * embedding_dim]."""
        with self._write_lock:
            self._check(table)
            arrays, capacity = self.arrays[table], self._capacities[table]
            done = cpu_cache.write_rows(arrays, capacity, keys, rows, 0, may_insert)
            while done < len(keys):
                self._await_readers()
                cpu_cache.free_retired(arrays)
                done = cpu_cache.write_rows(arrays, capacity, keys, rows, done, may_insert)

    def _await_readers(self) -> None:
        """Wait until the look-ups that are running have ended; later ones see what was written before.

        Must be called while holding the write lock.
        """
        if self.readers.includes_this_thread:
            raise InvalidRequestError("a thread cannot write to or close an embedding cache that it is reading")
        self.readers.wait_for_those_under_way()

    def _row_counts(self, table: str) -> RowCounts:
        with self._write_lock:
            self._check(table)
            arrays = self.arrays[table]
            rows = arrays.counts[cpu_cache.SMALL] + arrays.counts[cpu_cache.MAIN]
            num_bytes = cpu_budget.table_bytes(len(arrays.keys), arrays.vectors.shape[1])
            inserts, updates, evictions, erases = arrays.events.tolist()
            return RowCounts(inserts, updates, evictions, erases, int(rows), self._capacities[table], num_bytes)


class _HostMisses(Misses):
    """The missing keys of a look-up in host memory."""

    def __init__(self, cache: HostCache, dims: NDArray[np.int64], lookup: Lookup, positions: NDArray[np.int64]) -> None:
        self._cache, self._dims, self._lookup = cache, dims, lookup
        self.rows = MissingRows(dims, lookup.segments, lookup.num_unknown.copy(), positions)

    def complete(self) -> Misses | None:
        lookup, rows = self._lookup, self.rows
        lookup.num_unknown[:] = 0
        rows.write(lookup.num_unknown)
        pooled = np.flatnonzero((lookup.segments["pooling"] != PoolingCode.NONE) & (rows.counts > 0))
        if len(pooled) and self._pool_again(lookup.segments[pooled]):
            return _PooledMisses(self._cache, self._dims, lookup, pooled)
        return None

    def _pool_again(self, segments: NDArray[np.void]) -> int:
        """Look pooled segments up again, now with the missing rows; returns how many keys are still missing, because
        the cache has dropped their rows meanwhile.
        """

        def look_up(records: NDArray[np.void]) -> int:
            tables = np.concatenate([records, self.rows.records])
            tables["next_table"][: len(records)] = np.arange(len(records), len(tables))
            num_missing = np.zeros(len(segments), np.int64)
            return cpu.look_up(tables, segments, num_missing, NO_POSITIONS, self._cache.num_threads)

        return self._cache.read(look_up)


class _PooledMisses(Misses):
    """Pooled segments, without the cache: all their keys are fetched, so that no row can vanish in between."""

    def __init__(self, cache: HostCache, dims: NDArray[np.int64], lookup: Lookup, segments: NDArray[np.intp]) -> None:
        """`segments`: which of the look-up's."""
        self._lookup, self._numbers, self._num_threads = lookup, segments, cache.num_threads
        self._segments, num_keys = lookup.segments[segments], lookup.num_keys[segments]
        positions = np.empty(num_keys.sum(), np.int64)
        counts = np.zeros_like(num_keys)
        cpu.look_up(empty_tables(dims), self._segments, counts, positions, self._num_threads)
        self.rows = MissingRows(dims, self._segments, num_keys, positions)

    def complete(self) -> None:
        num_unknown = np.zeros(len(self._segments), np.int64)
        self.rows.write(num_unknown)
        cpu.look_up(self.rows.records, self._segments, np.zeros_like(num_unknown), NO_POSITIONS, self._num_threads)
        self._lookup.num_unknown[self._numbers] = num_unknown


def _check_memory(needed: int) -> None:
    """Refuse more memory than there is: Linux may promise it, and end the process when the cache fills."""
    there_are = total_bytes()
    if 0 < there_are < needed:
        raise ConfigurationError(
            f"the cache would take {needed} bytes, and this machine, or its container, has {there_are} bytes of memory:"
            " set a smaller cache_bytes"
        )


def count_hits(keys: NDArray[np.int64], *, capacity: int) -> int:
    """How many of the keys, int64 [n], a cache made to hold this many rows (bytes_to_hold) would have had, if it
    got each missing one at once.
    """
    num_rows = cpu_budget.rows_to_hold(capacity)
    arrays = allocate(num_rows, row_bytes=0)
    asked = np.require(keys, np.int64, _AS_COMPILED)
    return int(cpu_cache.replay_keys(arrays, num_rows - cpu_budget.spare_rows(num_rows), asked))


def allocate(num_rows: int, row_bytes: int) -> CacheArrays:
    """The memory of an empty cache of one table."""
    arrays = CacheArrays(
        buckets=zeros_at_line(cpu_budget.buckets_of(num_rows), BUCKET_BYTES),
        keys=np.zeros(num_rows, np.int64),
        vectors=zeros_at_line(num_rows, row_bytes),
        marks=np.zeros(num_rows, np.uint8),
        lists=np.zeros(num_rows, np.uint8),
        links=np.zeros((num_rows + cpu_cache.NUM_LISTS, 2), np.uint32),
        counts=np.zeros(cpu_cache.NUM_LISTS, np.int64),
        ghosts=np.zeros(cpu_budget.GHOSTS_PER_ROW * num_rows, np.uint16),
        events=np.zeros(cpu_cache.NUM_EVENTS, np.int64),
    )
    cpu_cache.link_all_free(arrays)
    return arrays


def _describe(tables: Iterable[CacheArrays], dims: Iterable[int]) -> NDArray[np.void]:
    records = [
        table_record(
            arrays.vectors,
            dim,
            keys=arrays.keys,
            index_address=address_of(arrays.buckets),
            num_buckets=len(arrays.buckets),
            marks=arrays.marks,
        )
        for arrays, dim in zip(tables, dims, strict=True)
    ]
    return np.array(records, TABLE)
