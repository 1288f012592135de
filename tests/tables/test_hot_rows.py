"""Which rows are hot: compared with plain counting, and by a model of the copies that follow traffic."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inference_session.tables.cuda.hot_rows import LEAST_SAMPLED, Copies, hot_keys, least_times

NUM_ROWS, NUM_SLOTS, NUM_SAMPLED = 200_000, 2_000, 1 << 16


@settings(max_examples=50, deadline=None)
@given(
    num_distinct=st.integers(1, 3000),
    copies=st.integers(1, 4000).flatmap(
        lambda slots: st.builds(Copies, st.just(slots), st.integers(0, slots), st.integers(0, 100_000))
    ),
    num_rows=st.integers(1, 10**7),
    seed=st.integers(0, 99),
)
def test_hot_keys_are_those_of_plain_counting(num_distinct: int, copies: Copies, num_rows: int, seed: int) -> None:
    """Sampled often enough, and more often than a copy is read unless there is room; the most sampled ones first."""
    sampled = (np.random.default_rng(seed).pareto(1.0, LEAST_SAMPLED) * 50).astype(np.int64) % num_distinct - 7
    counts = Counter(sampled.tolist())
    ordered = sorted(counts, key=lambda key: (-counts[key], key))
    room = max(int(copies.num_slots * 15 / 16) - copies.num_copies, 0)
    often = least_times(len(sampled) / num_rows)
    mean = copies.num_reads / copies.num_copies if copies.num_copies else math.inf
    expected = [k for i, k in enumerate(ordered) if counts[k] >= often and (i < room or counts[k] > mean)]
    if sum(counts[key] for key in expected) < len(sampled) / 32:
        expected = []
    assert hot_keys(sampled, num_rows, copies).tolist() == expected[: copies.num_slots]


def test_few_samples_say_nothing() -> None:
    """Though all of them are of one row."""
    sampled = np.zeros(LEAST_SAMPLED, np.int64)
    assert hot_keys(sampled, NUM_ROWS, Copies(10, 0, 0)).tolist() == [0]
    assert hot_keys(sampled[1:], NUM_ROWS, Copies(10, 0, 0)).tolist() == []


def test_the_first_copies_take_no_places_of_one_another() -> None:
    """They fill 15/16 of the slots, though more rows are hot."""
    sampled = np.arange(70).repeat(300)
    assert hot_keys(sampled, NUM_ROWS, Copies(62, 0, 0)).tolist() == [*range(58)]


@pytest.mark.parametrize("mean", [0.0, 1e-3, 0.01, 0.02, 0.1, 0.7, 3.0, 40.0, 99.0, 101.0, 3000.0])
def test_few_rows_are_hot_by_chance(mean: float) -> None:
    """The least number such that fewer than one sampled key in 64 is of a row sampled as often, if all are equal."""

    def share(times: int) -> float:
        fewer = (math.exp(n * math.log(mean) - mean - math.lgamma(n + 1)) if mean else not n for n in range(times - 1))
        return 1 - math.fsum(fewer)

    times = least_times(mean)
    assert times >= 2
    assert share(times) < 1 / 64
    assert times == 2 or share(times - 1) >= 1 / 64 or (mean > 100 and share(times) > 1 / 150)


def test_equally_cold_rows_are_not_hot() -> None:
    """However many are sampled."""
    rng = np.random.default_rng(0)
    for num_sampled in (LEAST_SAMPLED, 1 << 18, 1 << 20):
        assert len(hot_keys(rng.integers(0, NUM_ROWS, num_sampled), NUM_ROWS, Copies(NUM_SLOTS, 0, 0))) == 0


def test_copies_follow_traffic() -> None:
    """Those of skewed traffic are soon almost the best, and then stay; when other rows get hot, those take over."""
    rng = np.random.default_rng(1)
    uses = np.arange(1, NUM_ROWS + 1) ** -1.05
    uses /= uses.sum()
    is_copied = np.zeros(NUM_ROWS, bool)
    for _ in range(2):
        uses = rng.permutation(uses)
        best = np.sort(uses)[-NUM_SLOTS * 15 // 16 :].sum()
        for _ in range(8):
            copy_hot_rows(is_copied, uses, rng)
        assert uses[is_copied].sum() > 0.93 * best
        assert max(copy_hot_rows(is_copied, uses, rng) for _ in range(4)) < NUM_SLOTS // 50


def copy_hot_rows(is_copied: NDArray[np.bool_], uses: NDArray[np.float64], rng: np.random.Generator) -> int:
    """Sample look-ups of rows with these probabilities and copy hot rows, each in place of any other where all is full;
    returns how many.
    """
    others = np.where(is_copied, 0.0, uses)
    sampled = rng.choice(NUM_ROWS, NUM_SAMPLED, p=others / others.sum())
    num_reads = rng.poisson(NUM_SAMPLED * uses[is_copied].sum() / others.sum())
    hot = hot_keys(sampled, NUM_ROWS, Copies(NUM_SLOTS, int(is_copied.sum()), int(num_reads)))
    held = np.flatnonzero(is_copied)
    is_copied[rng.choice(held, max(len(held) + len(hot) - NUM_SLOTS, 0), replace=False)] = False
    is_copied[hot] = True
    return len(hot)
