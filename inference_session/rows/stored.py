"""The rows of a parameter server, the hottest of them in a cache: all but how they are looked up."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.embedding_cache.base import EmbeddingCache
from inference_session.errors import UnavailableError
from inference_session.kernels.cpu.lookup import NO_POSITIONS
from inference_session.model_spec import TableSpec
from inference_session.parameter_server.base import FetchRequest, Rows
from inference_session.parameter_server.recent_writes import RecentWrites
from inference_session.parameter_server.server import ParameterServer
from inference_session.platform.pacing import paced
from inference_session.rows.base import RowSource
from inference_session.rows.hot_keys import HotKeys
from inference_session.rows.late_inserts import LateInserts
from inference_session.rows.overlay import Overlay
from inference_session.tables.row_numbers import aliases_of, stored_keys

_KEYS_PER_REFRESH = 256
"""Few enough that a request which meets them in a store, or waits for the interpreter meanwhile, hardly notices."""
_KEYS_PER_FETCH = 1 << 13
_CLOSE_S = 10.0


class StoredRows(RowSource):
    """The rows of a parameter server, the hottest of them in a cache.

    Keys that the cache has not are collected, each once per table, and fetched; what was found goes to the cache,
    default vectors never do.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        cache: EmbeddingCache,
        server: ParameterServer,
        *,
        refresh_interval_s: float = 0.0,
        async_from: float | None = None,
        inserts_at_once: int = 0,
    ) -> None:
        """Put a cache over a parameter server; both become this object's to close.

        Args:
            specs: the tables, which cache and server know by their folders.
            cache: of the same tables in the same order, whose arrays are NumPy's.
            server: where what is missing comes from.
            refresh_interval_s: time between two refreshes in the background; 0: none.
            async_from: hit rate from which on missing keys are answered with default vectors, and fetched after that;
                None: look-ups always wait for them.
            inserts_at_once: look-ups whose missing rows go into the cache together, after these were answered; 0: each
                look-up's at its end, unless `async_from` has put them off.
        """
        self._specs = specs
        self._cache = cache
        self._server = server
        self._dims = np.array([spec.embedding_dim for spec in specs], np.int64)
        self._defaults = [np.full(spec.embedding_dim, spec.default_vector, np.float32) for spec in specs]
        self._async_from = math.inf if async_from is None else async_from
        is_late = async_from is not None or inserts_at_once
        self._late = LateInserts(self._insert_late, max(inserts_at_once, 1)) if is_late else None
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
        with self._caching:  # rows that were fetched before, and are not in the cache yet, would escape
            for writes in self._writes:
                writes.add_all()
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

    def _fill_by_default(self, overlay: Overlay) -> None:
        for t, part in overlay.parts.items():
            part.vectors[:] = self._defaults[t]

    def _insert_late(self, overlays: Sequence[Overlay]) -> None:
        for overlay in overlays:
            if not overlay.is_fetched:
                self._fetch(overlay)
        self._keep(overlays)

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

    def _keep(self, overlays: Sequence[Overlay]) -> None:
        """Cache the rows that were found, and not written since."""
        for t in sorted({t for overlay in overlays for t in overlay.parts}):
            with self._caching:
                rows = [self._current(t, overlay) for overlay in overlays if t in overlay.parts]
                keys, vectors = rows[0] if len(rows) == 1 else map(np.concatenate, zip(*rows, strict=True))
                self._cache.insert(self._specs[t].folder, keys, vectors)

    def _current(self, t: int, overlay: Overlay) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """What `_keep` keeps of one table and look-up. Must be called while holding `_caching`."""
        part = overlay.parts[t]
        current = part.found & ~self._writes[t].written(part.keys, overlay.moments[t])
        # As a rule all are, and then nothing is copied.
        return (part.keys, part.vectors) if current.all() else (part.keys[current], part.vectors[current])

    def _waits(self, num_missing: int, num_keys: int) -> bool:
        """Whether a look-up of so many keys waits for so many missing rows, instead of answering by default."""
        return num_missing > (1 - self._async_from) * num_keys
