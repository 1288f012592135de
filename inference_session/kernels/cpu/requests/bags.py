"""Where the bags of a HugeCTR request lie, in one pass over its offsets, compiled by Numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from inference_session.kernels.cpu.intrinsics import kernel, load, store
from inference_session.kernels.records import address_of


@kernel
def place_bags(offsets: int, slots: Any, num_samples: int, num_keys: int, begins: int, ends: int) -> Any:
    """Fill in where each bag begins and ends in CATCOLUMN; returns whether the offsets allow it.

    Args:
        offsets: address of int32 values that nothing else changes: per table num_samples * slots[table] + 1 of them,
            which must begin with 0 and never fall; the last ones must add up to num_keys.
        slots: int64 [tables].
        num_samples: in the request.
        num_keys: in CATCOLUMN.
        begins: address of int64 [bags], which receives positions, by table, sample and slot.
        ends: the same.
    """
    if not _are_ascending(offsets, slots, num_samples):
        return False
    position = np.int64(0)
    for sample in range(num_samples):
        bag, block = 0, 0
        for table in range(len(slots)):
            first = sample * slots[table]
            shift = position - load(offsets, np.int32, block + first)
            for slot in range(first, first + slots[table]):
                store(begins, np.int64, bag + slot, load(offsets, np.int32, block + slot) + shift)
                store(ends, np.int64, bag + slot, load(offsets, np.int32, block + slot + 1) + shift)
            position = load(offsets, np.int32, block + first + slots[table]) + shift
            bag += num_samples * slots[table]
            block += num_samples * slots[table] + 1
    return position == num_keys


@kernel
def _are_ascending(offsets: int, slots: Any, num_samples: int) -> Any:
    """Whether the offsets of each table begin with 0 and never fall."""
    block = 0
    for table in range(len(slots)):
        last = block + num_samples * slots[table]
        if load(offsets, np.int32, block) != 0:
            return False
        for i in range(block, last):
            if load(offsets, np.int32, i + 1) < load(offsets, np.int32, i):
                return False
        block = last + 1
    return True


@kernel
def have_one_key_each(offsets: int, slots: Any, num_samples: int) -> Any:
    """Whether the offsets say that each slot of each sample has one key; arguments are those of `place_bags`."""
    block = 0
    for table in range(len(slots)):
        num_offsets, differs = num_samples * slots[table] + 1, np.int64(0)
        for i in range(num_offsets):
            differs |= np.int64(load(offsets, np.int32, block + i)) ^ i
        if differs != 0:
            return False
        block += num_offsets
    return True


def compile_kernels() -> None:
    """Compile all kernels, or load them from Numba's cache, so that no request waits for a compiler."""
    offsets, positions = np.zeros(1, np.int32), np.zeros(1, np.int64)
    have_one_key_each(address_of(offsets), np.ones(1, np.int64), 0)
    place_bags(address_of(offsets), np.ones(1, np.int64), 0, 0, address_of(positions), address_of(positions))
