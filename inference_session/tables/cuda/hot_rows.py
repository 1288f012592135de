"""Which rows of other GPUs are hot: worth a copy on the GPU that reads them, by samples of what look-ups read."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LEAST_SAMPLED = 1 << 14
"""With fewer sampled keys, it is not known which are hot."""
_SHARE_BY_CHANCE = 1 / 64
"""Of the sampled keys, those that would be taken for hot if all rows were equally hot."""
_LARGE_MEAN, _DEVIATIONS = 100.0, 2.3
"""At this many standard deviations above the mean, less than `_SHARE_BY_CHANCE` is left."""
_LEAST_SHARE = 1 / 32
"""The least share of hot rows among sampled keys for copies to gain something."""
_FULL = 15 / 16
"""The share of slots in use from which on a copy takes the place of another one: keys share buckets at random."""


class Copies(NamedTuple):
    """The copies that there are, and their use."""

    num_slots: int
    num_copies: int
    num_reads: int
    """By samples, over the time in which the keys of rows without a copy were sampled, and at the same rate."""


def hot_keys(sampled: NDArray[np.int64], num_rows: int, copies: Copies) -> NDArray[np.int64]:
    """Keys whose rows are to be copied, the hottest first.

    A row is hot if it was sampled more often than it would be by chance. While there is room, hot rows are copied;
    later only those that were sampled more often than copies are read on average: they gain whichever copy gives way.

    Args:
        sampled: int64 [n], keys of rows that were read from other GPUs, as often as they were sampled.
        num_rows: how many rows other GPUs have.
        copies: what there is.
    """
    none = np.empty(0, np.int64)
    if len(sampled) < LEAST_SAMPLED:
        return none
    distinct, counts = np.unique(sampled, return_counts=True)
    hottest = np.argsort(-counts, kind="stable")
    keys, counts = distinct[hottest], counts[hottest]
    mean_reads = copies.num_reads / copies.num_copies if copies.num_copies else math.inf
    gains = counts > mean_reads
    gains[: max(int(_FULL * copies.num_slots) - copies.num_copies, 0)] = True
    is_hot = gains & (counts >= least_times(len(sampled) / num_rows))
    if counts[is_hot].sum() < _LEAST_SHARE * len(sampled):
        return none
    hot: NDArray[np.int64] = keys[is_hot]
    return hot[: copies.num_slots]


def least_times(mean: float) -> int:
    """How often a row is sampled, at least, that is taken for hot.

    `mean`: how often each row would be sampled on average if all were equally hot. These numbers would follow a Poisson
    distribution, and so would those of other samples of the row of a sampled key.
    """
    if mean > _LARGE_MEAN:  # nearly a normal distribution; exp(-mean) is 0 in the end
        return int(mean + _DEVIATIONS * math.sqrt(mean)) + 2
    others, probability = 0, math.exp(-mean)
    share = 1.0 - probability  # of sampled keys whose rows have more other samples than this
    while share >= _SHARE_BY_CHANCE:
        others += 1
        probability *= mean / others
        share -= probability
    return others + 2
