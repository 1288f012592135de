"""Hit rates from traces: exact for LRU, the real cache's for ours, and near both from a sample."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from inference_session.embedding_cache.cpu import CpuEmbeddingCache, count_hits
from inference_session.embedding_cache.cpu_budget import bytes_to_hold, rows_held
from inference_session.sizing.cache_plan import CachePlan, TracedTable
from inference_session.sizing.hit_rate import LruCurve, SamplingError, SimulatedCurve
from inference_session.sizing.key_sample import KeySample
from tests.testing.cache_lookups import look_up
from tests.testing.traces import generated_trace, real_trace

_KEYS = st.lists(st.integers(-3, 12) | st.sampled_from([2**63 - 1, -(2**63)]), max_size=200)


def _lru_hits(keys: NDArray[np.int64], capacity: int) -> int:
    """The number of hits of a plain LRU cache of this many rows."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for key in keys.tolist():
        hits += key in cached
        cached[key] = None
        cached.move_to_end(key)
        if len(cached) > capacity:
            cached.popitem(last=False)
    return hits


def _sampled(keys: NDArray[np.int64], max_keys: int, step: int = 1000) -> KeySample:
    sample = KeySample(max_keys)
    for begin in range(0, len(keys), step):
        sample.add(keys[begin : begin + step])
    return sample


@pytest.fixture(scope="module")
def trace() -> NDArray[np.int64]:
    """Keys as a recommender is asked for them."""
    return generated_trace()


@given(_KEYS, st.integers(0, 20))
def test_lru_is_exact_at_every_size(keys: list[int], capacity: int) -> None:
    """The curve says what a cache that is run over the keys does."""
    array = np.array(keys, np.int64)

    curve = LruCurve(array)

    assert curve.hit_rate(capacity) == (_lru_hits(array, capacity) / len(keys) if keys else 0)
    assert curve.num_distinct == len(set(keys))


@pytest.mark.parametrize("rows", [1_000, 10_000, 50_000])
def test_lru_is_exact_on_a_long_trace(trace: NDArray[np.int64], rows: int) -> None:
    """A plain simulation's hit rate to the last digit."""
    assert LruCurve(trace).hit_rate(rows) == _lru_hits(trace, rows) / len(trace)


@pytest.mark.real_data
@pytest.mark.parametrize(("rows", "expected"), [(1_000, 0.270), (10_000, 0.486), (50_000, 0.691)])
def test_lru_is_exact_on_a_real_trace(real_data: Path, rows: int, expected: float) -> None:
    """Known hit rates, and a plain simulation's to the last digit."""
    keys = real_trace(real_data)
    hit_rate = LruCurve(keys).hit_rate(rows)

    assert hit_rate == _lru_hits(keys, rows) / len(keys)
    assert round(hit_rate, 3) == expected


@given(_KEYS, st.integers(1, 20))
def test_ours_is_what_the_cache_does(keys: list[int], capacity: int) -> None:
    """The simulation has the hits of a CpuEmbeddingCache that is given each missing row at once."""
    array = np.array(keys, np.int64)
    with CpuEmbeddingCache({"t": 1}, bytes_to_hold({"t": 1}, {"t": capacity})) as cache:
        hits = 0
        for key in array:
            missing = look_up(cache, {"t": np.array([key])}).missing["t"]
            hits += 1 - len(missing)
            if len(missing):
                cache.insert("t", [key], [[0.0]])

    assert count_hits(array, capacity=capacity) == hits


def test_ours_ends_at_the_best_possible(trace: NDArray[np.int64]) -> None:
    """With room for all keys only first uses are misses; in between ours is not far below LRU anywhere."""
    sample = _sampled(trace, len(trace), step=100_000)
    lru = LruCurve.of_sample(sample)
    ours = SimulatedCurve.of_sample(sample, lru.num_distinct)

    # A full bucket of the index costs a row now and then.
    assert lru.hit_rate(lru.num_distinct) - ours.hit_rate(lru.num_distinct) < 0.001
    assert all(ours.hit_rate(rows) > lru.hit_rate(rows) - 0.01 for rows in ours.rows.tolist())


@pytest.mark.parametrize("max_keys", [200_000, 50_000])
def test_a_sample_is_within_its_stated_error(trace: NDArray[np.int64], max_keys: int) -> None:
    """Both curves of a sample are as close to those of the whole trace as documented."""
    whole = LruCurve(trace)
    sample = _sampled(trace, max_keys, step=100_000)
    lru, error = LruCurve.of_sample(sample), SamplingError.of_sample(sample)
    ours = SimulatedCurve.of_sample(sample, lru.num_distinct)

    assert len(sample.keys) <= max_keys
    assert sample.rate < 1
    assert 0 < error.errors.max() < 0.1
    for rows in ours.rows[1:-1].astype(int).tolist():
        assert abs(lru.hit_rate(rows) - whole.hit_rate(rows)) <= error.at(rows)
        assert abs(ours.hit_rate(rows) - _ours(trace, rows)) <= error.at(rows) + 0.01


def _ours(keys: NDArray[np.int64], rows: int) -> float:
    return count_hits(keys, capacity=rows) / len(keys)


@given(st.lists(st.integers(0, 50), max_size=300), st.integers(1, 60), st.integers(1, 100))
def test_a_sample_has_all_uses_of_its_keys(keys: list[int], max_keys: int, step: int) -> None:
    """It keeps the trace's order and its bound, whatever the pieces that it came in."""
    array = np.array(keys, np.int64)

    sample = _sampled(array, max_keys, step)

    kept = set(sample.keys.tolist())
    assert sample.keys.tolist() == [key for key in keys if key in kept]
    assert len(sample.keys) <= max_keys
    assert sample.num_keys == len(keys)
    assert np.concatenate(sample.parts(3)).size == len(sample.keys)


def test_one_key_in_a_long_trace() -> None:
    """A sample that a single key would overfill is still bounded, and its hit rate right."""
    sample = _sampled(np.zeros(10_000, np.int64), 100)

    assert len(sample.keys) <= 100
    assert LruCurve.of_sample(sample).hit_rate(1) > 0.99


def test_no_keys() -> None:
    """An empty trace has no hits."""
    assert LruCurve(np.empty(0, np.int64)).hit_rate(5) == 0


def _plan(*tables: NDArray[np.int64]) -> CachePlan:
    samples = {f"t{i}": _sampled(keys, len(keys) + 1) for i, keys in enumerate(tables)}
    curves = {name: LruCurve.of_sample(sample) for name, sample in samples.items()}
    traced = {name: TracedTable(samples[name].num_keys, curve.num_distinct, 1, curve) for name, curve in curves.items()}
    dims = {**dict.fromkeys(samples, 16), "untraced": 8}
    return CachePlan(dims, dict.fromkeys(dims, 10_000), traced)


def test_the_recommendation_is_the_smallest_that_reaches_the_target() -> None:
    """Any smaller size misses the target, except for rounding."""
    rng = np.random.default_rng(0)
    plan = _plan(rng.zipf(1.3, 20_000) % 5000, rng.zipf(1.6, 10_000) % 300)

    chosen = plan.recommended(0.9)

    assert chosen.hit_rate == plan.hit_rate(chosen.cache_bytes) >= 0.9 * plan.best_hit_rate
    assert plan.hit_rate(chosen.cache_bytes - 1024) < 0.9 * plan.best_hit_rate
    assert plan.best_hit_rate == plan.hit_rate(2 * plan.most_bytes)


def test_the_knee_is_where_the_curve_bends() -> None:
    """Half of the uses go to a hundred keys, the rest to keys that never come again: the knee is near the hundred."""
    rng = np.random.default_rng(0)
    keys = np.where(rng.random(20_000) < 0.5, rng.integers(0, 100, 20_000), np.arange(20_000) % 9_000 + 1_000)
    plan = _plan(keys)

    held = rows_held({"t0": 16, "untraced": 8}, plan.knee().cache_bytes)["t0"]

    assert 100 <= held <= 800


def test_a_cache_too_small_for_a_row_has_no_hits() -> None:
    """Sizes that the cache itself would refuse are worth nothing."""
    assert _plan(np.zeros(10, np.int64)).hit_rate(10) == 0
