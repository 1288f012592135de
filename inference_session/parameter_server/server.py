"""The parameter server: an ordered stack of stores, asked from the top, each for the keys that those above it lack.

    fetch      tier 0, then tier 1 for what is missing, …; each key once per tier
    write      the lowest tier first, so that no tier is ever ahead of one that outlives it
    outage     a tier that fails is left out until it answers again

upkeep.py works in the background: it promotes rows, marks rows as used, and tries tiers again that are out.
The server makes up no rows: it reports keys that no tier has as not found, and the caller must answer them. It
remembers them briefly (unknown_keys.py), so that not every request for a popular one asks all tiers.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import HotrowError, SessionClosedError, StoreError, UnavailableError, fresh
from inference_session.parameter_server.base import EmbeddingStore, FetchRequest
from inference_session.parameter_server.known_incarnation import KnownIncarnation
from inference_session.parameter_server.promotions import Promotion, Touch
from inference_session.parameter_server.retirement import Retirement
from inference_session.parameter_server.tier import Tier, TierStats
from inference_session.parameter_server.unknown_keys import UnknownKeys
from inference_session.parameter_server.upkeep import TierUpkeep
from inference_session.parameter_server.write_log import TierWrites
from inference_session.tables.base import RowBatch, contains
from inference_session.tables.ordered_updates import OrderedUpdates, Outcome, Status

OnStoreFailure = Literal["default_vector", "error"]


@dataclass(frozen=True)
class ServerStats:
    """Counts since the server was made; docs/reference/statistics.md defines each number."""

    degraded_keys: int
    """Keys not found while a tier was out."""
    dropped_promotions: int
    tiers: Mapping[str, TierStats]
    """By name."""


@dataclass
class _WantedRows:
    """The rows of one table that a request asks for, each key once."""

    table: str
    keys: NDArray[np.int64]
    """[n]"""
    vectors: NDArray[np.float32]
    """[n, embedding_dim]; what is not found may hold anything, such as rows of a tier that failed half way."""
    found: NDArray[np.bool_]
    """[n]"""
    left: NDArray[np.int64]
    """Positions of the keys not found in any tier so far, without those remembered as unknown."""
    moment: int
    """The write log's moment when the fetch began."""

    def missing(self) -> FetchRequest:
        """A request for the keys that are left. If these are all keys, the tier writes straight to `vectors`."""
        if len(self.left) == len(self.keys):
            return FetchRequest(self.table, self.keys, self.vectors)
        vectors = np.empty((len(self.left), self.vectors.shape[1]), np.float32)
        return FetchRequest(self.table, self.keys[self.left], vectors)

    def take(self, fetched: FetchRequest, hits: NDArray[np.bool_]) -> None:
        """Record which of the missing keys, those of `fetched`, a tier had: hits, bool [left]."""
        if hits.all() and fetched.out is self.vectors:  # the usual case
            self.found[:], self.left = True, self.left[:0]
            return
        positions = self.left[hits]
        if fetched.out is not self.vectors:
            self.vectors[positions] = fetched.out[hits]
        self.found[positions] = True
        self.left = self.left[~hits]


class ParameterServer:
    """Fetches rows through all tiers. All methods may be called from any thread."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        on_store_failure: OnStoreFailure = "default_vector",
        retirement: Retirement | None = None,
        known: KnownIncarnation | None = None,
    ) -> None:
        """Ask these tiers.

        Args:
            tiers: from the fastest to the one that has all rows; the server closes them.
            on_store_failure: how keys are treated that are not found while a tier is out: `default_vector` counts
                them and reports them as not found, `error` raises UnavailableError.
            retirement: removes old versions; the server closes it.
            known: what is known of the volatile tier, including writes of other processes.
        """
        self.tiers = tuple(tiers)
        """The tiers, from the top."""
        for depth, tier in enumerate(self.tiers):
            tier.is_backed = any(below.store.keeps_rows for below in self.tiers[depth + 1 :])
        self._durable = next((tier for tier in self.tiers if tier.durable), None)
        self._keeper = next((tier for tier in reversed(self.tiers) if tier.store.keeps_rows), None)
        self._on_store_failure = on_store_failure
        self._retirement = retirement
        self._writes = TierWrites()
        self.log = self._writes.log
        """See TierWrites."""
        self._unknown = UnknownKeys(self.log)
        self._lock = threading.Lock()  # of the counter, and of `is_behind_until`
        self._degraded_keys = 0
        self._closed = False
        self._known = known or KnownIncarnation()
        self.upkeep = TierUpkeep(self.tiers, self._writes, self._known)
        """The work in the background."""

    def fetch(
        self, requests: Sequence[FetchRequest], *, on_store_failure: OnStoreFailure | None = None
    ) -> list[NDArray[np.bool_]]:
        """Write the vectors of all keys that any tier has to the outputs; returns for each request which: bool [n].

        Each key is in its request once. Outputs of keys that are not found may hold anything. `on_store_failure`
        replaces the server's own.

        Raises:
            UnavailableError: with `on_store_failure="error"`, a key was not found while a tier was out.
        """
        if self._closed:
            raise SessionClosedError(f"{self!r} has been closed")
        now = time.monotonic()
        wanted = [self._wanted(request) for request in requests]
        failed = [
            tier for depth, tier in enumerate(self.tiers) if not self._fetch_from(tier, self.tiers[:depth], wanted)
        ]
        if failed:
            with self._lock:
                for tier in failed:
                    tier.is_behind_until = self.log.num_begun if tier.is_backed else 0
        self._settle(wanted, failed, on_store_failure or self._on_store_failure, now)
        return [want.found for want in wanted]

    def prepare_write(self) -> None:
        """Make sure that the persistent store takes writes; errors as of `insert`, but nothing has been written."""
        if self._durable is None:
            return
        with self._writes.lock:  # a reader that becomes the writer sees what others have written
            error = self._durable.attempt(lambda store: store.prepare_write())
        if error is not None:
            raise fresh(error)

    def insert(self, table: str, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Write rows, keys [n] and vectors [n, embedding_dim], to all tiers that take writes, the lowest first.

        Of equal keys the last wins.

        When this returns, every later fetch gives these rows. They survive this process, and the machine after
        `save_note`. A volatile tier that cannot take them, where one below does, is left out until it has dropped what
        it has of these keys.

        Raises:
            UnavailableError: a tier that is not volatile cannot take them at present, for instance because another
                process is the RocksDB's writer, or the only tier that would keep them is out; some of them may have
                been written.
            StoreError: no tier takes writes, or one refuses these for good.
        """
        self._write(table, keys, lambda store: store.insert(table, keys, vectors))

    def erase(self, table: str, keys: NDArray[np.int64]) -> None:
        """Drop the rows of keys [n] from all tiers that take writes, as `insert` writes them."""
        self._write(table, keys, lambda store: store.erase(table, keys))

    @property
    def orders_updates(self) -> bool:
        """Whether `apply` works: the store that keeps all that is written leaves out what its rows already contain."""
        return self._keeper is not None and self._keeper.store.orders_updates

    def apply(self, table: str, updates: OrderedUpdates) -> Outcome:
        """Insert and erase rows as `insert` and `erase` do, except where newer ones may be in the lowest store."""
        outcomes: list[Outcome] = []

        def write(store: EmbeddingStore) -> None:
            if self._keeper is not None and store is self._keeper.store:
                outcomes.append(store.apply(table, updates))
                return
            store.insert(table, updates.keys, updates.vectors)
            store.erase(table, updates.deleted)

        def written() -> NDArray[np.int64]:
            inserted, erased = (which == Status.WRITTEN for which in (outcomes[-1].inserted, outcomes[-1].erased))
            return np.concatenate([updates.keys[inserted], updates.deleted[erased]])

        self._write(table, updates.all_keys, write, written=written)
        return outcomes[-1]

    def forget(self, table: str, keys: NDArray[np.int64]) -> None:
        """Refresh the stores, and drop rows, keys [n], from the volatile tiers that others have changed below."""
        self.refresh()
        self._write(table, keys, lambda store: store.erase(table, keys), [tier for tier in self.tiers if tier.volatile])

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Hold back all writes and promotions, and keep readers from seeing what others write, until the context ends.

        Fetches go on. What others write to a store that shows it at once is still seen.
        """
        self.refresh()
        with self._writes.lock:
            yield

    def scan(self, table: str) -> Iterator[RowBatch]:
        """All rows of a table in batches, each from the first tier that has it; a row may come more than once.

        Holds the keys of all tiers but the lowest in memory.

        Raises:
            UnavailableError: a tier is out, so that rows would be missing, or older than they are.
        """
        seen = np.empty(0, np.int64)
        for tier in self.tiers:
            if tier.health.failure is not None:
                raise UnavailableError(f"table {table!r} cannot be read completely: {tier.name}: {tier.health.failure}")
            found: list[NDArray[np.int64]] = []
            for keys, vectors in tier.store.scan(table):
                if self._closed:
                    raise SessionClosedError(f"{self!r} has been closed")
                new = ~contains(seen, keys)
                yield keys[new], vectors[new]
                if tier is not self.tiers[-1]:
                    found.append(keys[new])
            seen = np.unique(np.concatenate([seen, *found]))

    @property
    def is_durable(self) -> bool:
        """Whether there is a store whose rows outlive all processes."""
        return self._durable is not None

    def note(self, table: str) -> str | None:
        """The note of a table in the persistent store; None: there is none, or no such store."""
        return None if self._durable is None else self._durable.store.note(table)

    def save_note(self, table: str, text: str) -> None:
        """Store a table's note in the persistent store; its readers find all that was written before it."""
        if self._durable is None:
            raise StoreError(f"{self!r} has no persistent store to keep a note on table {table!r} in")
        self._durable.store.set_note(table, text)

    def on_drop(self, tell: Callable[[str, NDArray[np.int64] | None], None]) -> None:
        """Register a cache's callback for rows that it may have read too old: table, and keys [n]; None: all."""
        self.upkeep.on_drop = tell

    def refresh(self) -> None:
        """Let stores see what others have written to them, and ask again for keys that were unknown."""
        self.upkeep.look_after_all()
        self._unknown.forget_all()

    def stats(self) -> ServerStats:
        """Counts since the server was made."""
        tiers = {tier.name: tier.stats() for tier in self.tiers}
        return ServerStats(self._degraded_keys, self.upkeep.promotions.num_dropped, tiers)

    def close(self) -> None:
        """End the background work and close all tiers. May be called twice."""
        self._closed = True
        self.upkeep.close()
        if self._retirement is not None:
            self._retirement.close()
        for tier in self.tiers:
            tier.store.close()

    def __repr__(self) -> str:
        tiers = ", ".join(f"{tier.name}{' (unavailable)' if tier.health.failure else ''}" for tier in self.tiers)
        return f"<ParameterServer [{tiers or 'no tiers'}]>"

    def _wanted(self, request: FetchRequest) -> _WantedRows:
        table, keys, vectors = request
        unknown = self._unknown.holds(table, keys)
        left = np.arange(len(keys)) if unknown is None else np.flatnonzero(~unknown)
        return _WantedRows(table, keys, vectors, np.zeros(len(keys), np.bool_), left, self.log.moment)

    def _fetch_from(self, tier: Tier, above: Sequence[Tier], wanted: Sequence[_WantedRows]) -> bool:
        """Fetch what is missing from one tier; returns whether the tier answered."""
        asking = [want for want in wanted if len(want.left)]
        if not asking:
            return True
        requests = [want.missing() for want in asking]
        found = tier.fetch(requests, is_behind=self._is_behind(tier, asking))
        if found is None:
            return False
        for want, request, part in zip(asking, requests, found, strict=True):
            want.take(request, part)
            if tier.touches:
                self.upkeep.touches.put(Touch(tier, want.table, request.keys[part], want.moment))
            self._promote(tier, above, want, request, part)
        return True

    def _is_behind(self, tier: Tier, asking: Sequence[_WantedRows]) -> bool:
        """Whether the tier may have an older row than an earlier request was answered with from a tier below.

        A write reaches this tier after those. A request that it fails meanwhile may be answered with the new row.
        """
        return any(
            want.moment < tier.is_behind_until and self.log.written(want.table, want.keys[want.left], want.moment).any()
            for want in asking
        )

    def _settle(
        self, wanted: Sequence[_WantedRows], failed: Sequence[Tier], on_store_failure: OnStoreFailure, now: float
    ) -> None:
        """Remember keys that no tier has; count, or refuse, those that an unavailable tier might have had."""
        num_unknown = sum(len(want.left) for want in wanted)
        if not num_unknown:
            return
        if not failed:
            for want in wanted:
                if len(want.left):
                    self._unknown.add(want.table, want.keys[want.left], want.moment, now)
            return
        with self._lock:
            self._degraded_keys += num_unknown
        if on_store_failure == "error":
            reasons = "; ".join(f"{tier.name}: {tier.health.failure or tier.health.last_error}" for tier in failed)
            raise UnavailableError(f"{num_unknown} keys cannot be fetched while a store is unavailable ({reasons})")

    def _promote(
        self, source: Tier, above: Sequence[Tier], want: _WantedRows, request: FetchRequest, hits: NDArray[np.bool_]
    ) -> None:
        """Queue rows for the tiers above that keep rows they missed; a full queue drops them, until the next miss."""
        tiers = [tier for tier in above if tier.cache_missed_keys and tier.health.failure is None]
        if not tiers or not hits.any():
            return
        rows = request.keys[hits], request.out[hits]
        self.upkeep.promotions.put(Promotion(source, tiers, want.table, *rows, want.moment))

    def _write(
        self,
        table: str,
        keys: NDArray[np.int64],
        write: Callable[[EmbeddingStore], None],
        tiers: Sequence[Tier] | None = None,
        *,
        written: Callable[[], NDArray[np.int64]] | None = None,
    ) -> None:
        """Write to these tiers, or to all; an error if none of the tiers that keep rows has taken them.

        `written`: tells afterwards which of the keys this process has written; None: all.
        """
        keepers = [tier for tier in self.tiers if tier.store.keeps_rows]
        if tiers is None and not keepers:
            raise StoreError(f"table {table!r} cannot be written to: {self!r} has no writable store")
        # Rows that were fetched before the end of this must not be promoted after it, and keys that were requested
        # before the end must not be remembered as unknown.
        with self._writes.lock, self.log.writing(table, keys):
            try:
                failures = self._write_to_each(table, keys, write, tiers)
            finally:
                self._unknown.forget(table, keys)
                self._writes.keys.add(table, keys)
            if tiers is None and not failures:
                self._writes.own.add(table, keys if written is None else written())
        if tiers is None and all(tier in failures for tier in keepers):
            raise fresh(failures[keepers[-1]])

    def _write_to_each(
        self,
        table: str,
        keys: NDArray[np.int64],
        write: Callable[[EmbeddingStore], None],
        tiers: Sequence[Tier] | None,
    ) -> dict[Tier, HotrowError]:
        """Write to these tiers, or to all, the lowest first; returns the errors of those that have not taken it."""
        if not any(tier.volatile for tier in self.tiers):
            self._known.save_that_writes_are_missing()  # from a Redis that other processes have over this store
        failures = {}
        for tier in reversed(self.tiers if tiers is None else tiers):
            if error := self._write_to(tier, table, keys, write, written_below=tiers is None):
                failures[tier] = error
        return failures

    def _write_to(
        self,
        tier: Tier,
        table: str,
        keys: NDArray[np.int64],
        write: Callable[[EmbeddingStore], None],
        *,
        written_below: bool,
    ) -> HotrowError | None:
        """Write to one tier. If a volatile tier refuses this one, it drops its rows of these keys,
        and the error is returned. `written_below`: the tiers below have just taken the same write.
        """
        if not tier.volatile:
            if error := tier.attempt(write):
                self._drop_above(table, keys)
                raise fresh(error)
            return None
        error = tier.learn_incarnation()
        if written_below and error is None and tier.incarnation and tier.health.failure is None:
            self._known.save(tier.incarnation)
        if error := error or tier.attempt(write):
            tier.miss_write(table, keys, error)
            if written_below and tier.unwritten:
                self._known.save_that_writes_are_missing()
        return error

    def _drop_above(self, table: str, keys: NDArray[np.int64]) -> None:
        """Drop rows from the tiers above one that refused a write, because it may have taken some of these rows.

        During an outage of a tier above, look-ups would answer the newer rows; after it, the older ones again.
        """
        for tier in self.tiers:
            if tier.volatile and tier.is_backed:
                tier.drop(table, keys)
                if tier.unwritten:
                    with contextlib.suppress(HotrowError):  # the write's own error is raised in any case
                        self._known.save_that_writes_are_missing()
