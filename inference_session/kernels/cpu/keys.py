"""The keys of a request: copied out of wherever they lie, and counted."""

from __future__ import annotations

from typing import Any

import numpy as np

from inference_session.kernels.cpu.intrinsics import kernel, load, store
from inference_session.kernels.cpu.rows import bag_length, keys_of_row, load_key
from inference_session.kernels.records import SEGMENT

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


@kernel
def count_keys(
    segments: int, num_keys: int, num_unknown: int, stride: int, num_segments: int, keys_of: int, unknown_of: int
) -> None:
    """Add the keys of SEGMENT records, and how many of these are unknown, to the counts of their tables.

    All but `num_segments` and `stride` are addresses, of int64 except for the segments. `stride`: bytes from one of
    `num_unknown` to the next.
    """
    for s in range(num_segments):
        table = load(segments + _SEGMENT_BYTES * s + _TABLE, np.int64, 0)
        store(keys_of, np.int64, table, load(keys_of, np.int64, table) + load(num_keys, np.int64, s))
        store(
            unknown_of, np.int64, table, load(unknown_of, np.int64, table) + load(num_unknown + s * stride, np.int64, 0)
        )


def compile_kernels() -> None:
    """Compile what copies keys, or load it from Numba's cache."""
    copy_keys(np.zeros(0, SEGMENT), np.empty(0, np.int64))
