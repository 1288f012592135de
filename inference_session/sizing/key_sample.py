"""A sample of the keys of a trace that keeps hit rates: all uses of some keys, none of the others.

Keys are chosen by a hash (spatial sampling; Waldspurger, Park, Garthwaite and Ahmad, "Efficient MRC construction with
SHARDS", FAST 2015). In a part `rate` of all keys, a cache of `rate` times as many rows has about the hit rate that the
whole cache has on the whole trace. The few hottest keys distort the sample, whether they are in it or not. This
is corrected: uses that the sample has too few or too many of count as hits of a cache of any size.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inference_session.kernels.cpu.stack_distances import ALL_KEYS, assign_groups, select_keys


class KeySample:
    """Uses of one table's keys, in their order: all of a trace, or where that is long, those of a sample of the keys.

    Takes a trace of any length in memory of about 16 bytes per `max_keys`.
    """

    def __init__(self, max_keys: int) -> None:
        """`max_keys`: the most uses that are kept; the sampled part of the keys is halved until they fit."""
        self.max_keys = max_keys
        self.num_keys = 0
        """Uses seen, sampled or not."""
        self._halvings = 0
        self._chunks: list[NDArray[np.int64]] = []
        self._num_kept = 0

    @property
    def rate(self) -> float:
        """The part of all keys that is sampled; 1.0: all of them, and everything derived is exact."""
        return 2.0**-self._halvings

    @property
    def keys(self) -> NDArray[np.int64]:
        """The uses sampled, in order: int64 [n]."""
        if len(self._chunks) != 1:
            self._chunks = [np.concatenate(self._chunks) if self._chunks else np.empty(0, np.int64)]
        return self._chunks[0]

    def add(self, keys: NDArray[np.int64]) -> None:
        """Add the next keys of the trace, int64 [n]."""
        self.add_sampled(keys, len(keys), self._halvings)

    def add_sampled(self, keys: NDArray[np.int64], num_keys: int, halvings: int) -> None:
        """Add the next part of the trace, `num_keys` long, of which `keys` [n] have been sampled at 2**-halvings."""
        self.num_keys += num_keys
        if halvings > self._halvings:
            self.thin(halvings)
        selected = keys.copy() if self._halvings == 0 else sampled_keys(keys, self._halvings)
        self._chunks.append(selected)
        self._num_kept += len(selected)
        while self._num_kept > self.max_keys:
            self.thin(self._halvings + 1)

    def thin(self, halvings: int) -> None:
        """Lower the rate to 2**-halvings."""
        self._halvings = halvings
        self._chunks = [sampled_keys(self.keys, halvings)]
        self._num_kept = len(self._chunks[0])

    def parts(self, num_parts: int) -> list[NDArray[np.int64]]:
        """The uses, [n] each, divided by key into this many separate samples, each at `rate` / num_parts."""
        groups = np.empty(len(self.keys), np.uint8)
        assign_groups(self.keys, num_parts, groups)
        return [self.keys[groups == part] for part in range(num_parts)]


def sampled_keys(keys: NDArray[np.int64], halvings: int) -> NDArray[np.int64]:
    """The keys, int64 [n], that belong to a sample at 2**-halvings."""
    selected = np.empty(len(keys), np.int64)
    threshold = np.uint64(ALL_KEYS >> halvings)
    count = int(select_keys(np.ascontiguousarray(keys), threshold, selected))
    kept: NDArray[np.int64] = selected[:count].copy()
    return kept
