"""One store of the parameter server's stack: what part it has there, and how it has been doing."""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import HotrowError, StoreError, UnavailableError
from inference_session.parameter_server.base import EmbeddingStore, FetchRequest, LateError
from inference_session.parameter_server.table_source import TableSources
from inference_session.parameter_server.write_log import KeysByTable

STEADY_S = 10.0
"""A tier that was back for less than this is unsteady, and left out for longer each time."""
MAX_TIMES_LATE = 3
"""After this many late calls in a row, a tier is left out although it answers checks."""
MAX_UNWRITTEN_KEYS = 1_000_000
"""Different keys of a table whose newest rows a tier may miss; if there are more, it drops the whole table."""
KEYS_PER_DROP = 4096
"""Keys that a tier drops at once on its way back: few enough that neither requests nor writers wait for long."""
MIN_RETRY_PAUSE_S, MAX_RETRY_PAUSE_S = 0.5, 16.0
"""The shortest and the longest that an unsteady tier is left out before it is tried again."""
PAUSE_S = 5.0
"""How long no rows are promoted to, or touched in, a tier that has just refused that."""
MAX_REPORTED = 100
"""Different errors that are logged; a store that keeps producing new ones does not fill the log."""

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
    failure: str | None = None
    """Why the tier is left out at the moment; None: it is in use."""
    last_error: str = ""
    """The message of its last failure."""
    is_suspect: bool = False
    """It refused a call. Whether it refuses all, as after a change of passwords, must be checked."""
    incarnation: str | None = None
    """The store's incarnation before its first write, and at its last check; None: nothing was written."""
    holds_earlier_writes: bool = False
    """Other processes, or this one's predecessors, have written rows to it; the keys are unknown."""
    back_since: float = -math.inf
    """When the tier last came back."""
    retry_pause_s: float = 0.0
    retry_at: float = 0.0
    """When it is tried again."""
    unwritten: KeysByTable = field(default_factory=lambda: KeysByTable(MAX_UNWRITTEN_KEYS))
    """Keys whose newest rows this tier did not take; it is left out until it has dropped its rows of them."""
    is_returning: bool = False
    """It answers again, and is dropping these rows."""
    hits: int = 0
    misses: int = 0
    skipped: int = 0
    """Keys that were not asked for here because the tier was left out or failed."""
    failures: int = 0
    paused_until: float = 0.0
    """When rows may be promoted or touched here again after that was refused; 0: now."""
    outages: int = 0
    """Times that the tier was left out, the present one included."""
    promoted: int = 0
    """Rows inserted because a lower tier had them."""
    touched: int = 0
    """Rows marked as used."""
    _times_late: int = field(default=0, init=False, repr=False)
    """Late calls in a row."""
    _late_at: float = field(default=-math.inf, init=False, repr=False)
    """When that was last counted."""
    _reported: set[str] = field(default_factory=set, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def fetch(self, requests: Sequence[FetchRequest]) -> list[NDArray[np.bool_]] | None:
        """`fetch_many` of the store, bool [n] for each request, counted; None where it does not answer."""
        outages, began = self.outages, time.monotonic()
        try:
            found = self.store.fetch_many(requests) if self.failure is None else None
        except (UnavailableError, StoreError) as error:
            found = None
            # A call that began before an outage says nothing about a tier that has come back since.
            if self.outages == outages and isinstance(error, LateError):
                self._report_late(error, began)
            elif self.outages == outages:
                self.report(error)
        if self.outages != outages:
            found = None  # it was left out during the call, so its answer may be old
        num_keys = sum(len(request.keys) for request in requests)
        num_hits = sum(int(part.sum()) for part in found or ())
        with self._lock:
            self._times_late = self._times_late if found is None else 0
            self.hits += num_hits
            self.misses += 0 if found is None else num_keys - num_hits
            self.skipped += num_keys if found is None else 0
        return found

    def _report_late(self, error: LateError, began: float) -> None:
        """One late call is no outage. The tier is down if it does not answer a small check either, or is
        late repeatedly; calls that were late at the same time count once.
        """
        with self._lock:
            if began > self._late_at:
                self._times_late += 1
                self._late_at = time.monotonic()
            is_down = self._times_late >= MAX_TIMES_LATE
        failure = error if is_down else self.attempt(lambda store: store.check())
        self.report(failure or error, leave_out=failure is not None)

    def report(self, error: HotrowError, *, leave_out: bool | None = None) -> None:
        """Count a failure and log it once; a tier that is down is left out from now on. `leave_out`: whether it is;
        None: by the error.
        """
        is_out = _says_down(error) if leave_out is None else leave_out
        with self._lock:
            self.failures += 1
            self.last_error = str(error)
            self.is_suspect = not is_out
            is_new = self.failure is None if is_out else self._is_new(str(error))
            if is_out and is_new:
                self.begin_outage(str(error))
        if is_new:
            _log.warning("tier %s of the parameter server failed: %s", self.name, error)

    def _is_new(self, failure: str) -> bool:
        """Whether it is still unreported. Must be called while holding `_lock`."""
        if failure in self._reported or len(self._reported) >= MAX_REPORTED:
            return False
        self._reported.add(failure)
        return True

    def begin_outage(self, failure: str) -> None:
        """Leave the tier out. One that answers checks but not requests must not make these wait repeatedly."""
        now = time.monotonic()
        self.failure = failure
        self.outages += 1
        unsteady = now - self.back_since < STEADY_S
        self.retry_pause_s = min(max(MIN_RETRY_PAUSE_S, 2 * self.retry_pause_s), MAX_RETRY_PAUSE_S) if unsteady else 0.0
        self.retry_at = now + self.retry_pause_s

    def refuse_other_rows(self) -> None:
        """Raise ConfigurationError if the store's rows came from other files; errors as of TableSources."""
        if self.sources is not None:
            self.sources.refuse_others(self.store, volatile=self.volatile)

    def refuse(self, error: HotrowError) -> None:
        """Leave the tier out, though it answers, and log why once."""
        if self.failure == str(error):
            return
        with self._lock:
            self.failures += 1
            if self.failure is None:
                self.begin_outage(str(error))
            self.failure = self.last_error = str(error)
        _log.warning("tier %s of the parameter server is left out: %s", self.name, error)

    def end_outage(self) -> None:
        """Use the tier again."""
        # Logged before a call can find it failing again, so that log lines are in order.
        # A warning, like the one it resolves: a reader who saw that one must see this one too.
        _log.warning("tier %s of the parameter server answers again", self.name)
        with self._lock:
            self.failure, self.is_returning, self.back_since = None, False, time.monotonic()

    def attempt(self, act: Callable[[EmbeddingStore], None]) -> HotrowError | None:
        """Call the store; returns its error, if any. A volatile tier that is out is not called."""
        if self.failure is not None and self.volatile:
            return UnavailableError(self.failure)
        try:
            act(self.store)
        except (UnavailableError, StoreError) as error:
            _free_what_frames_hold(error)
            return error
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
        if self.failure is not None or time.monotonic() < self.paused_until:
            return False
        error = self.attempt(act)
        down = None if error is None else self.attempt(lambda store: store.check())
        if down is not None:
            self.report(down)
            return False
        with self._lock:
            is_new = error is not None and not self.paused_until
            self.failures += error is not None
            self.paused_until = 0.0 if error is None else time.monotonic() + PAUSE_S
        if is_new:
            _log.warning("tier %s of the parameter server does not accept rows at the moment: %s", self.name, error)
        return error is None

    def miss_write(self, table: str, keys: NDArray[np.int64], error: HotrowError) -> None:
        """Handle the failure of a write of keys [n]: if a tier below has the newer rows, drop the older ones here; if
        that fails as well, leave the tier out. The only tier that keeps rows is read on, unless it is down. Must be
        called while no other thread writes.
        """
        if not self.is_backed:
            # It may be full or read-only; others have no rows to answer instead.
            down = self.attempt(lambda store: store.check()) if _says_down(error) else None
            self.report(down or error, leave_out=down is not None)
        elif isinstance(error, StoreError) and self.attempt(lambda store: store.erase(table, keys)) is None:
            self.report(error)
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
        self.report(error, leave_out=True)

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
                failure=self.failure,
                hits=self.hits,
                misses=self.misses,
                skipped=self.skipped,
                failures=self.failures,
                outages=self.outages,
                promoted=self.promoted,
                touched=self.touched,
                malformed=self.store.num_malformed,
            )


def _says_down(error: HotrowError) -> bool:
    """Whether a tier with this error is down, unless a check tells otherwise; a late call is no outage."""
    return isinstance(error, UnavailableError) and not isinstance(error, LateError)


def _free_what_frames_hold(error: BaseException | None) -> None:
    """An error leads to the frames that it passed, and these to what they worked with, such as a RocksDB that the store
    has replaced: it would stay open, and locked against the store itself, for as long as the error is kept.
    """
    seen: set[int] = set()  # a caller may have raised an error from itself
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
