"""Samples of DLRM-DCNv2 as MLPerf asks them: a sample is one user with 100 to 700 items, hence as many pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mlperf_model import Arrays, random_pairs
from numpy.typing import NDArray

FEWEST_PAIRS, MEAN_PAIRS, MOST_PAIRS = 100, 270, 700
_PAIRS_PER_DRAW = 1 << 16


class Samples:
    """Random samples, each a run of pairs in one pool. Pairs of several samples are gathered into one batch."""

    def __init__(self, rows: Sequence[int], num_samples: int, num_pairs: int, *, seed: int = 0) -> None:
        """`num_pairs`: of the pool, which samples may share."""
        rng = np.random.default_rng(seed)
        spread = MOST_PAIRS - FEWEST_PAIRS
        mean = (MEAN_PAIRS - FEWEST_PAIRS) / spread
        self.counts = FEWEST_PAIRS + np.rint(spread * rng.beta(1.2, 1.2 * (1 / mean - 1), num_samples)).astype(np.int64)
        num_pairs = max(num_pairs, MOST_PAIRS)
        self.begins = rng.integers(0, num_pairs - self.counts + 1)
        draws = [
            random_pairs(rng, min(_PAIRS_PER_DRAW, num_pairs - i), rows) for i in range(0, num_pairs, _PAIRS_PER_DRAW)
        ]
        self.pool: Arrays = {name: np.concatenate([draw[name] for draw in draws]) for name in draws[0]}
        self._take: Any = np

    def __len__(self) -> int:
        return len(self.counts)

    def move_to_device(self) -> None:
        """Have the pool, and the batches gathered from it, in the memory of CuPy's current device."""
        import cupy

        self._take = cupy
        self.pool = {name: cupy.asarray(array) for name, array in self.pool.items()}

    def pairs_of(self, samples: Sequence[int]) -> Arrays:
        """The concatenated inputs of these samples."""
        if len(samples) == 1:
            begin = int(self.begins[samples[0]])
            return {name: array[begin : begin + int(self.counts[samples[0]])] for name, array in self.pool.items()}
        counts = self.counts[samples]
        ends = np.cumsum(counts)
        places = np.arange(ends[-1]) + np.repeat(self.begins[samples] - ends + counts, counts)
        places = self._take.asarray(places)
        return {name: self._take.take(array, places, axis=0) for name, array in self.pool.items()}

    def batches(self, samples: NDArray[np.int64], most_pairs: int) -> list[NDArray[np.int64]]:
        """Samples in batches of at most this many pairs, at least one sample each."""
        ends = np.cumsum(self.counts[samples])
        batches, begin = [], 0
        while begin < len(samples):
            before = ends[begin - 1] if begin else 0
            end = max(begin + 1, int(np.searchsorted(ends, before + most_pairs, "right")))
            batches.append(samples[begin:end])
            begin = end
        return batches
