"""From a row of a segment to its keys, and from a key to its row in one table."""

from __future__ import annotations

from typing import Any

import numpy as np

from inference_session.kernels.cpu.hash_index import find_row
from inference_session.kernels.cpu.intrinsics import kernel, load, store
from inference_session.kernels.records import MAX_MARK


@kernel
def load_key(address: int, key_bytes: int) -> Any:
    """The int64 or int32 key at the address."""
    return load(address, np.int64, 0) if key_bytes == 8 else np.int64(load(address, np.int32, 0))


@kernel
def keys_of_row(segment: Any, row: int) -> Any:
    """The address of the first key in one row of a segment."""
    if segment.begins_address == 0:
        return segment.keys_address + row * segment.row_stride
    return segment.keys_address + load(segment.begins_address, np.int64, row) * segment.key_stride


@kernel
def bag_length(segment: Any, row: int) -> Any:
    """Keys in one row of a segment."""
    if segment.begins_address == 0:
        return segment.keys_per_row
    return load(segment.ends_address, np.int64, row) - load(segment.begins_address, np.int64, row)


@kernel
def row_of_number(key: int, num_rows: int) -> Any:
    """The row that a row number means, negative ones counting from the end; -1: none."""
    row = key + num_rows if key < 0 else key
    return row if 0 <= row < num_rows else -1


@kernel
def row_of(table: Any, key: int, hashed: Any) -> Any:
    """The row of a key of this hash in a table of either kind, -1: none."""
    if table.index_address == 0:
        return row_of_number(key, table.num_rows)
    return find_row(table.index_address, table.num_buckets, table.keys_address, table.num_rows, key, hashed)


@kernel
def mark_hit(marks_address: int, row: int) -> None:
    """For a cache. Two readers that mark a row at once may count as one, which it does not mind."""
    mark = load(marks_address, np.uint8, row)
    if mark < MAX_MARK:
        store(marks_address, np.uint8, row, np.uint8(mark + 1))
