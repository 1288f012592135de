"""Hit rate against cache size, from the keys of a trace: exactly, or from a sample of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inference_session.embedding_cache.cpu import count_hits
from inference_session.kernels.cpu.stack_distances import count_stack_distances
from inference_session.sizing.key_sample import KeySample

_ROUND_SIZES = (10, 15, 20, 30, 50, 70)
"""The cache sizes of every decade that are simulated; hit rates in between are interpolated."""
_SMALLEST_PART = 2000
"""The smallest simulated cache holds one row in this many."""
_LEAST_SAMPLED_ROWS = 64
"""A simulated cache of fewer rows than this says little about one that is larger by the rate of the sample."""
_ERROR_PARTS = 8
_NUM_ERROR_SIZES = 64


class HitRateCurve(Protocol):
    """The hit rate of one table's cache on its trace, by size."""

    def hit_rate(self, rows: float) -> float:
        """The hit rate of a cache of this many rows, 0 to 1."""


class LruCurve:
    """The hit rate of every size of a cache that evicts the least recently used row."""

    def __init__(self, keys: NDArray[np.int64], *, rate: float = 1.0, num_keys: int | None = None) -> None:
        """Compute the curve of a trace, or from a sample of one.

        Args:
            keys: int64 [n] in their order.
            rate: the part of all keys that is in the sample.
            num_keys: length of the trace that was sampled; None: `keys` is the whole trace.
        """
        previous = _previous_uses(keys)
        self.num_distinct = round(np.count_nonzero(previous < 0) / rate)
        """Keys of the trace, each once."""
        histogram = np.zeros(np.count_nonzero(previous < 0) + 1, np.int64)
        count_stack_distances(previous, np.zeros(len(keys) + 1, np.int32), histogram)
        self._rate = rate
        self._hits = np.concatenate([[0], np.cumsum(histogram)])
        self._scale = _Scale.of(len(keys), rate, num_keys)

    @classmethod
    def of_sample(cls, sample: KeySample) -> LruCurve:
        """The curve of the trace that was sampled."""
        return cls(sample.keys, rate=sample.rate, num_keys=sample.num_keys)

    def hit_rate(self, rows: float) -> float:
        """See HitRateCurve. Exact where the rate is 1."""
        row = min(int(rows * self._rate), len(self._hits) - 1)
        return self._scale.hit_rate(int(self._hits[row]), rows)


class SimulatedCurve:
    """The hit rate of our own cache, simulated on the keys at several sizes."""

    def __init__(self, rows: NDArray[np.float64], hit_rates: NDArray[np.float64]) -> None:
        """Sizes, ascending from 0, and the hit rate of each; both [n]."""
        self.rows = rows
        self.hit_rates = hit_rates

    @classmethod
    def of_sample(
        cls, sample: KeySample, num_distinct: int, progress: Callable[[int], None] = lambda _: None
    ) -> SimulatedCurve:
        """Simulate; `progress` gets the keys done since the last call, `num_simulated_keys` in all.

        `num_distinct`: keys of the trace, each once.
        """
        sizes = _simulated_sizes(num_distinct, sample.rate)
        scale = _Scale.of(len(sample.keys), sample.rate, sample.num_keys)
        hit_rates = [0.0]
        for rows in sizes.tolist():
            hits = count_hits(sample.keys, capacity=max(round(rows * sample.rate), 1))
            hit_rates.append(scale.hit_rate(hits, rows))
            progress(len(sample.keys))
        # By chance, more rows may serve a few keys worse; a curve that falls would confuse readers.
        return cls(np.concatenate([[0.0], sizes]), np.maximum.accumulate(hit_rates))

    def hit_rate(self, rows: float) -> float:
        """See HitRateCurve. Interpolated over the logarithm of the size."""
        logs = np.log1p(self.rows)
        return float(np.interp(math.log1p(rows), logs, self.hit_rates))


def num_simulated_keys(sample: KeySample, num_distinct: int) -> int:
    """Keys that `SimulatedCurve.of_sample` goes through in all."""
    return len(_simulated_sizes(num_distinct, sample.rate)) * len(sample.keys)


class SamplingError:
    """How far hit rates that come from a sample may be off, by cache size: two standard errors.

    Estimated from the sample itself: it is divided by key into parts, whose curves differ as samples of that size do.
    """

    def __init__(self, rows: NDArray[np.float64], errors: NDArray[np.float64]) -> None:
        """Sizes, ascending, and the error at each; both [n]."""
        self.rows = rows
        self.errors = errors

    @classmethod
    def of_sample(cls, sample: KeySample) -> SamplingError:
        """Estimate; the error is 0 where the sample is the whole trace."""
        if sample.rate == 1:
            return cls(np.zeros(1), np.zeros(1))
        rate = sample.rate / _ERROR_PARTS
        curves = [LruCurve(keys, rate=rate, num_keys=sample.num_keys) for keys in sample.parts(_ERROR_PARTS)]
        least = _LEAST_SAMPLED_ROWS / sample.rate
        most = max(least, *(curve.num_distinct for curve in curves))
        rows = np.geomspace(least, most, _NUM_ERROR_SIZES)
        hit_rates = np.array([[curve.hit_rate(size) for size in rows.tolist()] for curve in curves])
        return cls(rows, 2 * hit_rates.std(axis=0, ddof=1) / math.sqrt(_ERROR_PARTS))

    def at(self, rows: float) -> float:
        """The error of the hit rate of a cache of this many rows."""
        return float(np.interp(rows, self.rows, self.errors))


class _Scale:
    """Converts hits counted in a sample to the hit rate of the trace."""

    def __init__(self, num_expected: float, num_surplus: float) -> None:
        self._num_expected = num_expected
        self._num_surplus = num_surplus

    @classmethod
    def of(cls, num_sampled: int, rate: float, num_keys: int | None) -> _Scale:
        """`num_keys`: length of the whole trace. Computes a fair sample's uses, and how many are missing.

        Whether the hottest keys were sampled decides nearly all of that difference, and they are always hits.
        """
        expected = (num_sampled if num_keys is None else num_keys) * rate
        return cls(expected, expected - num_sampled)

    def hit_rate(self, hits: int, rows: float) -> float:
        if rows < 1 or self._num_expected <= 0:
            return 0.0
        return min(max((hits + self._num_surplus) / self._num_expected, 0.0), 1.0)


def _previous_uses(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """[n]: the position of the previous use of the key at each position, -1 where none exists."""
    previous = np.full(len(keys), -1, np.int64)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    again = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1
    previous[order[again]] = order[again - 1]
    return previous


def _simulated_sizes(num_distinct: int, rate: float) -> NDArray[np.float64]:
    """Round numbers of rows up to the number of all keys."""
    most = max(num_distinct, 1)
    least = max(most / _SMALLEST_PART, 1, _LEAST_SAMPLED_ROWS / rate if rate < 1 else 1)
    sizes = [size * 10.0**decade for decade in range(-1, 13) for size in _ROUND_SIZES]
    return np.unique([*(size for size in sizes if least <= size < most and size.is_integer()), float(most)])
