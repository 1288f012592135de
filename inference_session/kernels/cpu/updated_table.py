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

from inference_session.kernels.cpu.hash_index import enter_row, hash_key
from inference_session.kernels.cpu.intrinsics import kernel, load
from inference_session.kernels.cpu.rows import bag_length, keys_of_row, load_key, row_of

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
        index, keys_address = table.buckets.ctypes.data, table.keys.ctypes.data
        old = enter_row(index, len(table.buckets), keys_address, len(table.keys), keys[i], hash_key(keys[i]), row)
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
    address, count = keys_of_row(segment, row), 0
    for column in range(bag_length(segment, row)):
        key = load_key(address + column * segment.key_stride, segment.key_bytes)
        found = row_of(table, key, hash_key(key))
        if found >= 0 and load(deleted_address, np.uint8, found) != 0:
            count += 1
    return count
