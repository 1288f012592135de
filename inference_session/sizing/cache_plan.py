"""The hit rate of a whole model's cache by its bytes, and how many bytes are worth their cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from inference_session.embedding_cache.cpu_budget import bytes_to_hold, rows_held
from inference_session.sizing.hit_rate import HitRateCurve

_KIB, _MIB = 1 << 10, 1 << 20
_NUM_KNEE_POINTS = 256
_SMALLEST_PART = 1000
"""The smallest cache of interest holds one byte in this many."""


class CachePoint(NamedTuple):
    """A size of the cache, and its hit rate on the trace."""

    cache_bytes: int
    hit_rate: float


@dataclass(frozen=True)
class TracedTable:
    """The trace of one table."""

    num_keys: int
    num_distinct: int
    least_rows: int
    """The curve says little about caches with fewer rows."""
    curve: HitRateCurve


class CachePlan:
    """Hit rates of caches of different sizes for a model on a trace. Tables without a trace still take up room."""

    def __init__(self, dims: Mapping[str, int], num_rows: Mapping[str, int], traced: Mapping[str, TracedTable]) -> None:
        """Tables by folder: embedding_dim and rows of all of them, and at least one that has been traced."""
        self._dims = dims
        self._num_rows = num_rows
        self._traced = traced
        self._num_keys = sum(table.num_keys for table in traced.values())
        useful = max(table.num_distinct for table in traced.values())
        self.least_bytes = bytes_to_hold(dims, dict.fromkeys(dims, 1))
        """One row of each table."""
        self.most_bytes = bytes_to_hold(dims, {table: min(rows, useful) for table, rows in num_rows.items()})
        """Enough for every key of the trace."""

    def hit_rate(self, cache_bytes: int) -> float:
        """The fraction of the trace's keys that hit, 0 to 1."""
        if cache_bytes < self.least_bytes or not self._num_keys:
            return 0.0
        rows = rows_held(self._dims, cache_bytes, self._num_rows)
        hits = sum(traced.num_keys * traced.curve.hit_rate(rows[table]) for table, traced in self._traced.items())
        return hits / self._num_keys

    @property
    def best_hit_rate(self) -> float:
        """The hit rate with every row in the cache: only the first use of each key is a miss."""
        return self.hit_rate(self.most_bytes)

    def points(self, num_points: int) -> list[CachePoint]:
        """The hit rate at this many sizes, up to the largest useful one, evenly on a logarithmic scale."""
        least_rows = max(table.least_rows for table in self._traced.values())
        told = bytes_to_hold(self._dims, {table: min(rows, least_rows) for table, rows in self._num_rows.items()})
        least = min(max(told, self.most_bytes // _SMALLEST_PART), self.most_bytes)
        sizes = np.unique(np.geomspace(least, self.most_bytes, num_points).astype(np.int64))
        return [CachePoint(size, self.hit_rate(size)) for size in sizes.tolist()]

    def recommended(self, target: float) -> CachePoint:
        """The smallest cache with `target` of the best hit rate that any could have, rounded up to KiB or MiB."""
        wanted = target * self.best_hit_rate
        low, high = self.least_bytes, self.most_bytes
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.hit_rate(middle) >= wanted else (middle + 1, high)
        step = _MIB if low >= 16 * _MIB else _KIB
        cache_bytes = -(-low // step) * step
        return CachePoint(cache_bytes, self.hit_rate(cache_bytes))

    def knee(self) -> CachePoint:
        """The point where the curve bends most: above it a byte adds less than the average byte does, below it more.

        The point that is farthest above the straight line from no cache to a cache of all rows.
        """
        points = self.points(_NUM_KNEE_POINTS)
        best = max(self.best_hit_rate, np.finfo(float).tiny)
        return max(points, key=lambda point: point.hit_rate / best - point.cache_bytes / self.most_bytes)
