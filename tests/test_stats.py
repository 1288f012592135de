"""Statistics of several contents of one version, added up."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from inference_session.kernels.records import SEGMENT, Lookup
from inference_session.stats import SessionStats, added, gauge
from tests.testing.staged_model import SPEC, TABLES


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


def test_batches_that_compiled_code_counts_add_up_in_all_threads() -> None:
    """Also where the counts of unknown keys are not next to each other, and with batches that Python counts."""
    stats = SessionStats(SPEC)
    segments = np.zeros(3, SEGMENT)
    segments["table"] = 2, 0, 2
    unknown = np.arange(6, dtype=np.int64).reshape(3, 2)[:, 1]
    lookup = Lookup(segments, np.array([10, 20, 30]), unknown)

    def count(_number: int) -> None:
        for _ in range(100):
            stats.count_staged(7, *lookup.find_places(), 2)
        stats.count_keys(segments["table"], lookup.num_keys, unknown)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(count, range(4)))
    counts = stats.snapshot()
    assert (counts.requests, counts.batches, counts.samples) == (800, 400, 2800)
    keys = [(counts.tables[table.folder].lookup_keys, counts.tables[table.folder].default_vectors) for table in TABLES]
    assert keys == [(404 * 20, 404 * 3), (0, 0), (404 * 40, 404 * 6), (0, 0), (0, 0)]
    assert stats.num_looked_up() == 404 * 60
