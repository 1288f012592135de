"""The keys of a request, copied out of wherever they lie."""

from __future__ import annotations

from typing import Any

import numpy as np

from inference_session.kernels.cpu.intrinsics import kernel, load


@kernel
def copy_keys(segments: Any, keys: Any) -> int:
    """Copy the keys of SEGMENT records to `keys`, int64, segment after segment; returns how many there were."""
    count = 0
    for s in range(len(segments)):
        segment = segments[s]
        for row in range(segment.num_rows):
            begin, end, address = np.int64(0), segment.keys_per_row, segment.keys_address
            if segment.begins_address == 0:
                address += row * segment.row_stride
            else:
                begin = load(segment.begins_address, np.int64, row)
                end = load(segment.ends_address, np.int64, row)
            for position in range(begin, end):
                at = address + position * segment.key_stride
                keys[count] = load(at, np.int64, 0) if segment.key_bytes == 8 else np.int64(load(at, np.int32, 0))
                count += 1
    return count
