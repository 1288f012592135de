"""Where the bags of a HugeCTR request lie, in one pass over its offsets, compiled by Numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from inference_session.kernels.machine_code import compiled

Int64s = NDArray[np.int64]
_SIGNATURE = "boolean(int32[::1], int64[::1], int64, int64, int64[::1], int64[::1])"


def _place_bags(
    offsets: NDArray[np.int32], slots: Int64s, num_samples: int, num_keys: int, begins: Int64s, ends: Int64s
) -> bool:
    """Fill in where each bag begins and ends in CATCOLUMN; whether the offsets are such that it can be said.

    offsets: per table a block of num_samples * slots[table] + 1; it begins with 0 and never falls, and the last ones
    add up to num_keys. begins, ends: [bags] by table, sample and slot.
    """
    num_tables = len(slots)
    block = 0
    for table in range(num_tables):
        last = block + num_samples * slots[table]
        if offsets[block] != 0:
            return False
        for i in range(block, last):
            if offsets[i + 1] < offsets[i]:
                return False
        block = last + 1
    position = 0
    for sample in range(num_samples):
        bag, block = 0, 0
        for table in range(num_tables):
            first = sample * slots[table]
            shift = position - offsets[block + first]
            for slot in range(first, first + slots[table]):
                begins[bag + slot] = offsets[block + slot] + shift
                ends[bag + slot] = offsets[block + slot + 1] + shift
            position = offsets[block + first + slots[table]] + shift
            bag += num_samples * slots[table]
            block += num_samples * slots[table] + 1
    return position == num_keys


place_bags = cast(
    "Callable[[Any, Int64s, int, int, Int64s, Int64s], bool]",
    compiled(_place_bags, _SIGNATURE, nogil=True),
)
