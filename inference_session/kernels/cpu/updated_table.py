"""How rows that were updated since their files were written are kept, while look-ups read them.

A table in front of the files: a hash index (hash_index.py) over keys and float32 vectors. A row that the index leads
to is never written to: a newer one goes to a free row, then the index is changed by one aligned store, then the old row
is retired, to be freed when the look-ups under way have ended. Keys are never taken out: one that was deleted has the
default vector, and a mark.

Writers are serialised by the caller.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.kernels.cpu.blocks import bag_length
from inference_session.kernels.cpu.hash_index import (
    ALL_SLOTS,
    BUCKET_BYTES,
    OVERFLOW_AT,
    ROWS_AT,
    find_row,
    hash_key,
    home_bucket,
    slot_of,
    tag_of,
)
from inference_session.kernels.cpu.intrinsics import kernel, load, lowest_bit, match_bytes, publish, store
from inference_session.kernels.cpu.rows import load_key

FREE, RETIRED = range(2)


class UpdatedArrays(NamedTuple):
    """The memory of one table's updated rows; [r] of an array belongs to row r."""

    buckets: NDArray[np.uint8]
    """[num_buckets, BUCKET_BYTES], at a cache line."""
    keys: NDArray[np.int64]
    vectors: NDArray[np.float32]
    """[capacity, embedding_dim]"""
    deleted: NDArray[np.uint8]
    """1: the row was deleted, its vector is the default vector."""
    unused: NDArray[np.int64]
    """[2, capacity]: FREE and RETIRED rows, stacked."""
    counts: NDArray[np.int64]
    """[2]: how many rows those are."""


@kernel
def put_rows(table: Any, keys: Any, vectors: Any, deleted: Any, begin: int) -> int:
    """Put rows from `begin` on in until free ones run out; returns how far it came."""
    for i in range(begin, len(keys)):
        num_free = table.counts[FREE]
        if num_free == 0:
            return i
        row = table.unused[FREE, num_free - 1]
        table.counts[FREE] = num_free - 1
        table.keys[row] = keys[i]
        table.deleted[row] = deleted[i]
        for d in range(vectors.shape[1]):
            table.vectors[row, d] = vectors[i, d]
        old = _lead_to(table, keys[i], row)
        if old >= 0:
            table.unused[RETIRED, table.counts[RETIRED]] = old
            table.counts[RETIRED] += 1
    return len(keys)


@kernel
def free_retired(table: Any) -> None:
    """To be called when no look-up can read a retired row any more."""
    for i in range(table.counts[RETIRED]):
        table.unused[FREE, table.counts[FREE]] = table.unused[RETIRED, i]
        table.counts[FREE] += 1
    table.counts[RETIRED] = 0


@kernel
def count_deleted(segments: Any, tables: Any, deleted_addresses: Any, num_unknown: Any) -> None:
    """Add the keys of each segment that were deleted. deleted_addresses[t]: of the marks of table t, 0: it has none."""
    for s in range(len(segments)):
        t = segments[s].table
        if deleted_addresses[t] != 0:
            for row in range(segments[s].num_rows):
                num_unknown[s] += _num_deleted(segments[s], row, tables[t], deleted_addresses[t])


@kernel
def _num_deleted(segment: Any, row: int, table: Any, deleted_address: int) -> Any:
    if segment.begins_address == 0:
        address = segment.keys_address + row * segment.row_stride
    else:
        address = segment.keys_address + load(segment.begins_address, np.int64, row) * segment.key_stride
    count = 0
    for column in range(bag_length(segment, row)):
        key = load_key(address + column * segment.key_stride, segment.key_bytes)
        hashed = hash_key(key)
        found = find_row(table.index_address, table.num_buckets, table.keys_address, table.num_rows, key, hashed)
        if found >= 0 and load(deleted_address, np.uint8, found) != 0:
            count += 1
    return count


@kernel
def _lead_to(table: Any, key: int, row: int) -> Any:
    """Lead the index to a row; returns the one that it led to for this key before, -1: none."""
    hashed = hash_key(key)
    tag, capacity, num_buckets = tag_of(hashed), len(table.keys), len(table.buckets)
    position = home_bucket(hashed, num_buckets)
    for _ in range(num_buckets):
        bucket = table.buckets.ctypes.data + BUCKET_BYTES * position
        slot = slot_of(bucket, tag, table.keys.ctypes.data, capacity, key)
        if slot >= 0:
            old = np.int64(load(bucket + ROWS_AT, np.uint32, slot))
            publish()
            store(bucket + ROWS_AT, np.uint32, slot, np.uint32(row))
            return old
        empty = match_bytes(bucket, np.uint8(0)) & ALL_SLOTS
        if empty != 0:
            store(bucket + ROWS_AT, np.uint32, lowest_bit(empty), np.uint32(row))
            publish()
            store(bucket, np.uint8, lowest_bit(empty), tag)
            return -1
        store(bucket, np.uint8, OVERFLOW_AT, np.uint8(1))
        position = position + 1 if position + 1 < num_buckets else 0
    return -1
