"""Statistics of several contents of one version, added up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inference_session.stats import added, gauge


@dataclass(frozen=True)
class Inner:
    """Statistics of one table."""

    hits: int
    rows: int = gauge()


@dataclass(frozen=True)
class Outer:
    """All statistics."""

    requests: int
    load_s: float
    failure: str | None
    reasons: Mapping[str, int]
    tables: Mapping[str, Inner]
    cache: Inner | None


def test_counters_add_up_and_all_else_is_the_later_ones() -> None:
    """Also those of tables, by name; numbers that only the later one has are unchanged."""
    earlier = Outer(3, 1.5, "down", {"bad": 2}, {"a": Inner(10, 100), "gone": Inner(1, 1)}, Inner(5, 50))
    later = Outer(4, 0.5, None, {"bad": 1, "new": 7}, {"a": Inner(20, 40), "b": Inner(2, 3)}, Inner(6, 60))
    assert added(earlier, later) == Outer(
        7, 0.5, None, {"bad": 3, "new": 7}, {"a": Inner(30, 40), "b": Inner(2, 3)}, Inner(11, 60)
    )


def test_a_part_that_was_not_there_before_counts_from_nothing() -> None:
    """As a cache, where only the later content has one."""
    earlier = Outer(1, 0.0, None, {}, {}, None)
    later = Outer(1, 0.0, None, {}, {}, Inner(6, 60))
    assert added(earlier, later).cache == Inner(6, 60)
    assert added(later, earlier).cache is None
