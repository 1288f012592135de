"""Row numbers that count from the end, as ONNX allows them: the keys of look-ups are copied with all from the start."""

from __future__ import annotations

from typing import Any

import numpy as np

from inference_session.kernels.cpu.intrinsics import kernel, load, store
from inference_session.kernels.cpu.rows import bag_length, keys_of_row, load_key


@kernel
def count_copies(segments: Any, num_rows: Any, num_copies: Any) -> int:
    """How many keys have to be copied: all of a SEGMENT record that has a row number from the end.

    num_rows[t] is of table t, 0 where keys are no row numbers. num_copies[s] receives the keys of segment s, and the
    sum is returned.
    """
    total = 0
    for s in range(len(segments)):
        num_copies[s] = 0
        if num_rows[segments[s].table] != 0 and _any_from_end(segments[s], num_rows[segments[s].table]):
            num_copies[s] = _num_keys(segments[s])
        total += num_copies[s]
    return total


@kernel
def copy_from_start(segments: Any, num_rows: Any, num_copies: Any, keys: Any) -> None:
    """Copy to `keys`, int64, what `count_copies` has counted, and lead the segments there."""
    address = keys.ctypes.data
    for s in range(len(segments)):
        if num_copies[s] != 0:
            _copy_keys(segments[s], num_rows[segments[s].table], address)
            segments[s].keys_address, segments[s].key_bytes, segments[s].key_stride = address, 8, 8
            segments[s].row_stride = 8 * segments[s].keys_per_row
            address += 8 * num_copies[s]


@kernel
def _any_from_end(segment: Any, num_rows: int) -> bool:
    for row in range(segment.num_rows):
        for column in range(bag_length(segment, row)):
            if _is_from_end(_key(segment, row, column), num_rows):
                return True
    return False


@kernel
def _is_from_end(key: int, num_rows: int) -> Any:
    return key < 0 and key >= -num_rows


@kernel
def _num_keys(segment: Any) -> Any:
    if segment.begins_address == 0:
        return segment.num_rows * segment.keys_per_row
    end = np.int64(0)
    for row in range(segment.num_rows):
        end = max(end, load(segment.ends_address, np.int64, row))
    return end


@kernel
def _copy_keys(segment: Any, num_rows: int, address: int) -> None:
    """Rows of keys follow one another; bags keep the positions where they begin."""
    for row in range(segment.num_rows):
        begin = row * segment.keys_per_row
        if segment.begins_address != 0:
            begin = load(segment.begins_address, np.int64, row)
        for column in range(bag_length(segment, row)):
            key = _key(segment, row, column)
            store(address, np.int64, begin + column, key + num_rows if _is_from_end(key, num_rows) else key)


@kernel
def _key(segment: Any, row: int, column: int) -> Any:
    return load_key(keys_of_row(segment, row) + column * segment.key_stride, segment.key_bytes)
