"""The hash index over a table's keys: its layout in memory, how a key is found, how keys are put in.

The index is an array of buckets, one cache line each:

    byte   0…11   tags      8 bits of the hash of the key in each slot, 1…255; 0: the slot is empty
          12      overflow  1 where a key that belongs here stands in a later bucket because this one was full
          13…15   zero
          16…63   rows      uint32 row number of the key in each slot

A key belongs to the bucket that the upper half of its hash picks, scaled to the number of buckets, or where that is
full, to the next with room, round the end. The tags of a bucket are compared at once; only where one matches is the
key of that row read from the table's keys, so that any int64 can be a key. Keys are never taken out.

Nothing in a bucket is trusted: a row number outside the table is no match, and a search ends where it began. A damaged
index can hide keys, never return a row whose key is another, nor read outside the table.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from inference_session.kernels.cpu.intrinsics import (
    kernel,
    load,
    lowest_bit,
    match_bytes,
    prefetch,
    release_fence,
    store,
)

BUCKET_BYTES = 64
SLOTS = 12
MAX_ROWS = 2**32 - 1

OVERFLOW_AT = 12
ROWS_AT = 16
ALL_SLOTS = (1 << SLOTS) - 1
_AHEAD = 24
"""Rows between the one whose bucket is asked for and the one that is put in."""


@kernel
def hash_key(key: Any) -> Any:
    """64 well-mixed bits of an int64 key, as uint64 (MurmurHash3's finaliser)."""
    mixed = np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    mixed = (mixed ^ (mixed >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return mixed ^ (mixed >> np.uint64(33))


@kernel
def home_bucket(hashed: Any, num_buckets: Any) -> Any:
    """The bucket that a key of this hash belongs to."""
    return np.int64(((hashed >> np.uint64(32)) * np.uint64(num_buckets)) >> np.uint64(32))


@kernel
def tag_of(hashed: Any) -> Any:
    """The tag, 1…255, of a key of this hash."""
    return np.uint8(max(np.int64(hashed & np.uint64(255)), 1))


@kernel
def candidate_row(index_address: int, num_buckets: int, num_rows: int, hashed: Any) -> Any:
    """The row that the key of this hash is most likely in, without reading any key; -1: none in its own bucket."""
    bucket = index_address + BUCKET_BYTES * home_bucket(hashed, num_buckets)
    matches = match_bytes(bucket, tag_of(hashed)) & ALL_SLOTS
    if matches == 0:
        return -1
    row = np.int64(load(bucket + ROWS_AT, np.uint32, lowest_bit(matches)))
    return row if row < num_rows else -1


@kernel
def find_row(index_address: int, num_buckets: int, keys_address: int, num_rows: int, key: int, hashed: Any) -> Any:
    """The row of the key, -1 where the table has none."""
    position = home_bucket(hashed, num_buckets)
    tag = tag_of(hashed)
    for _ in range(num_buckets):
        bucket = index_address + BUCKET_BYTES * position
        row = _row_in(bucket, tag, keys_address, num_rows, key)
        if row >= 0:
            return row
        if load(bucket, np.uint8, OVERFLOW_AT) == 0:
            return -1
        position = position + 1 if position + 1 < num_buckets else 0
    return -1


@kernel
def _row_in(bucket: int, tag: Any, keys_address: int, num_rows: int, key: int) -> Any:
    """The row of the key in this bucket, or -1. A row number is read once: a cache may change it meanwhile."""
    matches = match_bytes(bucket, tag) & ALL_SLOTS
    while matches != 0:
        row = np.int64(load(bucket + ROWS_AT, np.uint32, lowest_bit(matches)))
        if row < num_rows and load(keys_address, np.int64, row) == key:
            return row
        matches &= matches - 1
    return -1


@kernel
def slot_of(bucket: int, tag: Any, keys_address: int, num_rows: int, key: int) -> Any:
    """The slot of the key in this bucket, -1 where it is not there."""
    matches = match_bytes(bucket, tag) & ALL_SLOTS
    while matches != 0:
        slot = lowest_bit(matches)
        row = np.int64(load(bucket + ROWS_AT, np.uint32, slot))
        if row < num_rows and load(keys_address, np.int64, row) == key:
            return slot
        matches &= matches - 1
    return -1


@kernel
def fill_slot(bucket: int, slot: int, tag: Any, row: int) -> None:
    """Lead an empty slot to a row, which must be whole. The slot counts from its tag on, which comes last."""
    store(bucket + ROWS_AT, np.uint32, slot, np.uint32(row))
    release_fence()
    store(bucket, np.uint8, slot, tag)


@kernel
def replace_row(bucket: int, slot: int, row: int) -> Any:
    """Lead a slot to another row of its key, which must be whole; returns the one before, which may be read still."""
    old = np.int64(load(bucket + ROWS_AT, np.uint32, slot))
    release_fence()
    store(bucket + ROWS_AT, np.uint32, slot, np.uint32(row))
    return old


@kernel
def enter_row(
    index_address: int, num_buckets: int, keys_address: int, num_rows: int, key: int, hashed: Any, row: int
) -> Any:
    """Point the index at a row of the key, which must be whole; returns the row that it pointed to before, -1: none."""
    position, tag = home_bucket(hashed, num_buckets), tag_of(hashed)
    for _ in range(num_buckets):
        bucket = index_address + BUCKET_BYTES * position
        known = slot_of(bucket, tag, keys_address, num_rows, key)
        if known >= 0:
            return replace_row(bucket, known, row)
        empty = match_bytes(bucket, np.uint8(0)) & ALL_SLOTS
        if empty != 0:
            fill_slot(bucket, lowest_bit(empty), tag, row)
            return -1
        store(bucket, np.uint8, OVERFLOW_AT, np.uint8(1))
        position = position + 1 if position + 1 < num_buckets else 0
    return -1


@kernel
def insert_rows(
    index_address: int, num_buckets: int, keys_address: int, num_rows: int, first_row: int, last_row: int
) -> None:
    """Put the keys of rows first_row ≤ row < last_row into the index; a key that is in already gets the later row.

    The buckets must have room for all. The index may hold rows from last_row on, up to num_rows, of an earlier run
    over the same keys that was not finished: each takes its own slot again.
    """
    for row in range(first_row, last_row):
        if row + _AHEAD < last_row:
            hashed = hash_key(load(keys_address, np.int64, row + _AHEAD))
            prefetch(index_address + BUCKET_BYTES * home_bucket(hashed, num_buckets))
        key = load(keys_address, np.int64, row)
        enter_row(index_address, num_buckets, keys_address, num_rows, key, hash_key(key), row)


@kernel
def count_keys(index_address: int, num_buckets: int) -> int:
    """The keys in the index, each counted once."""
    num_keys = 0
    for position in range(num_buckets):
        for slot in range(SLOTS):
            num_keys += load(index_address + BUCKET_BYTES * position, np.uint8, slot) != 0
    return num_keys
