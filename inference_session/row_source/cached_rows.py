"""The rows of a parameter server, the hottest of them in a cache."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from inference_session.embedding_cache.cpu_cache import CpuEmbeddingCache
from inference_session.embedding_cache.kernels import cpu
from inference_session.embedding_cache.kernels.cpu import NO_POSITIONS
from inference_session.embedding_cache.kernels.layout import SEGMENT, PoolingCode
from inference_session.embedding_cache.late_inserts import LateInserts
from inference_session.embedding_cache.null_cache import NullEmbeddingCache, empty_tables
from inference_session.errors import UnavailableError
from inference_session.formats.native import TableSpec
from inference_session.hot_keys import HotKeys
from inference_session.pacing import paced
from inference_session.parameter_server.base import FetchRequest, Rows
from inference_session.parameter_server.recent_writes import RecentWrites
from inference_session.parameter_server.server import ParameterServer
from inference_session.row_source.base import RowSource
from inference_session.row_source.overlay import Overlay
from inference_session.row_source.row_numbers import aliases_of, stored_keys

HostCache: TypeAlias = "CpuEmbeddingCache | NullEmbeddingCache"

_KEYS_PER_REFRESH = 256
"""Few enough that a request which meets them in a store, or waits for the interpreter meanwhile, hardly notices."""
_KEYS_PER_FETCH = 1 << 13
_CLOSE_S = 10.0


class CachedRows(RowSource):
    """The rows of a parameter server, the hottest of them in a cache.

    What the cache has goes straight to the outputs, in one call of the kernel. Keys that it has not are collected, each
    once per table, fetched, and completed from there; what was found goes to the cache, default vectors never do.
    """

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
        """Put a cache over a parameter server; both become this object's to close.

        Args:
            specs: the tables, which cache and server know by their folders.
            cache: of the same tables in the same order.
            server: where what is missing comes from.
            num_threads: threads over which a large look-up is split.
            refresh_interval_s: time between two refreshes in the background; 0: none.
            async_from: hit rate from which on missing keys are answered with default vectors, and fetched after that;
                None: look-ups always wait for them.
        """
        self._specs = specs
        self._cache = cache
        self._server = server
        self._num_threads = num_threads
        self._dims = np.array([spec.embedding_dim for spec in specs], np.int64)
        self._nothing = [0] * len(specs)
        self._defaults = [np.full(spec.embedding_dim, spec.default_vector, np.float32) for spec in specs]
        Overlay(self._dims, np.zeros(0, SEGMENT), NO_POSITIONS, NO_POSITIONS).write(NO_POSITIONS)  # compiles
        self._async_from = math.inf if async_from is None else async_from
        self._late = None if async_from is None else LateInserts(self._insert_late)
        self._updating = threading.Lock()
        self._caching = threading.Lock()  # held while rows go into the cache; taken after `_updating`
        self._writes = [RecentWrites() for _ in specs]
        server.on_drop(self._forget)
        self._closing = threading.Event()
        self._refresher: threading.Thread | None = None
        if refresh_interval_s:
            self._refresher = threading.Thread(
                target=self._refresh_often, args=(refresh_interval_s,), name="hotrow-refresh", daemon=True
            )
            self._refresher.start()

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
            if self._late is not None and count <= (1 - self._async_from) * num_keys.sum():
                self._fill_by_default(overlay)
                self._finish(overlay, num_keys, num_unknown)
                self._late.put(overlay)
            else:
                self._fetch(overlay)
                self._finish(overlay, num_keys, num_unknown)
                # Not before: these rows might have taken the place of some that were about to be pooled.
                self._keep(overlay)

    def update(self, table: int, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """See RowSource. In the cache, of those rows only that it holds: nobody may ever ask for the others."""
        folder = self._specs[table].folder
        aliases, original = aliases_of(self._specs[table], keys)
        insert = partial(self._server.insert, folder, keys, vectors)
        rows = vectors if aliases is keys else vectors[original]
        self._write(table, aliases, insert, partial(self._cache.update, folder, aliases, rows))

    def erase(self, table: int, keys: NDArray[np.int64]) -> None:
        """See RowSource."""
        folder = self._specs[table].folder
        aliases, _ = aliases_of(self._specs[table], keys)
        self._write(
            table, aliases, partial(self._server.erase, folder, keys), partial(self._cache.erase, folder, aliases)
        )

    @property
    def is_durable(self) -> bool:
        """See RowSource."""
        return self._server.is_durable

    def note(self, table: int) -> str | None:
        """See RowSource."""
        return self._server.note(self._specs[table].folder)

    def save_note(self, table: int, text: str) -> None:
        """See RowSource."""
        self._server.save_note(self._specs[table].folder, text)

    def forget(self, table: int, keys: NDArray[np.int64]) -> None:
        """See RowSource."""
        self._server.forget(self._specs[table].folder, keys)
        self._forget(self._specs[table].folder, keys)

    def refresh(self) -> None:
        """See RowSource. UnavailableError where a tier is down; rows that it may have stay as they are."""
        self._refresh_all(over_s=0.0)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """See RowSource."""
        with self._server.frozen():
            yield

    def scan(self, table: int) -> Iterator[Rows]:
        """See RowSource."""
        return self._server.scan(self._specs[table].folder)

    def hot_keys(self) -> HotKeys:
        """See RowSource."""
        return {spec.folder: self._cache.hottest(spec.folder) for spec in self._specs}

    def warm_up(self, hot_keys: HotKeys, deadline: float) -> None:
        """See RowSource. The hottest rows of all tables come first."""
        capacities = {table: counts["capacity"] for table, counts in self._cache.stats()["tables"].items()}
        wanted = {table: hot_keys.get(table, NO_POSITIONS)[:capacity] for table, capacity in capacities.items()}
        for begin in range(0, max(map(len, wanted.values()), default=0), _KEYS_PER_FETCH):
            for table, keys in enumerate(wanted.values()):
                if time.monotonic() > deadline:
                    return
                self._bring_in(table, keys[begin : begin + _KEYS_PER_FETCH])

    def forget_lookups(self) -> None:
        """See RowSource."""
        self._cache.forget_lookups()

    def stats(self) -> dict[str, Any]:
        """See RowSource, EmbeddingCache.stats and ParameterServer.stats."""
        dropped = {} if self._late is None else {"dropped_inserts": self._late.num_dropped}
        return {"cache": self._cache.stats(), **dropped, **self._server.stats()}

    def close(self) -> None:
        """See RowSource."""
        self._closing.set()
        if self._refresher is not None:
            self._refresher.join(_CLOSE_S)
        if self._late is not None:
            self._late.close()
        self._server.close()
        self._cache.close()

    def _refresh_often(self, interval_s: float) -> None:
        """Half of the interval is for a round, which takes longer where it must, and half for nothing."""
        while not self._closing.wait(interval_s / 2):
            # While a tier is down, which is logged elsewhere, the rows stay as they are.
            with contextlib.suppress(UnavailableError):
                self._refresh_all(over_s=interval_s / 2)

    def _refresh_all(self, over_s: float) -> None:
        """Read all cached rows again, beside requests; see `paced`."""
        self._server.refresh()
        parts = [
            (table, keys[begin : begin + _KEYS_PER_REFRESH])
            for table, keys in enumerate(self._cache.dump(spec.folder) for spec in self._specs)
            for begin in range(0, len(keys), _KEYS_PER_REFRESH)
        ]
        for table, keys in paced(parts, self._closing, over_s=over_s):
            self._refresh(table, keys)

    def _write(self, table: int, keys: NDArray[np.int64], write: Callable[[], None], then: Callable[[], None]) -> None:
        """Write to the stores, then to the cache: one write after the other, so that both see them in the same order.

        Rows that were fetched before are not cached any more after it.
        """
        # Where stores fail they may have any of the rows.
        to_cache: Callable[[], None] = partial(self._cache.erase, self._specs[table].folder, keys)
        with self._updating:
            try:
                write()
                to_cache = then
            finally:
                with self._caching:
                    self._writes[table].add(keys)
                    to_cache()

    def _forget(self, folder: str, keys: NDArray[np.int64] | None) -> None:
        """Drop cached rows that the parameter server has had to drop from a tier."""
        table = next(i for i, spec in enumerate(self._specs) if spec.folder == folder)
        with self._caching:
            if keys is None:
                self._writes[table].add_all()
                self._cache.clear(folder)
            else:
                aliases, _ = aliases_of(self._specs[table], keys)
                self._writes[table].add(aliases)
                self._cache.erase(folder, aliases)

    def _refresh(self, table: int, keys: NDArray[np.int64]) -> None:
        """Read some cached rows again; those that are written meanwhile are left to that write."""
        folder = self._specs[table].folder
        vectors = np.empty((len(keys), self._specs[table].embedding_dim), np.float32)
        request = FetchRequest(folder, stored_keys(self._specs[table], keys), vectors)
        moment = self._writes[table].moment
        # A key is not found only if no tier has it.
        found = self._server.fetch_unique([request], on_store_failure="error")[0]
        with self._caching:
            current = ~self._writes[table].written(keys, moment)
            self._cache.update(folder, keys[found & current], vectors[found & current])
            self._cache.erase(folder, keys[~found & current])

    def _bring_in(self, table: int, keys: NDArray[np.int64]) -> None:
        """Cache the rows of some keys, as far as there are any, and they are not written meanwhile."""
        folder = self._specs[table].folder
        vectors = np.empty((len(keys), self._specs[table].embedding_dim), np.float32)
        moment = self._writes[table].moment
        found = self._server.fetch_unique([FetchRequest(folder, stored_keys(self._specs[table], keys), vectors)])[0]
        with self._caching:
            current = found & ~self._writes[table].written(keys, moment)
            self._cache.insert(folder, keys[current], vectors[current])

    def _finish(self, overlay: Overlay, num_keys: NDArray[np.int64], num_unknown: NDArray[np.int64]) -> None:
        """Complete the segments that have missing keys from the overlay, whose vectors are there."""
        overlay.write(num_unknown)
        pooled = np.flatnonzero((overlay.segments["pooling"] != PoolingCode.NONE) & (overlay.counts > 0))
        if len(pooled) and self._pool_again(overlay.segments[pooled], overlay):
            num_unknown[pooled] = self._pool_without_cache(overlay.segments[pooled], num_keys[pooled])

    def _fill_by_default(self, overlay: Overlay) -> None:
        for t, part in overlay.parts.items():
            part.vectors[:] = self._defaults[t]

    def _insert_late(self, overlay: Overlay) -> None:
        self._fetch(overlay)
        self._keep(overlay)

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

    def _fetch(self, overlay: Overlay) -> None:
        """Fill in the vectors."""
        overlay.moments = {t: self._writes[t].moment for t in overlay.parts}
        requests = [
            FetchRequest(self._specs[t].folder, stored_keys(self._specs[t], part.keys), part.vectors)
            for t, part in overlay.parts.items()
        ]
        for (t, part), found in zip(overlay.parts.items(), self._server.fetch_unique(requests), strict=True):
            part.found[:] = found
            if not found.all():
                part.vectors[~found] = self._defaults[t]

    def _keep(self, overlay: Overlay) -> None:
        """Cache the rows that were found, and not written since."""
        for t, part in overlay.parts.items():
            with self._caching:
                current = part.found & ~self._writes[t].written(part.keys, overlay.moments[t])
                rows = slice(None) if current.all() else current  # as a rule, and then nothing is copied
                self._cache.insert(self._specs[t].folder, part.keys[rows], part.vectors[rows])

    def _by_table(self, segments: NDArray[np.void], counts: NDArray[np.int64]) -> list[int]:
        sums: list[int] = np.bincount(segments["table"], counts, len(self._specs)).astype(np.int64).tolist()
        return sums
