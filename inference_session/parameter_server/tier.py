"""One store of the parameter server's stack: what part it has there, and how it has been doing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import HotrowError, StoreError, UnavailableError, without_frames
from inference_session.parameter_server.base import EmbeddingStore, FetchRequest, LateError
from inference_session.parameter_server.table_source import TableSources
from inference_session.parameter_server.tier_health import TierHealth, says_down
from inference_session.parameter_server.write_log import KeysByTable

MAX_UNWRITTEN_KEYS = 1_000_000
"""Different keys of a table whose newest rows a tier may miss; if there are more, it drops the whole table."""
KEYS_PER_DROP = 4096
"""Keys that a tier drops at once on its way back: few enough that neither requests nor writers wait for long."""
PAUSE_S = 5.0
"""How long no rows are promoted to, or touched in, a tier that has just refused that."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TierStats:
    """State and counts of one tier; docs/reference/statistics.md defines each number."""

    failure: str | None
    """Why it is left out at the moment; None: it is in use."""
    hits: int
    misses: int
    skipped: int
    failures: int
    outages: int
    promoted: int
    touched: int
    malformed: int


@dataclass(eq=False)
class Tier:
    """One store of the stack, and how it has been doing. Thread-safe."""

    name: str
    store: EmbeddingStore
    volatile: bool = False
    """It may lose rows, and may lack rows that a tier below has."""
    is_backed: bool = False
    """A tier below keeps what is written as well, so this one may drop rows that might be too old."""
    durable: bool = False
    """What is written to it outlives all processes; it takes notes as well."""
    cache_missed_keys: bool = False
    """Whether rows found further down are inserted here."""
    touches: bool = False
    """Whether rows that are read here are to be marked as used."""
    sources: TableSources | None = None
    """The files that its rows must have come from; None: any."""
    incarnation: str | None = None
    """The store's incarnation before its first write, and at its last check; None: nothing was written."""
    holds_earlier_writes: bool = False
    """Other processes, or this one's predecessors, have written rows to it; the keys are unknown."""
    unwritten: KeysByTable = field(default_factory=lambda: KeysByTable(MAX_UNWRITTEN_KEYS))
    """Keys whose newest rows this tier did not take; it is left out until it has dropped its rows of them."""
    is_behind_until: int = 0
    """Until the log of writes has come to this moment, the tier may have older rows than requests were answered with,
    which it failed. Only rows that are being written are meant.
    """
    promoted: int = 0
    """Rows inserted because a lower tier had them."""
    touched: int = 0
    """Rows marked as used."""
    health: TierHealth = field(init=False)
    """Whether it is in use."""
    _hits: int = field(default=0, init=False, repr=False)
    _misses: int = field(default=0, init=False, repr=False)
    _skipped: int = field(default=0, init=False, repr=False)
    """Keys that were not asked for here because the tier was left out or failed."""
    _paused_until: float = field(default=0.0, init=False, repr=False)
    """When rows may be promoted or touched here again after that was refused; 0: now."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        self.health = TierHealth(self.name)

    def fetch(self, requests: Sequence[FetchRequest], *, is_behind: bool) -> list[NDArray[np.bool_]] | None:
        """`fetch_many` of the store, bool [n] for each request, counted; None where it does not answer, or `is_behind`,
        so that it must not.
        """
        health = self.health
        outages, began = health.outages, time.monotonic()
        try:
            found = None if is_behind or health.failure is not None else self.store.fetch_many(requests)
        except (UnavailableError, StoreError) as error:
            found = None
            # A call that began before an outage says nothing about a tier that has come back since.
            if health.outages == outages and isinstance(error, LateError):
                self._report_late(error, began)
            elif health.outages == outages:
                health.report(error)
        if health.outages != outages:
            found = None  # it was left out during the call, so its answer may be old
        self._count(requests, found)
        return found

    def _count(self, requests: Sequence[FetchRequest], found: Sequence[NDArray[np.bool_]] | None) -> None:
        num_keys = sum(len(request.keys) for request in requests)
        num_hits = sum(int(part.sum()) for part in found or ())
        if found is not None:
            self.health.note_answer()
        with self._lock:
            self._hits += num_hits
            self._misses += 0 if found is None else num_keys - num_hits
            self._skipped += num_keys if found is None else 0

    def _report_late(self, error: LateError, began: float) -> None:
        """One late call is no outage. The tier is down if it does not answer a small check either, or is late
        repeatedly.
        """
        failure = error if self.health.note_late(began) else self.attempt(lambda store: store.check())
        self.health.report(failure or error, leave_out=failure is not None)

    def refuse_other_rows(self) -> None:
        """Raise ConfigurationError if the store's rows came from other files; errors as of TableSources."""
        if self.sources is not None:
            self.sources.refuse_others(self.store, volatile=self.volatile)

    def attempt(self, act: Callable[[EmbeddingStore], None]) -> HotrowError | None:
        """Call the store; returns its error, if any. A volatile tier that is out is not called."""
        if self.volatile and (failure := self.health.failure) is not None:
            return UnavailableError(failure)
        try:
            act(self.store)
        except (UnavailableError, StoreError) as error:
            return without_frames(error)
        return None

    def learn_incarnation(self) -> HotrowError | None:
        """Find out which incarnation of a volatile store the first write goes to; returns the store's error, if any."""
        return self.attempt(lambda store: self.trust(store.incarnation())) if self.incarnation is None else None

    def trust(self, incarnation: str) -> None:
        """Let only this incarnation answer from now on, if a tier below has the rows."""
        if self.is_backed:
            self.store.trust(incarnation)
        self.incarnation = incarnation

    def write_optional(self, act: Callable[[EmbeddingStore], None]) -> bool:
        """Make an optional write. A tier that refuses it, being read-only or full, may still be read: it is
        not left out, only not written to for a while, unless it turns out to be down.
        """
        if self.health.failure is not None or time.monotonic() < self._paused_until:
            return False
        error = self.attempt(act)
        if error is None:
            self._paused_until = 0.0
            return True
        if down := self.attempt(lambda store: store.check()):
            self.health.report(down)
            return False
        self.health.note_refused_write()
        is_new = not self._paused_until
        self._paused_until = time.monotonic() + PAUSE_S
        if is_new:
            _log.warning("tier %s of the parameter server does not accept rows at the moment: %s", self.name, error)
        return False

    def miss_write(self, table: str, keys: NDArray[np.int64], error: HotrowError) -> None:
        """Handle the failure of a write of keys [n]: if a tier below has the newer rows, drop the older ones here; if
        that fails as well, leave the tier out. The only tier that keeps rows is read on, unless it is down. Must be
        called while no other thread writes.
        """
        if not self.is_backed:
            # It may be full or read-only; others have no rows to answer instead.
            down = self.attempt(lambda store: store.check()) if says_down(error) else None
            self.health.report(down or error, leave_out=down is not None)
        elif isinstance(error, StoreError) and self.attempt(lambda store: store.erase(table, keys)) is None:
            self.health.report(error)
        else:
            self.leave_out(table, keys, error)

    def drop(self, table: str, keys: NDArray[np.int64]) -> None:
        """Drop rows, keys [n], of which a tier below may have newer ones; if that fails, leave the tier out. Must be
        called while no other thread writes.
        """
        error = self.attempt(lambda store: store.erase(table, keys))
        if error is not None:
            self.leave_out(table, keys, error)

    def leave_out(self, table: str, keys: NDArray[np.int64], error: HotrowError) -> None:
        """Use the tier no more, as it has older rows of these keys [n]. Call only while no other thread writes."""
        self.unwritten.add(table, keys)
        self.health.report(error, leave_out=True)

    def drop_some_unwritten(self) -> None:
        """Drop some of the rows whose newer ones could not be written. Call only while no other thread writes."""
        table, keys = self.unwritten.take(KEYS_PER_DROP)
        try:
            if keys is None:
                self.store.clear(table)
            else:
                self.store.erase(table, keys)
        except BaseException:
            self.unwritten.add(table, keys)
            raise

    def stats(self) -> TierStats:
        """How it has been doing."""
        with self._lock:
            return TierStats(
                failure=self.health.failure,
                hits=self._hits,
                misses=self._misses,
                skipped=self._skipped,
                failures=self.health.failures,
                outages=self.health.outages,
                promoted=self.promoted,
                touched=self.touched,
                malformed=self.store.num_malformed,
            )
