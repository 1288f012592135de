"""The keys of a request: copied out of wherever they lie, and counted."""

from __future__ import annotations

from typing import Any

from inference_session.kernels.cpu.intrinsics import kernel
from inference_session.kernels.cpu.rows import bag_length, keys_of_row, load_key


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
def count_keys(segments: Any, num_keys: Any, num_unknown: Any, keys_of: Any, unknown_of: Any) -> None:
    """Add the keys of SEGMENT records, and how many of these are unknown, to the counts of their tables."""
    for s in range(len(segments)):
        keys_of[segments[s].table] += num_keys[s]
        unknown_of[segments[s].table] += num_unknown[s]
