"""Rows of a parameter server, the hottest of them in a cache in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from inference_session.embedding_cache.cpu import CpuEmbeddingCache
from inference_session.embedding_cache.null import NullEmbeddingCache, empty_tables
from inference_session.kernels.cpu import lookup as cpu
from inference_session.kernels.cpu.lookup import NO_POSITIONS
from inference_session.kernels.records import SEGMENT, PoolingCode
from inference_session.model_spec import TableSpec
from inference_session.parameter_server.server import ParameterServer
from inference_session.rows.overlay import Overlay
from inference_session.rows.stored import StoredRows

HostCache: TypeAlias = "CpuEmbeddingCache | NullEmbeddingCache"


class CachedRows(StoredRows):
    """StoredRows that the processor looks up.

    What the cache has goes straight to the outputs, in one call of the kernel; the rest is completed from what was
    fetched.
    """

    _cache: HostCache

    def __init__(
        self,
        specs: Sequence[TableSpec],
        cache: HostCache,
        server: ParameterServer,
        *,
        num_threads: int,
        refresh_interval_s: float = 0.0,
        async_from: float | None = None,
    ) -> None:
        """As StoredRows. `num_threads`: threads over which a large look-up is split."""
        super().__init__(specs, cache, server, refresh_interval_s=refresh_interval_s, async_from=async_from)
        self._num_threads = num_threads
        self._nothing = [0] * len(specs)
        Overlay(self._dims, np.zeros(0, SEGMENT), NO_POSITIONS, NO_POSITIONS).write(NO_POSITIONS)  # compiles

    def look_up(self, segments: NDArray[np.void], num_keys: NDArray[np.int64], num_unknown: NDArray[np.int64]) -> None:
        """See RowSource.

        Raises:
            UnavailableError: a tier is down that may have one of the keys, and the settings want no default instead.
        """
        num_missing = np.zeros(len(segments), np.int64)
        positions = np.empty(num_keys.sum(), np.int64)
        with self._cache.reading() as records:
            count = cpu.lookup(records, segments, num_missing, positions, self._num_threads)
        missing = self._by_table(segments, num_missing) if count else self._nothing
        self._cache.count_lookups(range(len(self._specs)), self._by_table(segments, num_keys), missing)
        num_unknown[:] = 0
        if count:
            overlay = Overlay(self._dims, segments, num_missing, positions[:count])
            if self._late is None or self._waits(count, num_keys.sum()):
                self._fetch(overlay)
                self._finish(overlay, num_keys, num_unknown)
                # Not before: these rows might have taken the place of some that were about to be pooled.
                self._keep([overlay])
            else:
                self._fill_by_default(overlay)
                self._finish(overlay, num_keys, num_unknown)
                self._late.put(overlay)

    def _finish(self, overlay: Overlay, num_keys: NDArray[np.int64], num_unknown: NDArray[np.int64]) -> None:
        """Complete the segments that have missing keys from the overlay, whose vectors are there."""
        overlay.write(num_unknown)
        pooled = np.flatnonzero((overlay.segments["pooling"] != PoolingCode.NONE) & (overlay.counts > 0))
        if len(pooled) and self._pool_again(overlay.segments[pooled], overlay):
            num_unknown[pooled] = self._pool_without_cache(overlay.segments[pooled], num_keys[pooled])

    def _pool_again(self, segments: NDArray[np.void], overlay: Overlay) -> int:
        """Look pooled segments up again, now with what was fetched; returns how many keys are missing still, because
        the cache has dropped their rows meanwhile.
        """
        with self._cache.reading() as records:
            tables = np.concatenate([records, overlay.records])
            tables["next_table"][: len(records)] = np.arange(len(records), len(tables))
            return cpu.lookup(tables, segments, np.zeros(len(segments), np.int64), NO_POSITIONS, self._num_threads)

    def _pool_without_cache(self, segments: NDArray[np.void], num_keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Fetch all keys of pooled segments and look them up there alone: nothing can vanish in between, so this is
        the end of it. Returns the unknown keys per segment.
        """
        positions = np.empty(num_keys.sum(), np.int64)
        num_unknown = np.zeros_like(num_keys)
        cpu.lookup(empty_tables(self._dims), segments, num_unknown, positions, self._num_threads)
        overlay = Overlay(self._dims, segments, num_keys, positions)
        self._fetch(overlay)
        overlay.write(num_unknown)
        cpu.lookup(overlay.records, segments, np.zeros_like(num_keys), NO_POSITIONS, self._num_threads)
        return num_unknown

    def _by_table(self, segments: NDArray[np.void], counts: NDArray[np.int64]) -> list[int]:
        sums: list[int] = np.bincount(segments["table"], counts, len(self._specs)).astype(np.int64).tolist()
        return sums
