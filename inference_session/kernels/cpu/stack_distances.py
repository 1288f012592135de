"""What passes over millions of keys one by one: spatial sampling, and the stack distances of LRU."""

from __future__ import annotations

from typing import Any

import numpy as np

from inference_session.kernels.cpu.hash_index import hash_key
from inference_session.kernels.cpu.intrinsics import kernel

ALL_KEYS = 2**63
"""The threshold of `select_keys` that leaves nothing out."""
_SALT = np.uint64(0x9E3779B97F4A7C15)


@kernel
def _sampling_hash(key: Any) -> Any:
    """63 bits that say nothing of where a cache's index would put the key, in which a sample would else be lopsided."""
    return hash_key(np.uint64(key) ^ _SALT) >> np.uint64(1)


@kernel
def select_keys(keys: Any, threshold: Any, selected: Any) -> int:
    """Copy to `selected` the keys whose hash is below the threshold, uint64 up to ALL_KEYS; returns how many."""
    count = 0
    for key in keys:
        if _sampling_hash(key) < threshold:
            selected[count] = key
            count += 1
    return count


@kernel
def assign_groups(keys: Any, num_groups: int, groups: Any) -> None:
    """groups[i] receives the group, uint8, of keys[i]: independent of what `select_keys` selects."""
    for i in range(len(keys)):
        groups[i] = np.uint8(_sampling_hash(keys[i]) % np.uint64(num_groups))


@kernel
def count_stack_distances(previous: Any, latest: Any, histogram: Any) -> None:
    """Count how many other keys were used between two uses of a key, for all of them: LRU's stack distance, exactly.

    previous[i] is the position of the last use of the key at position i before it, -1: none. `latest`, zeros int32
    [n + 1], is a Fenwick tree over the positions that are the latest use of their key. histogram[d] is raised for each
    use at distance d. Takes n log n steps (Bennett and Kruskal's way of computing what Mattson defined).
    """
    num_keys = 0
    for i in range(len(previous)):
        last = previous[i]
        if last < 0:
            num_keys += 1
        else:
            histogram[num_keys - _num_up_to(latest, last)] += 1
            _add(latest, last, -1)
        _add(latest, i, 1)


@kernel
def _num_up_to(latest: Any, position: int) -> int:
    total = 0
    i = position + 1
    while i > 0:
        total += latest[i]
        i &= i - 1
    return total


@kernel
def _add(latest: Any, position: int, amount: int) -> None:
    i = position + 1
    while i < len(latest):
        latest[i] += amount
        i += i & -i
