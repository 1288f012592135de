"""Rows of stores, the hottest of them in a cache: this module fetches the keys that the cache lacks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from inference_session.device.host import HOST
from inference_session.embedding_cache.base import EmbeddingCache, Misses
from inference_session.embedding_cache.missing_rows import MissingRows
from inference_session.kernels.cpu.lookup import NO_POSITIONS
from inference_session.kernels.records import Lookup, PreparedLookup
from inference_session.model_spec import TableSpec
from inference_session.parameter_server.base import FetchRequest
from inference_session.parameter_server.server import ParameterServer
from inference_session.rows.base import Rows
from inference_session.rows.hot_keys import HotKeys
from inference_session.rows.late_inserts import LateInserts
from inference_session.rows.stats import RowStats
from inference_session.rows.stored_writer import StoredWriter
from inference_session.tables.base import RowBatch
from inference_session.tables.row_numbers import RowNumbers, stored_keys

_KEYS_PER_FETCH = 1 << 13


class StoredRows(Rows):
    """The rows of a parameter server, the hottest of them in a cache.

    The cache writes the rows that it has to the outputs. It collects the keys that it lacks, each once per table; this
    class fetches their rows from the parameter server, and then inserts those that exist into the cache.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        cache: EmbeddingCache,
        server: ParameterServer,
        *,
        writer: StoredWriter | None = None,
        async_from: float | None = None,
    ) -> None:
        """Put a cache over a parameter server; this object closes both.

        Several objects, each for a device with its own cache, may have the same server and the same writer.

        Args:
            specs: the tables, which cache and server know by their folders.
            cache: of the same tables in the same order.
            server: the source of missing rows.
            writer: to this server, and to the caches of all devices; None: there is no other cache.
            async_from: from this hit rate on, look-ups answer missing keys with default vectors, and fetch them later;
                None: look-ups always wait for them.
        """
        self.device = cache.device
        self._specs = specs
        self._row_numbers = RowNumbers(specs) if cache.device is HOST else None
        self.cache = cache
        """The cache of the hottest rows; only this object and its writer fill it."""
        self.server = server
        """The source of missing rows."""
        self._defaults = [np.full(spec.embedding_dim, spec.default_vector, np.float32) for spec in specs]
        self._async_from = math.inf if async_from is None else async_from
        is_late = async_from is not None or cache.inserts_at_once
        self._late = LateInserts(self._insert_late, max(cache.inserts_at_once, 1)) if is_late else None
        self.writer = self._writer = writer or StoredWriter(specs, [cache], server)

    def prepare(self, segments: NDArray[np.void]) -> PreparedLookup | None:
        return self.cache.prepare(segments)

    def look_up(self, lookup: Lookup) -> None:
        if self._row_numbers is not None:
            self._row_numbers.count_from_start(lookup)
        num_missing = self.cache.look_up(lookup)
        if num_missing:
            waits = num_missing > (1 - self._async_from) * lookup.num_keys.sum()
            for misses in self.cache.misses(lookup):
                self._complete(misses, waits)

    def scan(self, table: str) -> Iterator[RowBatch]:
        return self.server.scan(table)

    def hot_keys(self) -> HotKeys:
        return {spec.folder: self.cache.hottest(spec.folder) for spec in self._specs}

    def warm_up(self, hot_keys: HotKeys, deadline: float) -> None:
        """See Rows. The hottest rows of all tables come first."""
        capacities = {table: stats.capacity for table, stats in self.cache.stats().tables.items()}
        wanted = {table: hot_keys.get(table, NO_POSITIONS)[:capacity] for table, capacity in capacities.items()}
        for begin in range(0, max(map(len, wanted.values()), default=0), _KEYS_PER_FETCH):
            for table, keys in wanted.items():
                if time.monotonic() > deadline:
                    return
                self._writer.bring_in(self.cache, table, keys[begin : begin + _KEYS_PER_FETCH])

    def stats(self) -> RowStats:
        dropped = None if self._late is None else self._late.num_dropped
        return RowStats(cache=self.cache.stats(), dropped_inserts=dropped, server=self.server.stats())

    def wait_for_inserts(self, timeout_s: float) -> bool:
        """Wait until rows that were missing are in the cache; returns whether they are."""
        return self._late is None or self._late.wait(timeout_s)

    def close(self) -> None:
        self._writer.close()
        if self._late is not None:
            self._late.close()
        self.server.close()
        self.cache.close()

    def _complete(self, misses: Misses, waits: bool) -> None:
        """Answer keys that the cache lacks: with their rows, or with default vectors if the look-up does not wait."""
        rows = misses.rows
        if waits:
            with misses.paused():
                self._fetch(rows)
        else:
            for t, part in rows.parts.items():
                part.vectors[:] = self._defaults[t]
        still_missing = misses.complete()
        if still_missing is not None:
            self._fetch(still_missing.rows)
            still_missing.complete()
        if not rows.parts:  # other threads have cached all of these rows since the miss
            return
        if self._late is not None and (self.cache.inserts_at_once or not waits):
            self._late.put(rows)
        else:
            # Not before `complete`: the cache might evict rows for these that have yet to be pooled.
            self._writer.keep(self.cache, [rows])

    def _insert_late(self, missing: Sequence[MissingRows]) -> None:
        """Insert rows into the cache, fetching first those that a look-up did not wait for."""
        for rows in missing:
            if not rows.is_fetched:
                self._fetch(rows)
        self._writer.keep(self.cache, missing)

    def _fetch(self, rows: MissingRows) -> None:
        """Fetch the rows into `rows`; keys without a row get default vectors."""
        rows.moment = self._writer.log.moment
        requests = [
            FetchRequest(self._specs[t].folder, stored_keys(self._specs[t], part.keys), part.vectors)
            for t, part in rows.parts.items()
        ]
        for (t, part), found in zip(rows.parts.items(), self.server.fetch(requests), strict=True):
            part.found[:] = found
            if not found.all():
                part.vectors[~found] = self._defaults[t]
