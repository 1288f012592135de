"""Keys to rows while rows are added: the hash index of the served tables, with one writer and no concurrent reader."""

from __future__ import annotations

from typing import Any

import numpy as np

from inference_session.kernels.cpu.hash_index import (
    BUCKET_BYTES,
    candidate_row,
    find_row,
    hash_key,
    home_bucket,
    insert_rows,
)
from inference_session.kernels.cpu.intrinsics import kernel, prefetch, store

_AHEAD = 24
"""Keys between the one whose bucket is prefetched and the one whose row is, and from there to its search."""


@kernel
def find_rows(index: int, num_buckets: int, table_keys: int, num_rows: int, keys: Any, rows: Any) -> None:
    """Write the row of each key to `rows`; 0 where the index has none.

    Args:
        index: address of the buckets.
        table_keys: address of the key of each row.
        num_rows: rows in use, row 0 among them, which belongs to no key.
        keys: int64 [n].
        rows: int64 [n].
    """
    for i in range(len(keys)):
        _ask_ahead(index, num_buckets, table_keys, num_rows, keys, i)
        key = keys[i]
        rows[i] = max(find_row(index, num_buckets, table_keys, num_rows, key, hash_key(key)), 0)


@kernel
def add_rows(
    index: int, num_buckets: int, table_keys: int, capacity: int, num_rows: int, keys: Any, rows: Any, progress: Any
) -> int:
    """As `find_rows` from key progress[0] on, but missing keys get the next rows; returns the rows in use.

    Stops when a row would exceed the capacity: progress[0] is the first key without a row, or the number of keys.
    """
    for i in range(progress[0], len(keys)):
        _ask_ahead(index, num_buckets, table_keys, num_rows, keys, i)
        key = keys[i]
        row = find_row(index, num_buckets, table_keys, num_rows, key, hash_key(key))
        if row < 0:
            if num_rows == capacity:
                progress[0] = i
                return num_rows
            row = num_rows
            store(table_keys, np.int64, row, key)
            num_rows += 1
            insert_rows(index, num_buckets, table_keys, num_rows, row, num_rows)
        rows[i] = row
    progress[0] = len(keys)
    return num_rows


@kernel
def index_rows(index: int, num_buckets: int, table_keys: int, num_rows: int) -> None:
    """Insert all rows from 1 on into an empty index."""
    insert_rows(index, num_buckets, table_keys, num_rows, 1, num_rows)


@kernel
def _ask_ahead(index: int, num_buckets: int, table_keys: int, num_rows: int, keys: Any, i: int) -> None:
    """Prefetch the bucket of a later key, and the row's key of a nearer one."""
    later, sooner = i + 2 * _AHEAD, i + _AHEAD
    if later < len(keys):
        prefetch(index + BUCKET_BYTES * home_bucket(hash_key(keys[later]), num_buckets))
    if sooner < len(keys):
        row = candidate_row(index, num_buckets, num_rows, hash_key(keys[sooner]))
        if row >= 0:
            prefetch(table_keys + 8 * row)
