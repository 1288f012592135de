"""How the CPU cache changes its rows while look-ups read them: insert, update, evict, erase.

Every row is in one of four lists, doubly linked by row number:

    FREE      nothing in it; may be written
    RETIRED   out of the index, but a look-up under way may still read it
    SMALL     cached, and not hit often enough to stay
    MAIN      cached, and meant to stay

A row that the index points to is never written to. New contents of a key go to a free row, then the index is changed by
one aligned store, then the old row is retired; the caller frees retired rows when all look-ups that began before have
ended. So a look-up sees a row whole, old or new, without a lock, a version or a second try.

Which row is evicted follows S3-FIFO: new keys queue in SMALL, a tenth of the rows, and leave the cache from there
unless they were hit; those that were move to MAIN, which goes round, taking one mark (layout.MAX_MARK) from each row
until it meets one without. Keys evicted lately are remembered as `ghosts`, 16 bits each, and go to MAIN when they come
again. One scan, however long, passes through SMALL alone.

Writers are serialised by the caller.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.kernels.cpu.hash_index import (
    ALL_SLOTS,
    BUCKET_BYTES,
    ROWS_AT,
    SLOTS,
    fill_slot,
    hash_key,
    home_bucket,
    replace_row,
    slot_of,
    tag_of,
)
from inference_session.kernels.cpu.intrinsics import kernel, load, lowest_bit, match_bytes, release_fence, store
from inference_session.kernels.records import MAX_MARK

FREE, RETIRED, SMALL, MAIN = range(4)
NUM_LISTS = 4
INSERTED, UPDATED, EVICTED, ERASED = range(4)
NUM_EVENTS = 4
_NEXT, _PREVIOUS = 0, 1
_SMALL_PARTS = 10
"""One row in this many is for SMALL."""
_MAX_SECOND_CHANCES = 64
"""Rows that one eviction may spare, so that no insert waits for a pass over the whole cache."""


class CacheArrays(NamedTuple):
    """The memory of one table's cache; [r] of an array belongs to row r."""

    buckets: NDArray[np.uint8]
    """[num_buckets, BUCKET_BYTES], at a cache line: a hash index (hash_index.py) without overflow."""
    keys: NDArray[np.int64]
    vectors: NDArray[np.uint8]
    """[num_rows, row_bytes]."""
    marks: NDArray[np.uint8]
    lists: NDArray[np.uint8]
    """Which list the row is in."""
    links: NDArray[np.uint32]
    """[num_rows + NUM_LISTS, 2]: next and previous; the last NUM_LISTS are the lists' heads."""
    counts: NDArray[np.int64]
    """[NUM_LISTS]: rows in each list."""
    ghosts: NDArray[np.uint16]
    """16 bits of the hash of keys evicted, each at a place that further bits choose; 0: none so far."""
    events: NDArray[np.int64]
    """[NUM_EVENTS]: rows inserted, updated, evicted and erased so far."""


def compile_kernels(cache: CacheArrays) -> None:
    """Compile what changes a cache, or load it from Numba's cache, so that no insert waits for a compiler."""
    keys = np.empty(0, np.int64)
    write_rows(cache, 1, keys, np.empty((0, 1), np.uint8), 0, True)
    erase_rows(cache, keys)
    free_retired(cache)


@kernel
def link_all_free(cache: Any) -> None:
    """Put every row of a new cache into FREE."""
    num_rows = len(cache.keys)
    for place in range(num_rows, num_rows + NUM_LISTS):
        cache.links[place, _NEXT] = place
        cache.links[place, _PREVIOUS] = place
    for row in range(num_rows):
        _link(cache, row, FREE, num_rows + FREE)


@kernel
def write_rows(cache: Any, capacity: int, keys: Any, vectors: Any, begin: int, may_insert: Any) -> int:
    """Insert or update keys[begin:] with vectors, uint8 [n, row_bytes], until free rows run out.

    Keeps at most `capacity` rows. Without `may_insert`, keys that are not cached are passed over. Returns how far it
    came: a position below len(keys) asks the caller to free the retired rows.
    """
    for i in range(begin, len(keys)):
        key = keys[i]
        hashed = hash_key(key)
        bucket = _bucket(cache, hashed)
        slot = slot_of(bucket, tag_of(hashed), cache.keys.ctypes.data, len(cache.keys), key)
        if slot < 0 and not may_insert:
            continue
        if cache.counts[FREE] == 0:
            return i
        row = _head(cache, FREE)
        cache.keys[row] = key
        _copy_row(cache, row, vectors, i)
        if slot >= 0:
            _replace_row(cache, bucket, slot, row)
        else:
            _enter_row(cache, capacity, bucket, hashed, row)
    return len(keys)


@kernel
def erase_rows(cache: Any, keys: Any) -> None:
    """Drop the rows of these keys, as far as they are cached."""
    for i in range(len(keys)):
        hashed = hash_key(keys[i])
        bucket = _bucket(cache, hashed)
        slot = slot_of(bucket, tag_of(hashed), cache.keys.ctypes.data, len(cache.keys), keys[i])
        if slot >= 0:
            _drop_row(cache, bucket, slot)
            cache.events[ERASED] += 1


@kernel
def free_retired(cache: Any) -> None:
    """To be called when no look-up can read a retired row any more."""
    while cache.counts[RETIRED] > 0:
        _move(cache, _head(cache, RETIRED), FREE)


@kernel
def replay_keys(cache: Any, capacity: int, keys: Any) -> int:
    """Look keys up one after the other, and insert each that is missing, as rows of no content; returns the hits."""
    hits = 0
    for key in keys:
        hashed = hash_key(key)
        bucket = _bucket(cache, hashed)
        slot = slot_of(bucket, tag_of(hashed), cache.keys.ctypes.data, len(cache.keys), key)
        if slot >= 0:
            row = load(bucket + ROWS_AT, np.uint32, slot)
            cache.marks[row] = min(cache.marks[row] + 1, MAX_MARK)
            hits += 1
        else:
            if cache.counts[FREE] == 0:
                free_retired(cache)
            row = _head(cache, FREE)
            cache.keys[row] = key
            _enter_row(cache, capacity, bucket, hashed, row)
    return hits


@kernel
def _enter_row(cache: Any, capacity: int, bucket: int, hashed: Any, row: int) -> None:
    """Point the index at a row whose key is new to it."""
    while cache.counts[SMALL] + cache.counts[MAIN] >= capacity:
        _evict(cache, capacity)
    empty = match_bytes(bucket, np.uint8(0)) & ALL_SLOTS
    if empty == 0:
        slot = _least_worthy_slot(cache, bucket)
        _evict_slot(cache, bucket, slot)
    else:
        slot = lowest_bit(empty)
    cache.marks[row] = 0
    _move(cache, row, MAIN if _is_remembered(cache, hashed) else SMALL)
    fill_slot(bucket, slot, tag_of(hashed), row)
    cache.events[INSERTED] += 1


@kernel
def _replace_row(cache: Any, bucket: int, slot: int, row: int) -> None:
    """Point the index at a row with new contents of the key in that slot; it takes the old one's place in its list."""
    old = np.int64(load(bucket + ROWS_AT, np.uint32, slot))
    cache.marks[row] = cache.marks[old]
    _unlink(cache, row)
    _link(cache, row, cache.lists[old], old)
    replace_row(bucket, slot, row)
    _move(cache, old, RETIRED)
    cache.events[UPDATED] += 1


@kernel
def _evict(cache: Any, capacity: int) -> None:
    """Drop the row that is least worth its place."""
    small_rows = max(capacity // _SMALL_PARTS, 1)
    for chances in range(_MAX_SECOND_CHANCES, -1, -1):
        from_small = cache.counts[SMALL] >= small_rows or cache.counts[MAIN] == 0
        row = _head(cache, SMALL if from_small else MAIN)
        mark = cache.marks[row]
        if mark == 0 or chances == 0:
            break
        cache.marks[row] = 0 if from_small else mark - 1
        _move(cache, row, MAIN)
    key = cache.keys[row]
    hashed = hash_key(key)
    bucket = _bucket(cache, hashed)
    _evict_slot(cache, bucket, slot_of(bucket, tag_of(hashed), cache.keys.ctypes.data, len(cache.keys), key))


@kernel
def _least_worthy_slot(cache: Any, bucket: int) -> Any:
    """Of a full bucket, in which a new key must have a place."""
    worst, least_worth = 0, MAIN * (MAX_MARK + 2)
    for slot in range(SLOTS):
        row = np.int64(load(bucket + ROWS_AT, np.uint32, slot))
        worth = cache.lists[row] * (MAX_MARK + 1) + cache.marks[row]
        if worth < least_worth:
            worst, least_worth = slot, worth
    return worst


@kernel
def _evict_slot(cache: Any, bucket: int, slot: int) -> None:
    _remember(cache, cache.keys[load(bucket + ROWS_AT, np.uint32, slot)])
    _drop_row(cache, bucket, slot)
    cache.events[EVICTED] += 1


@kernel
def _drop_row(cache: Any, bucket: int, slot: int) -> None:
    row = np.int64(load(bucket + ROWS_AT, np.uint32, slot))
    store(bucket, np.uint8, slot, np.uint8(0))
    release_fence()
    _move(cache, row, RETIRED)


@kernel
def _remember(cache: Any, key: int) -> None:
    hashed = hash_key(key)
    cache.ghosts[_ghost_place(cache, hashed)] = np.uint16(hashed)


@kernel
def _is_remembered(cache: Any, hashed: Any) -> Any:
    return cache.ghosts[_ghost_place(cache, hashed)] == np.uint16(hashed)


@kernel
def _ghost_place(cache: Any, hashed: Any) -> Any:
    return home_bucket(hashed << np.uint64(16), len(cache.ghosts))


@kernel
def _bucket(cache: Any, hashed: Any) -> Any:
    return cache.buckets.ctypes.data + BUCKET_BYTES * home_bucket(hashed, len(cache.buckets))


@kernel
def _copy_row(cache: Any, row: int, vectors: Any, i: int) -> None:
    for b in range(vectors.shape[1]):
        cache.vectors[row, b] = vectors[i, b]


@kernel
def _head(cache: Any, which: int) -> Any:
    return np.int64(cache.links[len(cache.keys) + which, _NEXT])


@kernel
def _move(cache: Any, row: int, to: int) -> None:
    """To the end of another list, or of its own."""
    _unlink(cache, row)
    _link(cache, row, to, len(cache.keys) + to)


@kernel
def _unlink(cache: Any, row: int) -> None:
    following, previous = cache.links[row, _NEXT], cache.links[row, _PREVIOUS]
    cache.links[previous, _NEXT] = following
    cache.links[following, _PREVIOUS] = previous
    cache.counts[cache.lists[row]] -= 1


@kernel
def _link(cache: Any, row: int, to: int, before: int) -> None:
    """Into the list `to`, in front of a row of it or, at its end, of its head."""
    previous = cache.links[before, _PREVIOUS]
    cache.links[row, _NEXT] = before
    cache.links[row, _PREVIOUS] = previous
    cache.links[previous, _NEXT] = row
    cache.links[before, _PREVIOUS] = row
    cache.lists[row] = to
    cache.counts[to] += 1
