"""Bounded queues of what fetches leave to the background: rows to promote, rows to mark as used. Thread-safe."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import StoreError, UnavailableError
from inference_session.parameter_server.base import EmbeddingStore
from inference_session.parameter_server.tier import Tier

MAX_PENDING_PROMOTIONS = 1024
MAX_PENDING_BYTES = 64 << 20
"""Promotions that may wait. Further ones are dropped and counted; the next miss of these rows queues them again."""
MAX_PENDING_TOUCHES = 1 << 20
"""Keys that may wait to be marked as used; further ones are not marked."""
PROMOTIONS_AT_ONCE, ROWS_AT_ONCE = 64, 1024
"""Promotions, and rows of promotions or touches, that are done at once before other background work."""


class Promotion(NamedTuple):
    """Rows to be promoted."""

    source: Tier
    tiers: Sequence[Tier]
    table: str
    keys: NDArray[np.int64]
    """[n]"""
    vectors: NDArray[np.float32]
    """[n, embedding_dim]"""
    moment: int
    """The write log's moment when the fetch began."""

    def rows(self, which: NDArray[np.bool_]) -> Promotion:
        """Some of its rows; which: bool [n]."""
        return self._replace(keys=self.keys[which], vectors=self.vectors[which])

    def are_current(self) -> NDArray[np.bool_]:
        """Which rows, bool [n], are unchanged in their source; none if that cannot be determined."""
        found, same = self._compare(self.source.store)
        return found & same

    def are_replaced_in(self, tier: Tier) -> NDArray[np.bool_]:
        """For which keys, bool [n], a tier has another row by now; none if that cannot be determined."""
        found, same = self._compare(tier.store)
        return found & ~same

    def _compare(self, store: EmbeddingStore) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which of the keys a store has, and of which its row is the same, bit by bit: bool [n] both."""
        vectors = np.zeros_like(self.vectors)
        try:
            found = store.fetch(self.table, self.keys, vectors)
        except (UnavailableError, StoreError):
            found = np.zeros(len(self.keys), np.bool_)
        return found, (vectors.view(np.uint32) == self.vectors.view(np.uint32)).all(axis=1)


class Touch(NamedTuple):
    """Rows that were read."""

    tier: Tier
    table: str
    keys: NDArray[np.int64]
    """[n]"""
    moment: int
    """The write log's moment when the fetch began."""


class UnverifiedPromotion(NamedTuple):
    """Rows that were promoted from a tier which may show older ones than it has."""

    tier: Tier
    """Where they are now."""
    promotion: Promotion
    moment: int
    """The moment of the log of this process's own writes when they were promoted."""


class PendingPromotions:
    """Promotions that wait for their turn, and those done that wait to be verified."""

    def __init__(self) -> None:
        self.num_dropped = 0
        """Rows."""
        self._waiting: deque[Promotion] = deque()
        self._unverified: list[UnverifiedPromotion] = []
        self._num_bytes = 0  # of both
        self._lock = threading.Lock()

    def put(self, promotion: Promotion) -> None:
        """Queue rows for promotion, unless too many wait already."""
        with self._lock:
            if len(self._waiting) >= MAX_PENDING_PROMOTIONS or self._num_bytes > MAX_PENDING_BYTES:
                self.num_dropped += len(promotion.keys)
            else:
                self._num_bytes += promotion.vectors.nbytes
                self._waiting.append(promotion)

    @property
    def any_wait(self) -> bool:
        """Whether there are any to `take`."""
        return bool(self._waiting)

    def take(self) -> list[Promotion]:
        """Some of those that wait."""
        promotions: list[Promotion] = []
        num_rows = 0
        with self._lock:
            while self._waiting and len(promotions) < PROMOTIONS_AT_ONCE and num_rows < ROWS_AT_ONCE:
                promotions.append(self._waiting.popleft())
                num_rows += len(promotions[-1].keys)
            self._num_bytes -= sum(promotion.vectors.nbytes for promotion in promotions)
        return promotions

    def discard(self) -> None:
        """Drop all that wait."""
        while self.take():
            pass

    def keep(self, unverified: Sequence[UnverifiedPromotion]) -> None:
        """Keep promotions that were done until `take_unverified`."""
        with self._lock:
            self._unverified += unverified
            self._num_bytes += sum(one.promotion.vectors.nbytes for one in unverified)

    def take_unverified(self) -> list[UnverifiedPromotion]:
        """All that have been kept."""
        with self._lock:
            unverified, self._unverified = self._unverified, []
            self._num_bytes -= sum(one.promotion.vectors.nbytes for one in unverified)
        return unverified


class PendingTouches:
    """Touches that wait for their turn."""

    def __init__(self) -> None:
        self._touches: deque[Touch] = deque()
        self._num_keys = 0
        self._lock = threading.Lock()

    def put(self, touch: Touch) -> None:
        """Queue rows to be marked as used, unless too many wait already."""
        with self._lock:
            if self._num_keys <= MAX_PENDING_TOUCHES:
                self._touches.append(touch)
                self._num_keys += len(touch.keys)

    def take(self) -> list[Touch]:
        """Some of those that wait."""
        touches: list[Touch] = []
        num_keys = 0
        with self._lock:
            while self._touches and num_keys < ROWS_AT_ONCE:
                touches.append(self._touches.popleft())
                num_keys += len(touches[-1].keys)
            self._num_keys -= num_keys
        return touches


def merged(promotions: Sequence[Promotion]) -> list[Promotion]:
    """The same rows, merged where they go to the same place: a call of a store costs as much as a hundred rows."""
    ways: defaultdict[tuple[Tier, tuple[Tier, ...], str], list[Promotion]] = defaultdict(list)
    for part in promotions:
        ways[part.source, tuple(part.tiers), part.table].append(part)
    return [
        parts[0]._replace(
            keys=np.concatenate([part.keys for part in parts]), vectors=np.concatenate([part.vectors for part in parts])
        )
        for parts in ways.values()
    ]
