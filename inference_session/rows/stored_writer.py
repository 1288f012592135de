"""Changes to rows of stores: this module writes an update to the parameter server, then to the caches over it."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from inference_session.embedding_cache.base import EmbeddingCache
from inference_session.embedding_cache.missing_rows import MissingRows
from inference_session.errors import UnavailableError
from inference_session.model_spec import TableSpec
from inference_session.parameter_server.base import FetchRequest
from inference_session.parameter_server.server import ParameterServer
from inference_session.platform.pacing import paced
from inference_session.platform.repeated_call import RepeatedCall
from inference_session.rows.base import RowWriter
from inference_session.tables.ordered_updates import OrderedUpdates, Outcome, Status
from inference_session.tables.row_numbers import stored_keys

_KEYS_PER_REFRESH = 256
"""Few enough that a request waits only briefly for them in a store, or for the interpreter."""
_BYTES_PER_INSERT = 1 << 20
_CLOSE_TIMEOUT_S = 10.0

Result = TypeVar("Result")


class StoredWriter(RowWriter):
    """Writes to the stores, then to the caches, and keeps rows out of them that are older than what was written."""

    def __init__(
        self,
        specs: Sequence[TableSpec],
        caches: Sequence[EmbeddingCache],
        server: ParameterServer,
        *,
        refresh_interval_s: float = 0.0,
    ) -> None:
        """Write to a server and its caches, which the caller closes.

        Args:
            specs: the tables, which caches and server know by their folders.
            caches: one on each device that looks rows up.
            server: where the rows are.
            refresh_interval_s: time between two refreshes in the background; 0: none.
        """
        super().__init__(server.log)
        self._specs = specs
        self._by_folder = {spec.folder: spec for spec in specs}
        self._numbered = {t for t, spec in enumerate(specs) if spec.keys == "row_number"}
        self._caches = caches
        self._server = server
        self._updating = threading.Lock()
        self._caching = threading.Lock()  # held while rows go into a cache; taken after `_updating`
        server.on_drop(self._forget)
        self._closing = threading.Event()
        self._refreshes: RepeatedCall | None = None
        if refresh_interval_s:
            # A round takes half of the interval, or longer where it must; the other half is idle.
            refresh = partial(self._try_refresh, refresh_interval_s / 2)
            failure = "cached rows could not be refreshed"
            self._refreshes = RepeatedCall("hotrow-refresh", refresh, refresh_interval_s / 2, failure=failure)

    def update(self, table: str, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """See RowWriter. Caches update only rows that they hold: the others may never be requested."""
        insert = partial(self._server.insert, table, keys, vectors)
        self._write_all(table, keys, insert, lambda cache: cache.update(table, keys, vectors))

    def erase(self, table: str, keys: NDArray[np.int64]) -> None:
        erase = partial(self._server.erase, table, keys)
        self._write_all(table, keys, erase, lambda cache: cache.erase(table, keys))

    @property
    def orders_updates(self) -> bool:
        return self._server.orders_updates

    def apply(self, table: str, updates: OrderedUpdates) -> bool:
        """See RowWriter. Cached rows are read again where the stores may have newer ones."""
        apply, change = partial(self._server.apply, table, updates), partial(self._change_applied, table, updates)
        return not self._write(table, updates.all_keys, apply, change).lost

    def _change_applied(self, table: str, updates: OrderedUpdates, outcome: Outcome) -> None:
        """Make caches follow what a store has done."""
        is_stored, is_erased = (status != Status.OTHER for status in (outcome.inserted, outcome.erased))
        keys, vectors, erased = updates.keys[is_stored], updates.vectors[is_stored], updates.deleted[is_erased]
        self._change_caches(table, keys, lambda cache: cache.update(table, keys, vectors))
        self._change_caches(table, erased, lambda cache: cache.erase(table, erased))
        others = np.concatenate([updates.keys[~is_stored], updates.deleted[~is_erased]])
        if any(cache.cache_bytes for cache in self._caches):
            for begin in range(0, len(others), _KEYS_PER_REFRESH):
                self._read_again(table, others[begin : begin + _KEYS_PER_REFRESH])

    def _read_again(self, table: str, keys: NDArray[np.int64]) -> None:
        """Read rows, keys [n], into the caches that hold them; drop those that cannot be read now. Must be called while
        they are being written: no other thread caches them.
        """
        vectors = np.empty((len(keys), self._by_folder[table].embedding_dim), np.float32)
        try:
            found = self._server.fetch([FetchRequest(table, keys, vectors)], on_store_failure="error")[0]
        except UnavailableError:
            found = np.zeros(len(keys), np.bool_)
        self._change_caches(table, keys, lambda cache: cache.update(table, keys[found], vectors[found]))
        self._change_caches(table, keys, lambda cache: cache.erase(table, keys[~found]))

    @property
    def is_durable(self) -> bool:  # type: ignore[override]
        return self._server.is_durable

    def note(self, table: str) -> str | None:
        return self._server.note(table)

    def save_note(self, table: str, text: str) -> None:
        self._server.save_note(table, text)

    def forget(self, table: str, keys: NDArray[np.int64]) -> None:
        self._server.forget(table, keys)
        self._forget(table, keys)

    def refresh(self) -> None:
        """See RowWriter. Rows that a tier may have that is down stay as they are."""
        self._refresh_all(over_s=0.0)

    def renew(self) -> None:
        try:
            self.refresh()
        except UnavailableError:
            for table in self._by_folder:
                self._forget(table, None)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        with self._server.frozen():
            yield

    def keep(self, cache: EmbeddingCache, missing: Sequence[MissingRows]) -> None:
        """Insert rows that look-ups missed and fetched into one of the caches, except those that were written since."""
        for some in _in_groups(missing):
            with self._caching:
                for rows in some:
                    self._drop_outdated(rows)
                cache.insert_missing(some)

    def _drop_outdated(self, rows: MissingRows) -> None:
        """Drop the rows that were not found, or written since their fetch began. Must be called while holding
        `_caching`.
        """
        for t in self._numbered.intersection(rows.by_table):
            keys = rows.by_table[t].keys
            keys[:] = stored_keys(self._specs[t], keys)
        if rows.all_found and not self.log.any_since(rows.moment):  # the usual case
            return
        for t, part in rows.by_table.items():
            outdated = ~part.found | self.log.written(self._specs[t].folder, part.keys, rows.moment)
            if outdated.any():
                rows.drop(t, outdated)

    def bring_in(self, cache: EmbeddingCache, table: str, keys: NDArray[np.int64]) -> None:
        """Fetch the rows of these keys, int64 [n], into one of the caches, except those that are written meanwhile."""
        keys = stored_keys(self._by_folder[table], keys)
        vectors = np.empty((len(keys), self._by_folder[table].embedding_dim), np.float32)
        moment = self.log.moment
        found = self._server.fetch([FetchRequest(table, keys, vectors)])[0]
        with self._caching:
            current = found & ~self.log.written(table, keys, moment)
            cache.insert(table, keys[current], vectors[current])

    def close(self) -> None:
        """End the refreshing. May be called more than once."""
        self._closing.set()
        if self._refreshes is not None:
            self._refreshes.close(_CLOSE_TIMEOUT_S)

    def _try_refresh(self, over_s: float) -> None:
        """Refresh. While a tier is down, which is logged elsewhere, rows stay."""
        with contextlib.suppress(UnavailableError):
            self._refresh_all(over_s)

    def _refresh_all(self, over_s: float) -> None:
        """Read all cached rows again, while requests go on; see `paced`."""
        self._server.refresh()
        with self._caching:  # or rows that were fetched before, and are inserted later, would not be read again
            self.log.add_all()
        parts = [
            (table, keys[begin : begin + _KEYS_PER_REFRESH])
            for table, keys in ((table, self._cached_keys(table)) for table in self._by_folder)
            for begin in range(0, len(keys), _KEYS_PER_REFRESH)
        ]
        for table, keys in paced(parts, self._closing, over_s=over_s):
            self._refresh(table, keys)
        self.log.add_all()  # rows that are not cached may have changed in the stores as well

    def _refresh(self, table: str, keys: NDArray[np.int64]) -> None:
        """Read some cached rows again. The caches drop those that seem to have been written meanwhile."""
        vectors = np.empty((len(keys), self._by_folder[table].embedding_dim), np.float32)
        request = FetchRequest(table, keys, vectors)
        moment = self.log.moment
        # A key is not found only if no tier has it.
        found = self._server.fetch([request], on_store_failure="error")[0]
        with self._caching:
            current = found & ~self.log.written(table, keys, moment)
            self._in_each_cache(lambda cache: cache.update(table, keys[current], vectors[current]))
            self._in_each_cache(lambda cache: cache.erase(table, keys[~current]))
            self.log.add(table, keys)

    def _cached_keys(self, table: str) -> NDArray[np.int64]:
        """The keys whose rows any cache holds."""
        keys = [cache.dump(table) for cache in self._caches]
        return keys[0] if len(keys) == 1 else np.unique(np.concatenate(keys))

    def _write_all(
        self, table: str, keys: NDArray[np.int64], write: Callable[[], None], then: Callable[[EmbeddingCache], None]
    ) -> None:
        """`_write` where all rows are written."""
        self._write(table, keys, write, lambda _: self._change_caches(table, keys, then))

    def _write(
        self, table: str, keys: NDArray[np.int64], write: Callable[[], Result], then: Callable[[Result], None]
    ) -> Result:
        """Write to the stores, then to the caches: one write after the other, so that all see them in the same order.

        Rows that were fetched before the write has ended are not cached from its beginning on: a look-up that misses
        may answer the new row as soon as a store has it, and no later one may answer the old row.
        """
        with self._updating, contextlib.ExitStack() as writing:
            self._server.prepare_write()  # an error leaves all rows where they are: they go on being answered
            with self._caching:  # what is on its way into a cache is there when the write begins
                writing.enter_context(self.log.writing(table, keys))
            try:
                result = write()
            except BaseException:  # the stores may have written any of the rows
                self._change_caches(table, keys, lambda cache: cache.erase(table, keys))
                raise
            then(result)
        return result

    def _forget(self, table: str, keys: NDArray[np.int64] | None) -> None:
        """Drop cached rows that the parameter server has had to drop from a tier."""
        if keys is None:
            with self._caching:
                self._in_each_cache(lambda cache: cache.clear(table))
                self.log.add_all()
        else:
            self._change_caches(table, keys, lambda cache: cache.erase(table, keys))

    def _change_caches(self, table: str, keys: NDArray[np.int64], change: Callable[[EmbeddingCache], None]) -> None:
        """Make look-ups answer rows as they are written."""
        with self._caching:
            try:
                self._in_each_cache(change)
            finally:
                self.log.add(table, keys)

    def _in_each_cache(self, change: Callable[[EmbeddingCache], None]) -> None:
        """Change all caches. If one cannot be changed, the others are still changed, and its error is raised."""
        with contextlib.ExitStack() as changes:
            for cache in reversed(self._caches):
                changes.callback(change, cache)


def _in_groups(missing: Sequence[MissingRows]) -> Iterator[Sequence[MissingRows]]:
    """The rows of so many look-ups that updates wait only briefly for them to be inserted; of one at least."""
    ends = np.cumsum([rows.vectors.nbytes for rows in missing]) // _BYTES_PER_INSERT
    begins = [0, *(np.flatnonzero(np.diff(ends)) + 1).tolist(), len(missing)]
    return (missing[begin:end] for begin, end in itertools.pairwise(begins))
