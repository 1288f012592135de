"""What caches in host memory have in common: how the processor looks keys up in them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from inference_session.device.host import HOST
from inference_session.embedding_cache.base import EmbeddingCache, Misses
from inference_session.embedding_cache.missing_rows import MissingRows, empty_tables
from inference_session.kernels.cpu import lookup as cpu
from inference_session.kernels.cpu.lookup import NO_POSITIONS
from inference_session.kernels.records import SEGMENT, Lookup, PoolingCode


class HostCache(EmbeddingCache):
    """A cache whose rows the CPU kernels read."""

    device = HOST

    def __init__(self, dims: Mapping[str, int], *, num_threads: int = 1) -> None:
        """`num_threads`: threads over which a large look-up is split."""
        super().__init__(dims)
        self.num_threads = num_threads
        self._num_missing = np.zeros(len(dims), np.int64)
        MissingRows(self._dims, np.zeros(0, SEGMENT), NO_POSITIONS, NO_POSITIONS).write(NO_POSITIONS)  # compiles

    @abstractmethod
    def reading(self) -> AbstractContextManager[NDArray[np.void]]:
        """TABLE records, in the order of `dims`, for calls of the look-up kernel while the context lasts.

        Keep the context short, and do not write to the cache inside it: writers wait for it to end.
        """

    def look_up(self, lookup: Lookup) -> int:
        """See EmbeddingCache."""
        positions = np.empty(lookup.num_keys.sum(), np.int64)
        with self.reading() as records:
            num_missing = cpu.look_up(records, lookup.segments, lookup.num_unknown, positions, self.num_threads)
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
            yield _HostMisses(self, lookup, positions)

    def _lookup_counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        with self._count_lock:
            return self._num_keys.copy(), self._num_missing.copy()


class _HostMisses(Misses):
    """The missing keys of a look-up in host memory."""

    def __init__(self, cache: HostCache, lookup: Lookup, positions: NDArray[np.int64]) -> None:
        self._cache = cache
        self._lookup = lookup
        self._dims = np.array(list(cache.dims.values()), np.int64)
        self.rows = MissingRows(self._dims, lookup.segments, lookup.num_unknown.copy(), positions)

    def complete(self) -> Misses | None:
        """See Misses."""
        lookup, rows = self._lookup, self.rows
        lookup.num_unknown[:] = 0
        rows.write(lookup.num_unknown)
        pooled = np.flatnonzero((lookup.segments["pooling"] != PoolingCode.NONE) & (rows.counts > 0))
        if len(pooled) and self._pool_again(lookup.segments[pooled]):
            return _PooledMisses(self._cache, self._dims, lookup, pooled)
        return None

    def _pool_again(self, segments: NDArray[np.void]) -> int:
        """Look pooled segments up again, now with the missing rows; returns how many keys are missing still, because
        the cache has dropped their rows meanwhile.
        """
        with self._cache.reading() as records:
            tables = np.concatenate([records, self.rows.records])
            tables["next_table"][: len(records)] = np.arange(len(records), len(tables))
            num_missing = np.zeros(len(segments), np.int64)
            return cpu.look_up(tables, segments, num_missing, NO_POSITIONS, self._cache.num_threads)


class _PooledMisses(Misses):
    """Pooled segments, without the cache: all their keys are fetched, so that no row can vanish in between."""

    def __init__(self, cache: HostCache, dims: NDArray[np.int64], lookup: Lookup, segments: NDArray[np.intp]) -> None:
        """`segments`: which of the look-up's."""
        self._lookup, self._places, self._num_threads = lookup, segments, cache.num_threads
        self._segments, num_keys = lookup.segments[segments], lookup.num_keys[segments]
        positions = np.empty(num_keys.sum(), np.int64)
        counts = np.zeros_like(num_keys)
        cpu.look_up(empty_tables(dims), self._segments, counts, positions, self._num_threads)
        self.rows = MissingRows(dims, self._segments, num_keys, positions)

    def complete(self) -> None:
        """See Misses."""
        num_unknown = np.zeros(len(self._segments), np.int64)
        self.rows.write(num_unknown)
        cpu.look_up(self.rows.records, self._segments, np.zeros_like(num_unknown), NO_POSITIONS, self._num_threads)
        self._lookup.num_unknown[self._places] = num_unknown
