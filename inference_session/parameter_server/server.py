"""The parameter server: an ordered stack of stores, asked from the top for what those above did not have.

    fetch      tier 0, then tier 1 for what is missing, …; each key once per tier
    promote    what a lower tier had goes up to the volatile tiers above it, in the background
    touch      rows that were read are marked as used, in the background, where a tier ranks its rows by that
    write      the lowest tier first, so that no tier is ever ahead of one that outlives it
    outage     a tier that fails is left out until it answers again, which is tried in the background

Nothing here invents a row: keys that no tier has are not found, and it is the caller's to answer them. They are
remembered for a moment, so that a popular one does not go through all tiers every time.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import HotrowError, SessionClosedError, StoreError, UnavailableError
from inference_session.ordered_keys import contains
from inference_session.pacing import rest_after
from inference_session.parameter_server.base import EmbeddingStore, FetchRequest, Rows
from inference_session.parameter_server.pending import (
    PendingPromotions,
    PendingTouches,
    Promotion,
    Touch,
    Unverified,
    joined,
)
from inference_session.parameter_server.recent_writes import RecentWrites
from inference_session.parameter_server.retirement import Retirement
from inference_session.parameter_server.tier import Tier
from inference_session.parameter_server.unknown_keys import UnknownKeys
from inference_session.parameter_server.wanted_rows import WantedRows

OnStoreFailure = Literal["default_vector", "error"]

MAX_REPORTED = 100
"""Different errors that are logged; a store that makes up ever new ones does not fill the log."""
PAUSE_S = 5.0
"""How long nothing is promoted to, or touched in, a tier that has just refused it."""
ROUND_INTERVAL_S = 0.5
"""How often tiers that are out are tried."""
TURN_INTERVAL_S = 0.02
"""How often rows are promoted and touched, and readers catch up: what comes meanwhile goes in one piece, and the pieces
are small."""

_log = logging.getLogger(__name__)


class ParameterServer:
    """Fetches rows through all tiers. All methods may be called from any thread."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        on_store_failure: OnStoreFailure = "default_vector",
        retirement: Retirement | None = None,
    ) -> None:
        """`tiers` from the fastest to the one that has everything; they and `retirement` are closed with the server.

        on_store_failure: what becomes of keys that are not found while a tier is out: `default_vector` leaves them not
        found and counts them, `error` raises UnavailableError.
        """
        self._tiers = tuple(tiers)
        self._durable = next((tier for tier in self._tiers if tier.durable), None)
        self._on_store_failure = on_store_failure
        self._retirement = retirement
        self._on_drop: Callable[[str, NDArray[np.int64] | None], None] = lambda _table, _keys: None
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # held while rows are written; taken before `_lock`
        self._writes: defaultdict[str, RecentWrites] = defaultdict(RecentWrites)
        self._unknown: dict[str, UnknownKeys] = {}
        self._reported: set[str] = set()
        self._promotions = PendingPromotions()
        self._touches = PendingTouches()
        self._degraded_keys = 0
        self._closing = threading.Event()
        self._worker = threading.Thread(target=self._work, name="hotrow-parameter-server", daemon=True)
        self._worker.start()

    def fetch(self, requests: Sequence[FetchRequest]) -> list[NDArray[np.bool_]]:
        """Write the vectors of all keys that any tier has to the outputs; returns for each request which those are.

        Raises:
            UnavailableError: with `on_store_failure="error"`, a key was not found while a tier was out.
        """
        unique = [np.unique(request.keys, return_inverse=True) for request in requests]
        once = [
            FetchRequest(request.table, keys, np.empty((len(keys), request.out.shape[1]), np.float32))
            for request, (keys, _) in zip(requests, unique, strict=True)
        ]
        results = []
        for request, fetched, (_, inverse), hits in zip(requests, once, unique, self.fetch_unique(once), strict=True):
            found = hits[inverse]
            request.out[found] = fetched.out[inverse[found]]
            results.append(found)
        return results

    def fetch_unique(
        self, requests: Sequence[FetchRequest], *, on_store_failure: OnStoreFailure | None = None
    ) -> list[NDArray[np.bool_]]:
        """`fetch` for keys each of which is in its request once; outputs of keys that are not found may hold anything.

        `on_store_failure` comes before the server's own.
        """
        if self._closing.is_set():
            raise SessionClosedError(f"{self!r} has been closed")
        now = time.monotonic()
        wanted = [self._wanted(request) for request in requests]
        failed = [
            tier for depth, tier in enumerate(self._tiers) if not self._fetch_from(tier, self._tiers[:depth], wanted)
        ]
        self._settle(wanted, failed, on_store_failure or self._on_store_failure, now)
        return [want.found for want in wanted]

    def insert(self, table: str, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Write rows to all tiers that take writes, the lowest first; of equal keys the last wins.

        When this returns, every later fetch gives these rows. They survive this process, and the machine after `sync`.
        A volatile tier that cannot take them is left out until it has dropped what it has of these keys.

        Raises:
            UnavailableError: a tier that is not volatile cannot take them at present, for instance because another
                process is the RocksDB's writer; some of them may have been written.
            StoreError: no tier takes writes, or one refuses these for good.
        """
        self._write(table, keys, lambda store: store.insert(table, keys, vectors))

    def erase(self, table: str, keys: NDArray[np.int64]) -> None:
        """Drop rows from all tiers that take writes, as `insert` writes them."""
        self._write(table, keys, lambda store: store.erase(table, keys))

    def forget(self, table: str, keys: NDArray[np.int64]) -> None:
        """See what others have written, and drop rows that they have changed below from the volatile tiers."""
        self.refresh()
        self._write(
            table, keys, lambda store: store.erase(table, keys), [tier for tier in self._tiers if tier.volatile]
        )

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Hold back all writes and promotions, and keep readers from seeing what others write, until the context ends.

        Fetches go on. What others write to a store that shows it at once is seen all the same.
        """
        self.refresh()
        with self._writing:
            yield

    def scan(self, table: str) -> Iterator[Rows]:
        """All rows of a table in batches, each from the first tier that has it; a row may come more than once.

        Holds the keys of all tiers but the lowest in memory.

        Raises:
            UnavailableError: a tier is out, so that rows would be missing, or older than they are.
        """
        seen = np.empty(0, np.int64)
        for tier in self._tiers:
            if tier.failure is not None:
                raise UnavailableError(f"table {table!r} cannot be read as a whole: {tier.name}: {tier.failure}")
            found: list[NDArray[np.int64]] = []
            for keys, vectors in tier.store.scan(table):
                if self._closing.is_set():
                    raise SessionClosedError(f"{self!r} has been closed")
                new = ~contains(seen, keys)
                yield keys[new], vectors[new]
                if tier is not self._tiers[-1]:
                    found.append(keys[new])
            seen = np.unique(np.concatenate([seen, *found]))

    def sync(self) -> None:
        """Return when what has been written survives the machine, in the tiers that are not volatile."""
        for tier in self._tiers:
            if not tier.volatile:
                tier.store.sync()

    @property
    def is_durable(self) -> bool:
        """Whether there is a store whose rows outlive all processes."""
        return self._durable is not None

    def note(self, table: str) -> str | None:
        """The text kept beside a table in the persistent store; None: there is none, or no such store."""
        return None if self._durable is None else self._durable.store.note(table)

    def save_note(self, table: str, text: str) -> None:
        """Keep a text beside a table in the persistent store; whoever reads it finds all that was written before it."""
        if self._durable is None:
            raise StoreError(f"{self!r} has no persistent store that could keep a note on table {table!r}")
        self._durable.store.set_note(table, text)

    def on_drop(self, tell: Callable[[str, NDArray[np.int64] | None], None]) -> None:
        """Have a cache told of rows that it may have read too old: their table and keys, None for all of its rows."""
        self._on_drop = tell

    def refresh(self) -> None:
        """Let stores see what others have written to them, and ask again for keys that were unknown."""
        for tier in self._tiers:
            self._survive(self._look_after, tier)
        with self._lock:
            self._unknown.clear()

    def stats(self) -> dict[str, Any]:
        """Counters since the server was made."""
        with self._lock:
            return {
                "degraded_keys": self._degraded_keys,
                "dropped_promotions": self._promotions.num_dropped,
                "tiers": {tier.name: tier.counters() for tier in self._tiers},
            }

    def wait_for_promotions(self) -> None:
        """Return when all promotions queued so far are done."""
        self._promotions.wait()

    def close(self) -> None:
        """End the background work and close all tiers. May be called twice."""
        self._closing.set()
        self._worker.join()
        if self._retirement is not None:
            self._retirement.close()
        for tier in self._tiers:
            tier.store.close()

    def __repr__(self) -> str:
        tiers = ", ".join(f"{tier.name}{' (out)' if tier.failure else ''}" for tier in self._tiers)
        return f"<ParameterServer [{tiers or 'no tiers'}]>"

    def _wanted(self, request: FetchRequest) -> WantedRows:
        table, keys, vectors = request
        memory = self._unknown.get(table)
        unknown = None if memory is None else memory.holds(keys)
        left = np.arange(len(keys)) if unknown is None else np.flatnonzero(~unknown)
        with self._lock:
            moment = self._writes[table].moment
        return WantedRows(table, keys, vectors, np.zeros(len(keys), np.bool_), left, moment)

    def _fetch_from(self, tier: Tier, above: Sequence[Tier], wanted: Sequence[WantedRows]) -> bool:
        """Fetch what is missing from one tier; whether it answered."""
        asking = [want for want in wanted if len(want.left)]
        if not asking:
            return True
        requests = [want.missing() for want in asking]
        found = self._ask(tier, requests)
        if found is None:
            return False
        for want, request, part in zip(asking, requests, found, strict=True):
            want.take(request, part)
            if tier.touches:
                self._touches.put(Touch(tier, want.table, request.keys[part], want.moment))
            self._promote(tier, above, want, request, part)
        return True

    def _ask(self, tier: Tier, requests: Sequence[FetchRequest]) -> list[NDArray[np.bool_]] | None:
        """`fetch_many` of a tier's store, counted; None where it does not answer."""
        num_keys = sum(len(request.keys) for request in requests)
        outages = tier.outages
        try:
            found = tier.store.fetch_many(requests) if tier.failure is None else None
        except (UnavailableError, StoreError) as error:
            # A call that waited through the beginning of an outage says nothing of a tier that has come back since.
            if tier.outages == outages:
                self._report(tier, error)
            found = None
        with self._lock:
            hits = 0 if found is None else sum(int(part.sum()) for part in found)
            tier.hits += hits
            tier.misses += 0 if found is None else num_keys - hits
            tier.skipped += num_keys if found is None else 0
        return found

    def _settle(
        self, wanted: Sequence[WantedRows], failed: Sequence[Tier], on_store_failure: OnStoreFailure, now: float
    ) -> None:
        """Remember keys that no tier has; count, or refuse, those that a tier which is out might have had."""
        num_unknown = sum(len(want.left) for want in wanted)
        if not num_unknown:
            return
        with self._lock:
            if not failed:
                self._remember_unknown(wanted, now)
                return
            self._degraded_keys += num_unknown
        if on_store_failure == "error":
            reasons = "; ".join(f"{tier.name}: {tier.failure or tier.last_error}" for tier in failed)
            raise UnavailableError(f"{num_unknown} keys cannot be fetched while a store is out ({reasons})")

    def _remember_unknown(self, wanted: Sequence[WantedRows], now: float) -> None:
        """Must be called while holding `_lock`. `now`: the time before the tiers were asked."""
        for want in wanted:
            keys = want.keys[want.left]
            if len(keys):
                written = self._writes[want.table].written(keys, want.moment)  # and so may be there by now
                self._unknown.setdefault(want.table, UnknownKeys()).add(keys[~written], now)

    def _promote(
        self, source: Tier, above: Sequence[Tier], want: WantedRows, request: FetchRequest, hits: NDArray[np.bool_]
    ) -> None:
        """Queue rows for the tiers above that keep what they missed; a full queue drops them, until the next miss."""
        tiers = [tier for tier in above if tier.cache_missed_keys and tier.failure is None]
        if not tiers or not hits.any():
            return
        rows = request.keys[hits], request.out[hits]
        self._promotions.put(Promotion(source, tiers, want.table, *rows, want.moment))

    def _write(
        self,
        table: str,
        keys: NDArray[np.int64],
        write: Callable[[EmbeddingStore], None],
        tiers: Sequence[Tier] | None = None,
    ) -> None:
        """Write to these tiers, all if there are none given."""
        if tiers is None and not any(tier.store.supports_writes for tier in self._tiers):
            raise StoreError(f"table {table!r} cannot be written to: {self!r} has no store that takes writes")
        with self._writing:
            try:
                for tier in reversed(self._tiers if tiers is None else tiers):
                    if tier.store.supports_writes:
                        error = tier.attempt(write)
                        if error is not None and not tier.volatile:
                            raise error
                        if error is not None:
                            self._leave_out(tier, table, keys, error)
            finally:
                # Rows that were fetched before this are not to be promoted after it, and keys that were asked for
                # before it not to be remembered as unknown.
                with self._lock:
                    self._writes[table].add(keys)
                    if table in self._unknown:
                        self._unknown[table].forget(keys)

    def _leave_out(self, tier: Tier, table: str, keys: NDArray[np.int64], error: HotrowError) -> None:
        """Serve nothing from a tier that has older rows of these keys. Must be called while holding `_writing`."""
        tier.remember_unwritten(table, keys)
        self._report(tier, error, leave_out=True)

    def _report(self, tier: Tier, error: HotrowError, *, leave_out: bool = False) -> None:
        """Count a failure and log it once; a tier that is down is left out from now on."""
        is_out = leave_out or isinstance(error, UnavailableError)
        with self._lock:
            tier.failures += 1
            tier.last_error = str(error)
            is_news = tier.failure is None if is_out else self._is_new(str(error))
            if is_out and is_news:
                tier.begin_outage(str(error))
        if is_news:
            _log.warning("tier %s of the parameter server failed: %s", tier.name, error)

    def _is_new(self, failure: str) -> bool:
        """Whether it has not been reported yet. Must be called while holding `_lock`."""
        if failure in self._reported or len(self._reported) >= MAX_REPORTED:
            return False
        self._reported.add(failure)
        return True

    def _work(self) -> None:
        """Promote and touch rows, bring back tiers that are out, and let readers catch up, until the server closes."""
        next_round = time.monotonic() + ROUND_INTERVAL_S
        rest_s = TURN_INTERVAL_S
        while not self._closing.wait(rest_s):
            started_s = time.thread_time()
            self._take_turn()
            if time.monotonic() >= next_round:
                for tier in self._tiers:
                    self._survive(self._look_after, tier)
                self._survive(self._drop_outdated, self._promotions.take_unverified())
                next_round = time.monotonic() + ROUND_INTERVAL_S
            rest_s = max(TURN_INTERVAL_S, rest_after(time.thread_time() - started_s))
        self._survive(self._drop_outdated, self._promotions.take_unverified())
        self._promotions.discard()

    def _take_turn(self) -> None:
        """Do a small piece of what requests have left to do, and see what others have written since."""
        promotions = self._promotions.take()
        self._survive(self._insert, promotions)
        self._promotions.finish(len(promotions))
        self._survive(self._touch, self._touches.take())
        for tier in self._tiers:
            if tier.store.lags and tier.failure is None:
                self._survive(self._look_after, tier)

    @staticmethod
    def _survive(work: Callable[[Any], None], item: object) -> None:
        """Do a piece of background work; what goes wrong in it must not end all that comes after."""
        try:
            work(item)
        except Exception:  # noqa: BLE001 - whatever it is, it is logged, and the next piece has nothing to do with it
            _log.exception("background work of the parameter server failed")

    def _insert(self, promotions: Sequence[Promotion]) -> None:
        if not promotions:
            return
        with self._writing:
            current = joined([part for part in map(self._not_written_since, promotions) if len(part.keys)])
            inserted = [(tier, part) for part in current for tier in part.tiers if self._insert_into(tier, part)]
        self._promotions.keep([Unverified(tier, part) for tier, part in inserted if part.source.store.lags])

    def _not_written_since(self, promotion: Promotion) -> Promotion:
        with self._lock:
            written = self._writes[promotion.table].written(promotion.keys, promotion.moment)
        return promotion.rows(~written)

    def _insert_into(self, tier: Tier, promotion: Promotion) -> bool:
        inserted = self._try_if_welcome(
            tier, lambda store: store.insert_absent(promotion.table, promotion.keys, promotion.vectors)
        )
        with self._lock:
            tier.promoted += len(promotion.keys) if inserted else 0
        return inserted

    def _touch(self, touches: Sequence[Touch]) -> None:
        """Mark rows as used, but for those written since they were read: erased ones must get no mark."""
        if not touches:
            return
        keys: defaultdict[tuple[Tier, str], list[NDArray[np.int64]]] = defaultdict(list)
        with self._writing:
            for touch in touches:
                with self._lock:
                    written = self._writes[touch.table].written(touch.keys, touch.moment)
                keys[touch.tier, touch.table].append(touch.keys[~written])
            for (tier, table), parts in keys.items():
                used = np.concatenate(parts)
                touched = self._try_if_welcome(tier, lambda store, t=table, k=used: store.touch(t, k))  # type: ignore[misc]
                with self._lock:
                    tier.touched += len(used) if touched else 0

    def _try_if_welcome(self, tier: Tier, act: Callable[[EmbeddingStore], None]) -> bool:
        """Write what need not be written. A tier that refuses it, being read-only or full, may still be read: it is
        left out by no failure here, only written to no more for a while, unless it turns out to be down.
        """
        if tier.failure is not None or time.monotonic() < tier.paused_until:
            return False
        error = tier.attempt(act)
        down = None if error is None else tier.attempt(lambda store: store.check())
        if down is not None:
            self._report(tier, down)
            return False
        with self._lock:
            is_news = error is not None and not tier.paused_until
            tier.failures += error is not None
            tier.paused_until = 0.0 if error is None else time.monotonic() + PAUSE_S
        if is_news:
            _log.warning("tier %s of the parameter server takes no rows at present: %s", tier.name, error)
        return error is None

    def _drop_outdated(self, inserted: Sequence[Unverified]) -> None:
        """Take rows back that another process has changed or erased, which the tier they came from showed too late.

        That process writes the lower tier first: what it changes after this look, it will change above as well. Done
        once a round, for a tier that catches up may hold up all threads of this process meanwhile.
        """
        sources = {promotion.source for _, promotion in inserted}
        seen = {source for source in sources if source.attempt(lambda store: store.refresh()) is None}
        with self._writing:
            for tier, promotion in inserted:
                keys = promotion.keys
                outdated = keys[~promotion.are_current()] if promotion.source in seen else keys
                error = tier.attempt(lambda store, p=promotion, k=outdated: store.erase(p.table, k))  # type: ignore[misc]
                if error is not None:
                    self._leave_out(tier, promotion.table, outdated, error)

    def _look_after(self, tier: Tier) -> None:
        """Bring a tier back if it answers; let one that is in use see what others have written."""
        try:
            if tier.failure is None:
                with self._writing if tier.store.lags else contextlib.nullcontext():
                    tier.store.refresh()
                self._look_for_losses(tier)
            elif time.monotonic() >= tier.retry_at:
                self._bring_back(tier)
        except (UnavailableError, StoreError) as error:
            self._report(tier, error, leave_out=tier.failure is not None)

    def _bring_back(self, tier: Tier) -> None:
        """Use a tier again that was out, without the rows that it has missed newer ones of."""
        tier.store.check()
        self._look_for_losses(tier)
        with self._writing:
            for table in list(tier.unwritten):
                tier.drop_unwritten(table)
            # Before anybody can find it failing once more, so that the log has things in their order.
            # A warning like the one that it ends: whoever was shown that has to see this.
            _log.warning("tier %s of the parameter server answers again", tier.name)
            with self._lock:
                tier.failure, tier.back_since = None, time.monotonic()

    def _look_for_losses(self, tier: Tier) -> None:
        """Drop all that was written to a volatile tier whose store has forgotten some of it and shows older rows."""
        if not tier.volatile or not any(writes.moment for writes in list(self._writes.values())):
            return
        incarnation = tier.store.incarnation()
        if tier.incarnation and incarnation != tier.incarnation:
            with self._writing:
                for table, writes in list(self._writes.items()):
                    tier.unwritten[table] = None if (keys := writes.keys()) is None else [keys]
                    tier.drop_unwritten(table)
                    self._on_drop(table, keys)
        tier.incarnation = incarnation
