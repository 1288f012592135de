"""Rows of stores, the hottest of them in caches: this module fetches the keys that a cache lacks."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from inference_session.device.host import HOST
from inference_session.embedding_cache.base import EmbeddingCache, Misses
from inference_session.embedding_cache.missing_rows import MissingRows
from inference_session.embedding_cache.stats import CacheStats
from inference_session.errors import HotrowError, SessionClosedError
from inference_session.kernels.cpu.lookup import NO_POSITIONS
from inference_session.kernels.records import Lookup
from inference_session.model_spec import TableSpec
from inference_session.parameter_server.base import FetchRequest
from inference_session.parameter_server.server import ParameterServer
from inference_session.rows.base import Rows
from inference_session.rows.hot_keys import interleaved
from inference_session.rows.late_inserts import LateInserts
from inference_session.rows.stats import RowStats
from inference_session.rows.stored_writer import StoredWriter
from inference_session.tables.base import HotKeys, RowBatch, RowReader
from inference_session.tables.row_numbers import RowNumbers, stored_keys

_KEYS_PER_FETCH = 1 << 13
_MAX_REPEATS = 3
"""Of a look-up whose rows are written each time while they are fetched."""
_log = logging.getLogger(__name__)


class StoredRows(Rows):
    """The rows of a parameter server, the hottest of them in the caches of devices."""

    readers: Sequence[StoredReader]
    writer: StoredWriter

    def __init__(
        self,
        specs: Sequence[TableSpec],
        caches: Sequence[EmbeddingCache],
        server: ParameterServer,
        *,
        refresh_interval_s: float = 0.0,
        async_from: float | None = None,
    ) -> None:
        """Put caches over a parameter server; this object closes them all.

        Args:
            specs: the tables, which caches and server know by their folders.
            caches: of the same tables in the same order, one on each device.
            server: the source of missing rows.
            refresh_interval_s: see StoredWriter.
            async_from: from this hit rate on, look-ups answer missing keys with default vectors, and fetch them later;
                None: look-ups always wait for them.
        """
        self._specs = specs
        self.caches = caches
        """Those of the hottest rows; only this object fills them."""
        self.server = server
        """The source of missing rows."""
        self.writer = StoredWriter(specs, caches, server, refresh_interval_s=refresh_interval_s)
        self._last_stats: RowStats | None = None
        self.readers = [StoredReader(specs, cache, server, self.writer, async_from) for cache in caches]

    def scan(self, table: str) -> Iterator[RowBatch]:
        return self.server.scan(table)

    def hot_keys(self) -> HotKeys:
        """See Rows. The hottest of each cache come first."""
        tables = [spec.folder for spec in self._specs]
        return {table: interleaved([cache.hottest(table) for cache in self.caches]) for table in tables}

    def stats(self) -> RowStats:
        """See Rows. After `close`, those at its end."""
        try:
            return self._current_stats()
        except SessionClosedError:
            if self._last_stats is None:
                raise
            return self._last_stats

    def _current_stats(self) -> RowStats:
        dropped = [reader.late.num_dropped for reader in self.readers if reader.late is not None]
        return RowStats(
            cache=CacheStats.added([cache.stats() for cache in self.caches]),
            dropped_inserts=sum(dropped) if dropped else None,
            server=self.server.stats(),
        )

    def close(self) -> None:
        self.writer.close()
        for reader in self.readers:
            reader.close()
        self.server.close()
        with contextlib.suppress(HotrowError):  # a GPU that has failed
            self._last_stats = self._current_stats()
        for cache in self.caches:
            cache.close()


class StoredReader(RowReader):
    """Looks up the rows of a parameter server on one device, which has the hottest of them in a cache.

    The cache writes the rows that it has to the outputs. It collects the keys that it lacks, each once per table; this
    class fetches their rows from the parameter server, and then inserts those that exist into the cache.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        cache: EmbeddingCache,
        server: ParameterServer,
        writer: StoredWriter,
        async_from: float | None,
    ) -> None:
        """Look up in a cache, then in the parameter server; see StoredRows. The caller closes both."""
        self.device = cache.device
        self._specs = specs
        self._row_numbers = RowNumbers(specs) if cache.device is HOST else None
        self._cache, self._server, self._writer = cache, server, writer
        self._defaults = [np.full(spec.embedding_dim, spec.default_vector, np.float32) for spec in specs]
        self._async_from = math.inf if async_from is None else async_from
        is_late = async_from is not None or cache.inserts_late
        self.late = LateInserts(self._insert_late) if is_late else None
        """What caches rows after the look-up was answered; None: it is done before."""

    def prepare(self, segments: NDArray[np.void]) -> object | None:
        return self._cache.prepare(segments)

    def look_up(self, lookup: Lookup) -> None:
        """See RowReader. A look-up answers no older row than an earlier one, unless rows are written at each repeat.

        While a row is written, stores have the new one and a cache may still have the old one. So where a fetched row
        has been written since the cache was found to lack it, the cache is asked again: other threads may have put the
        old row there before the write began, and later look-ups are answered from it until the write ends. No old row
        gets into a cache after the beginning of a write.
        """
        if self._row_numbers is not None:
            self._row_numbers.count_from_start(lookup)
        for _ in range(_MAX_REPEATS):
            if self._look_up_once(lookup):
                return
            lookup.num_unknown[:], lookup.missing_positions = 0, None
        self._look_up_once(lookup)

    def _look_up_once(self, lookup: Lookup) -> bool:
        """Look up in the cache, then in the parameter server; returns whether that may be answered."""
        num_begun = self._writer.log.num_begun
        num_missing = self._cache.look_up(lookup)
        if not num_missing:
            return True
        waits = num_missing > (1 - self._async_from) * lookup.num_keys.sum()
        written = [self._complete(misses, waits, num_begun) for misses in self._cache.misses(lookup)]
        return not any(written)

    def warm_up(self, hot_keys: HotKeys, deadline: float) -> None:
        """See RowReader. The hottest rows of all tables come first."""
        capacities = {table: stats.capacity for table, stats in self._cache.stats().tables.items()}
        wanted = {table: hot_keys.get(table, NO_POSITIONS)[:capacity] for table, capacity in capacities.items()}
        for begin in range(0, max(map(len, wanted.values()), default=0), _KEYS_PER_FETCH):
            for table, keys in wanted.items():
                if time.monotonic() > deadline:
                    return
                self._writer.bring_in(self._cache, table, keys[begin : begin + _KEYS_PER_FETCH])

    def close(self) -> None:
        """See RowReader. What waits for the cache is dropped."""
        if self.late is not None:
            self.late.close()

    def _complete(self, misses: Misses, waits: bool, num_begun: int) -> bool:
        """Answer keys that the cache lacks: with their rows, or with default vectors if the look-up does not wait.

        Returns whether the fetched rows may be newer than what the cache has by now: `_written_since`.
        """
        rows, written = misses.rows, False
        if waits:
            with misses.paused():
                self._fetch(rows)
            written = self._written_since(num_begun, rows)
        else:
            for t, part in rows.by_table.items():
                part.vectors[:] = self._defaults[t]
        still_missing = misses.complete()
        if still_missing is not None:
            self._fetch(still_missing.rows)
            written |= self._written_since(num_begun, still_missing.rows)
            still_missing.complete()
        if not rows.by_table:  # other threads have cached all of these rows since the miss
            return written
        if self.late is not None and (self._cache.inserts_late or not waits):
            self.late.put(rows)
        else:
            # Not before `complete`: the cache might evict rows for these that have yet to be pooled.
            self._writer.keep(self._cache, [rows])
        return written

    def _written_since(self, num_begun: int, rows: MissingRows) -> bool:
        """Whether there is a cache, and a write of any of these rows has begun after so many writes."""
        log, specs = self._writer.log, self._specs
        return bool(self._cache.cache_bytes and log.any_since(num_begun)) and any(
            log.written(specs[t].folder, stored_keys(specs[t], part.keys), num_begun).any()
            for t, part in rows.by_table.items()
        )

    def _insert_late(self, missing: Sequence[MissingRows]) -> None:
        """Insert rows into the cache, fetching first those that a look-up did not wait for."""
        fetched = [rows for rows in missing if rows.is_fetched or self._fetch_late(rows)]
        if fetched:
            self._writer.keep(self._cache, fetched)

    def _fetch_late(self, rows: MissingRows) -> bool:
        """Whether they could be fetched. An error harms no other look-up's; a tier that is down is logged elsewhere."""
        try:
            self._fetch(rows)
        except HotrowError as error:
            _log.debug("rows could not be fetched: %s", error)
            return False
        return True

    def _fetch(self, rows: MissingRows) -> None:
        """Fetch the rows into `rows`; keys without a row get default vectors."""
        rows.moment = self._writer.log.moment
        requests = [
            FetchRequest(self._specs[t].folder, stored_keys(self._specs[t], part.keys), part.vectors)
            for t, part in rows.by_table.items()
        ]
        for (t, part), found in zip(rows.by_table.items(), self._server.fetch(requests), strict=True):
            part.found[:] = found
            if not found.all():
                part.vectors[~found] = self._defaults[t]
