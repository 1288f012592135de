"""Finds records of the Norm format, whose sizes depend on their counts of keys, in compiled code."""

from __future__ import annotations

from typing import Any

import numpy as np

from inference_session.kernels.machine_code import compiled

WHOLE, ENDS_EARLY, BAD_LENGTH, BAD_CHECKSUM, BAD_COUNT = range(5)
"""The result of `find_records`: all records found, or the error of the last one that it read."""


def _int32(data: Any, at: int) -> Any:
    value = np.int64(0)
    for b in range(4):
        value |= np.int64(data[at + b]) << (8 * b)
    return value - (1 << 32) if value >= 1 << 31 else value


_int32 = compiled(_int32)


def _count_keys(data: Any, at: int, end: int, key_bytes: int, counts: Any) -> Any:
    """The slots that begin at a byte: their counts of keys, and their end, which is at most `end`."""
    for slot in range(len(counts)):
        if at + 4 > end:
            return ENDS_EARLY, at
        count = _int32(data, at)
        if count < 0:
            return BAD_COUNT, at
        at += 4 + count * key_bytes
        if at > end:
            return ENDS_EARLY, at
        counts[slot] = count
    return WHOLE, at


_count_keys = compiled(_count_keys)


def _find_checked(data: Any, at: int, head_bytes: int, key_bytes: int, counts: Any) -> Any:
    """One record with a length before it and a checksum after it: the state, and where the next one begins."""
    size = len(data)
    if at + 4 > size:
        return ENDS_EARLY, at
    first, end = at + 4, at + 4 + _int32(data, at)
    if end >= size:
        return ENDS_EARLY, at
    state, found_end = _count_keys(data, first + head_bytes, end, key_bytes, counts)
    if state == ENDS_EARLY or (state == WHOLE and found_end != end):
        return BAD_LENGTH, at
    total = np.int64(0)
    for position in range(first, end):
        total += np.int64(data[position])
    if state == WHOLE and total & 255 != data[end]:
        return BAD_CHECKSUM, at
    return state, end + 1


_find_checked = compiled(_find_checked)


def _find_records(
    data: Any, at: int, num_records: int, head_bytes: int, key_bytes: int, is_checked: bool, heads: Any, counts: Any
) -> Any:
    """Find up to `num_records` records from byte `at` on.

    Args:
        data: uint8, the file.
        head_bytes: bytes of labels and dense features.
        is_checked: records begin with their length and end with the sum of their bytes.
        heads: int64 [num_records], takes where the labels begin.
        counts: int64 [num_records, slots], takes the number of keys.

    Returns the state (see above), the number of whole records, and where the next one begins.
    """
    for i in range(num_records):
        if is_checked:
            heads[i] = at + 4
            state, next_at = _find_checked(data, at, head_bytes, key_bytes, counts[i])
        else:
            heads[i] = at
            state, next_at = _count_keys(data, at + head_bytes, len(data), key_bytes, counts[i])
        if state != WHOLE:
            return state, i, at
        at = next_at
    return WHOLE, num_records, at


def _copy_records(
    data: Any, num_records: int, label_bytes: int, head_bytes: int, key_bytes: int, heads: Any, counts: Any,
    labels: Any, dense: Any, keys: Any,
) -> None:  # fmt: skip
    """Copy what `find_records` found.

    Args:
        heads, counts: as `find_records` filled them.
        labels, dense: uint8, of all records, concatenated.
        keys: uint8, zeros, 8 bytes per key.
    """
    written = 0
    for i in range(num_records):
        at = heads[i]
        for b in range(label_bytes):
            labels[i * label_bytes + b] = data[at + b]
        for b in range(head_bytes - label_bytes):
            dense[i * (head_bytes - label_bytes) + b] = data[at + label_bytes + b]
        at += head_bytes
        for slot in range(counts.shape[1]):
            at += 4
            for _ in range(counts[i, slot]):
                for b in range(key_bytes):
                    keys[written + b] = data[at + b]
                at += key_bytes
                written += 8


find_records = compiled(_find_records)
copy_records = compiled(_copy_records)
