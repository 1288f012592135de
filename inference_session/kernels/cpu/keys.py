"""The keys of a request: copied out of wherever they lie, and counted."""

from __future__ import annotations

from typing import Any

import numpy as np

from inference_session.kernels.cpu.intrinsics import kernel, kernel_with_gil, load, store
from inference_session.kernels.cpu.rows import bag_length, keys_of_row, load_key
from inference_session.kernels.records import SEGMENT

BATCH_COUNTS = 3
"""Counts of batches before those of tables."""
_SEGMENT_BYTES, _TABLE = SEGMENT.itemsize, SEGMENT.fields["table"][1]  # type: ignore[index]


@kernel
def copy_keys(segments: Any, keys: Any) -> int:
    """Copy the keys of SEGMENT records to `keys`, int64, segment after segment; returns how many there were."""
    count = 0
    for s in range(len(segments)):
        segment = segments[s]
        for row in range(segment.num_rows):
            address = keys_of_row(segment, row)
            for column in range(bag_length(segment, row)):
                keys[count] = load_key(address + column * segment.key_stride, segment.key_bytes)
                count += 1
    return count


@kernel_with_gil
def count_batch(
    counts: int,
    num_samples: int,
    segments: int,
    num_keys: int,
    num_unknown: int,
    stride: int,
    num_segments: int,
    num_requests: int,
) -> None:
    """Count a batch. It keeps the GIL, so that no other thread counts, or reads the counts, meanwhile.

    Args:
        counts: address of int64: requests, batches, samples; then keys and unknown keys of each table.
        num_samples: of the batch.
        segments: address of its SEGMENT records.
        num_keys: address of int64, the keys of each.
        num_unknown: address of int64, how many of these are unknown.
        stride: bytes from one of `num_unknown` to the next.
        num_segments: how many.
        num_requests: of the batch.
    """
    _add(counts, 0, num_requests)
    _add(counts, 1, 1)
    _add(counts, 2, num_samples)
    for s in range(num_segments):
        table = load(segments + _SEGMENT_BYTES * s + _TABLE, np.int64, 0)
        _add(counts, BATCH_COUNTS + 2 * table, load(num_keys, np.int64, s))
        _add(counts, BATCH_COUNTS + 2 * table + 1, load(num_unknown + s * stride, np.int64, 0))


@kernel
def _add(counts: int, place: int, number: int) -> None:
    store(counts, np.int64, place, load(counts, np.int64, place) + number)


def compile_kernels() -> None:
    """Compile what copies keys, or load it from Numba's cache."""
    copy_keys(np.zeros(0, SEGMENT), np.empty(0, np.int64))
