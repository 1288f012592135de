"""The background work of a parameter server: what fetches have queued, and what keeps tiers usable.

promote    rows found in a lower tier go up to the volatile tiers above it
touch      rows that were read are marked as used, where a tier ranks its rows by that
catch up   stores that lag see what other processes have written
bring back a tier that failed is used again once it answers, after dropping rows whose newer versions it missed
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from functools import partial

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import ConfigurationError, HotrowError, SessionClosedError, StoreError, UnavailableError
from inference_session.parameter_server.base import ERASED_SUFFIX
from inference_session.parameter_server.known_incarnation import KnownIncarnation
from inference_session.parameter_server.promotions import (
    PendingPromotions,
    PendingTouches,
    Promotion,
    Touch,
    UnverifiedPromotion,
    merged,
)
from inference_session.parameter_server.tier import Tier
from inference_session.parameter_server.write_log import TierWrites
from inference_session.platform.log_records import log_error
from inference_session.platform.pacing import rest_after

ROUND_INTERVAL_S = 0.5
"""How often tiers that are out are tried."""
TURN_INTERVAL_S = 0.02
"""How often rows are promoted and touched, and readers catch up. What has been queued in between is done together."""
BRING_BACK_S = 0.1
"""How long a tier drops rows in one turn."""
_REST_S = 0.001
"""Pause between two pieces of that, for threads that wait to write."""
_MAY_HAVE_LOST = (
    "tier %s of the parameter server is another server, or a Cluster of other nodes, than took the last writes, and may"
    " lack some of them; no tier below has them: unless nodes were added or removed on purpose, write them again"
)

_MISSES_WRITES = (
    "another process wrote rows to the tier below and not to this one (it cannot reach it, or has none); it is used"
    " again once a process that reaches it has written"
)

_log = logging.getLogger(__name__)


class _MissedWritesError(HotrowError):
    """The tier answers, but misses writes of another process."""


class TierUpkeep:
    """Does the work in its own thread, until closed. All methods may be called from any thread."""

    def __init__(self, tiers: Sequence[Tier], writes: TierWrites, known: KnownIncarnation) -> None:
        self.promotions = PendingPromotions()
        self.touches = PendingTouches()
        self.on_drop: Callable[[str, NDArray[np.int64] | None], None] = _ignore_drop
        """Called with rows that a cache may have read too old: their table and keys, None for all of its rows."""
        self._tiers = tiers
        self._writes = writes
        self._known = known
        self._closing = threading.Event()
        for tier in tiers:
            if tier.volatile and tier.health.failure is None:
                self._look_after(tier)  # before the tier is used
        self._worker = threading.Thread(target=self._work, name="hotrow-parameter-server", daemon=True)
        self._worker.start()

    def look_after_all(self) -> None:
        """Bring tiers back that answer again, and let those in use see what others have written.

        The lowest comes first: it tells whether those above it miss writes.
        """
        for tier in reversed(self._tiers):
            self._try(partial(self._look_after, tier))

    def close(self) -> None:
        """End the work. May be called twice."""
        self._closing.set()
        self._worker.join()
        # The callback refers to caches, which refer to this object. While it does, only the garbage collector would
        # free their memory and the mapped files.
        self.on_drop = _ignore_drop

    def _work(self) -> None:
        next_round = time.monotonic() + ROUND_INTERVAL_S
        rest_s = TURN_INTERVAL_S
        while not self._closing.wait(rest_s):
            started_s = time.thread_time()
            self._try(self._take_turn)
            if time.monotonic() >= next_round:
                self._try(self._take_round)
                next_round = time.monotonic() + ROUND_INTERVAL_S
            rest_s = max(TURN_INTERVAL_S, rest_after(time.thread_time() - started_s))
        self._try(lambda: self.drop_outdated(self.promotions.take_unverified()))
        self.promotions.discard()

    def _take_round(self) -> None:
        """Look after all tiers, and verify what was promoted."""
        self.look_after_all()
        self.drop_outdated(self.promotions.take_unverified())

    def _take_turn(self) -> None:
        """Do a small piece of what requests have queued, and see what others have written since."""
        self._try(self._promote)
        self._try(lambda: self._touch(self.touches.take()))
        for tier in self._tiers:
            if tier.health.is_returning or (tier.store.lags and tier.health.failure is None):
                self._try(partial(self._look_after, tier))

    def _try(self, work: Callable[[], None]) -> None:
        """Do a piece of work; an error in it must not end later work."""
        try:
            work()
        except Exception as error:  # it is logged; the next piece does not depend on it
            if isinstance(error, SessionClosedError) and self._closing.is_set():
                raise  # to a caller's `refresh`: this class's own thread ends before stores are closed
            log_error(_log, "background work of the parameter server failed")
            self._closing.wait(ROUND_INTERVAL_S)  # an error that comes back in each turn must not fill the log

    def _promote(self) -> None:
        """Insert rows above, except those written since they were read: by this process, as its log says, or by
        another one, as their source says by now.
        """
        if not self.promotions.any_wait:
            return
        with self._writes.lock:
            found = map(self._not_written_since, self.promotions.take())
            current = self._not_changed_by_others(merged([part for part in found if len(part.keys)]))
            inserted = [(tier, part) for part in current for tier in part.tiers if self._insert_into(tier, part)]
            moment = self._writes.own.moment
            self.promotions.keep(
                [UnverifiedPromotion(tier, part, moment) for tier, part in inserted if part.source.store.is_shared]
            )

    def _not_written_since(self, promotion: Promotion) -> Promotion:
        return promotion.rows(~self._writes.log.written(promotion.table, promotion.keys, promotion.moment))

    def _not_changed_by_others(self, promotions: Sequence[Promotion]) -> list[Promotion]:
        """Those rows that are the same in their source by now; none of a source that cannot tell. Must be called while
        no other thread writes.
        """
        shared = [part for part in promotions if part.source.store.is_shared]
        is_seen = self._see_what_others_wrote({part.source for part in shared})
        checked = [part.rows(part.are_current()) for part in shared if is_seen]
        return [part for part in promotions if not part.source.store.is_shared] + checked

    @staticmethod
    def _insert_into(tier: Tier, promotion: Promotion) -> bool:
        inserted = tier.write_optional(
            lambda store: store.insert_absent(promotion.table, promotion.keys, promotion.vectors)
        )
        tier.promoted += len(promotion.keys) if inserted else 0
        return inserted

    def _touch(self, touches: Sequence[Touch]) -> None:
        """Mark rows as used, except those written since they were read: erased ones must get no mark."""
        if not touches:
            return
        keys: defaultdict[tuple[Tier, str], list[NDArray[np.int64]]] = defaultdict(list)
        with self._writes.lock:
            for touch in touches:
                written = self._writes.log.written(touch.table, touch.keys, touch.moment)
                keys[touch.tier, touch.table].append(touch.keys[~written])
            for (tier, table), parts in keys.items():
                used = np.concatenate(parts)
                touched = tier.write_optional(lambda store, t=table, k=used: store.touch(t, k))  # type: ignore[misc]
                tier.touched += len(used) if touched else 0

    def drop_outdated(self, inserted: Sequence[UnverifiedPromotion]) -> None:
        """Drop promoted rows that another process changed or erased before the source tier showed it here.

        What that process changes after this check, it changes in the upper tier as well, because it writes the lower
        tier first. This is done once a round, because a tier that catches up may block all threads of this process.
        """
        if not inserted:
            return
        with self._writes.lock:
            is_seen = self._see_what_others_wrote({one.promotion.source for one in inserted})
            for one in inserted:
                promotion = one.promotion
                outdated = promotion.rows(~promotion.are_current()) if is_seen else promotion
                self._drop_unless_rewritten(one._replace(promotion=outdated))

    def _see_what_others_wrote(self, sources: Set[Tier]) -> bool:
        """Refresh these tiers, of which rows were read; returns whether they show what others had written before. Must
        be called while no other thread writes.
        """
        # Tiers that lag are refreshed as well: one of them may hold the keys that were erased from the files.
        read = [tier for tier in self._tiers if sources and (tier in sources or tier.store.lags)]
        return all(tier.attempt(lambda store: store.refresh()) is None for tier in read)

    def _drop_unless_rewritten(self, outdated: UnverifiedPromotion) -> None:
        """Drop promoted rows, except those that were written since: a write that no tier below has would be lost.
        Must be called while no other thread writes.
        """
        tier, promotion, moment = outdated
        if len(promotion.keys):
            rewritten = self._writes.own.written(promotion.table, promotion.keys, moment)
            rewritten |= promotion.are_replaced_in(tier)
            tier.drop(promotion.table, promotion.keys[~rewritten])

    def _look_after(self, tier: Tier) -> None:
        """Bring a tier back if it answers; let one that is in use see what others have written."""
        is_out = tier.health.is_suspect or tier.health.failure is not None
        try:
            if tier.health.failure is None:
                if is_out:
                    tier.store.check()
                    is_out = tier.health.is_suspect = False
                with self._writes.lock if tier.store.lags else contextlib.nullcontext():
                    tier.store.refresh()
                self._look_for_losses(tier)
                self._look_for_other_rows(tier)
            elif time.monotonic() >= tier.health.retry_at:
                self._bring_back(tier)
        except (UnavailableError, StoreError) as error:
            tier.health.is_returning = False
            tier.health.report(error, leave_out=is_out or None)
        except (ConfigurationError, _MissedWritesError) as error:
            tier.health.is_returning = False
            tier.health.refuse(error)

    def _bring_back(self, tier: Tier) -> None:
        """Use a tier again that was out, without the rows whose newer versions it missed. These are dropped in
        pieces, between which others may write; the next turn does what this one leaves.
        """
        tier.store.check()
        self._look_for_losses(tier)  # first: it trusts a store that was started again, which else answers nothing
        tier.refuse_other_rows()
        tier.health.is_returning = True
        end = time.monotonic() + BRING_BACK_S
        while time.monotonic() < end and not self._closing.wait(_REST_S):
            with self._writes.lock:
                if not tier.unwritten:
                    self._note_that_it_has_all(tier)
                    return tier.health.end_outage()
                tier.drop_some_unwritten()
        return None

    def _note_that_it_has_all(self, tier: Tier) -> None:
        """Save a note for sessions that are opened later, if this one writes.

        Raises:
            _MissedWritesError: another process has noted that the tier misses writes.
            UnavailableError: the store refuses to replace such a note.
        """
        has_all = not self._known.misses_writes
        if self._writes.keys:
            with contextlib.suppress(HotrowError) if has_all else contextlib.nullcontext():
                has_all = self._known.save(tier.incarnation or "")
        if not has_all:
            raise _MissedWritesError(_MISSES_WRITES)

    def _look_for_losses(self, tier: Tier) -> None:
        """Leave out a volatile tier whose store may have lost writes and show older rows, or misses writes of others,
        until it has dropped all that was written. Where no tier below has these rows, it keeps them.
        """
        if not tier.volatile:
            return
        if noted := self._known.read():
            tier.incarnation, tier.holds_earlier_writes = noted, True
        if tier.incarnation is None and not self._writes.keys:
            return
        incarnation = tier.store.incarnation()
        if tier.incarnation and incarnation and incarnation != tier.incarnation:
            if tier.is_backed:
                self._drop_all_written(tier)
            else:
                _log.warning(_MAY_HAVE_LOST, tier.name)
        tier.trust(incarnation)

    def _look_for_other_rows(self, tier: Tier) -> None:
        """Make sure that a volatile store still has the note on the files that its rows came from. It loses it when it
        is emptied, and may come back with another.
        """
        if tier.volatile and tier.sources is not None and not tier.sources.are_noted(tier.store):
            try:
                tier.refuse_other_rows()
            except ConfigurationError as error:
                tier.health.refuse(error)
                for table in tier.sources.tables:
                    self.on_drop(table, None)

    def _drop_all_written(self, tier: Tier) -> None:
        """Make the tier drop all that was written. Keys that other processes wrote are unknown: then all tables."""
        with self._writes.lock:
            written = self._writes.keys.as_dict()
            if tier.holds_earlier_writes:
                written |= dict.fromkeys(table for table in tier.store.tables if not table.endswith(ERASED_SUFFIX))
            for table, keys in written.items():
                tier.unwritten.add(table, keys)
            tier.health.report(
                UnavailableError("it is another server than the one that took the last writes"), leave_out=True
            )
            tier.health.is_returning = True
        for table, keys in written.items():
            self.on_drop(table, keys)


def _ignore_drop(_table: str, _keys: NDArray[np.int64] | None) -> None:
    """There is no cache over the server."""
