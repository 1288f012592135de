"""The queue of the background work is bounded, and handed out in pieces."""

from __future__ import annotations

import numpy as np
import pytest

from inference_session.parameter_server.promotions import (
    PendingPromotions,
    PendingTouches,
    Promotion,
    Touch,
    UnverifiedPromotion,
    merged,
)
from inference_session.parameter_server.tier import Tier
from tests.testing.memory_store import MemoryStore

DIM = 4


@pytest.fixture
def tiers() -> tuple[Tier, Tier]:
    """One to promote to, and one to promote from."""
    upper, lower = (Tier(name, MemoryStore({"t": DIM})) for name in ("upper", "lower"))
    return upper, lower


def promotion(tiers: tuple[Tier, Tier], num_rows: int, first: int = 0) -> Promotion:
    """Rows whose elements are their keys."""
    keys = np.arange(first, first + num_rows)
    vectors = np.repeat(keys[:, None], DIM, axis=1).astype(np.float32)
    return Promotion(tiers[1], [tiers[0]], "t", keys, vectors, 0)


def test_rows_beyond_the_bound_are_dropped_and_counted(
    tiers: tuple[Tier, Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room again once rows are taken."""
    monkeypatch.setattr("inference_session.parameter_server.promotions.MAX_PENDING_BYTES", 4 * DIM * 10)
    promotions = PendingPromotions()

    for _ in range(4):
        promotions.put(promotion(tiers, 6))

    assert promotions.num_dropped == 12
    promotions.take()
    promotions.put(promotion(tiers, 6))
    assert promotions.num_dropped == 12
    promotions.discard()
    assert not promotions.any_wait


def test_what_is_to_be_verified_counts_as_waiting(tiers: tuple[Tier, Tier], monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that lags for long must not fill the memory."""
    monkeypatch.setattr("inference_session.parameter_server.promotions.MAX_PENDING_BYTES", 4 * DIM * 10)
    promotions = PendingPromotions()

    promotions.keep([UnverifiedPromotion(tiers[0], promotion(tiers, 11), 0)])
    promotions.put(promotion(tiers, 1))
    assert promotions.num_dropped == 1

    assert [len(one.promotion.keys) for one in promotions.take_unverified()] == [11]
    assert promotions.take_unverified() == []
    promotions.put(promotion(tiers, 1))
    assert promotions.num_dropped == 1


def test_work_is_handed_out_in_pieces(tiers: tuple[Tier, Tier], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of few rows, in the order in which they came, none of them twice."""
    monkeypatch.setattr("inference_session.parameter_server.promotions.ROWS_AT_ONCE", 10)
    promotions, touches = PendingPromotions(), PendingTouches()
    for first in range(0, 30, 6):
        promotions.put(promotion(tiers, 6, first))
        touches.put(Touch(tiers[1], "t", np.arange(first, first + 6), 0))

    pieces = [[int(part.keys[0]) for part in promotions.take()] for _ in range(4)]
    assert pieces == [[0, 6], [12, 18], [24], []]
    assert [[int(part.keys[0]) for part in touches.take()] for _ in range(4)] == pieces


def test_rows_that_go_the_same_way_go_together(tiers: tuple[Tier, Tier]) -> None:
    """And those of another table or to other tiers apart."""
    parts = [promotion(tiers, 2), promotion(tiers, 3, 2), promotion(tiers, 1)._replace(table="u")]

    first, second = merged(parts)
    assert (first.table, first.keys.tolist(), second.table) == ("t", [0, 1, 2, 3, 4], "u")
    np.testing.assert_array_equal(first.vectors[:, 0], first.keys)


def test_promoted_rows_are_compared_bit_by_bit(tiers: tuple[Tier, Tier]) -> None:
    """A row that has changed or gone where it came from is not current; NaN is, if it is the same."""
    promoted = promotion(tiers, 4)
    promoted.vectors[3] = np.nan
    tiers[1].store.insert("t", promoted.keys, promoted.vectors)
    tiers[1].store.insert("t", np.array([1]), np.full((1, DIM), 9, np.float32))
    tiers[1].store.erase("t", np.array([2]))

    assert promoted.are_current().tolist() == [True, False, False, True]
    assert promoted.are_replaced_in(tiers[1]).tolist() == [False, True, False, False]
