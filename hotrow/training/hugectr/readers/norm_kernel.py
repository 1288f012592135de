"""Reads records of the Norm format in one pass of compiled code, which does not hold the interpreter's lock."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.kernels.cpu.intrinsics import copy_bytes, kernel, load, store

WHOLE, ENDS_EARLY, BAD_LENGTH, BAD_CHECKSUM, BAD_COUNT, TOO_MANY_KEYS, UNEVEN = range(7)
"""The result of `read_records`: all records read, or what is wrong with the one after the last whole one."""
STATE, NUM_WHOLE, NEXT, SLOT, COUNT = range(5)
"""Elements of the `result` of `read_records`; the last two are of TOO_MANY_KEYS."""


class RecordFormat(NamedTuple):
    """How records are written, and what they may hold."""

    label_bytes: int
    head_bytes: int
    """Of labels and dense features."""
    key_bytes: int
    is_checked: bool
    """Records begin with their length, and end with the sum of their bytes."""
    is_even: bool
    """Reading stops with UNEVEN at a slot that has fewer keys than it may have. Else `Target.offsets` are written."""
    most_keys: NDArray[np.int64]
    """[slots]: the most keys of each slot."""
    slot_ends: NDArray[np.int64]
    """[inputs]: the slot behind the last one of each sparse input."""


class Target(NamedTuple):
    """Addresses to write to."""

    labels: int
    dense: int
    keys: NDArray[np.int64]
    """[inputs]: where int64 keys go; moved behind what was written."""
    keys_begin: NDArray[np.int64]
    """[inputs]: the same addresses, which stay."""
    offsets: NDArray[np.int64]
    """[inputs]: where the end of each list goes, int64; moved as `keys`."""


@kernel
def _sum_of_bytes(address: int, count: int) -> Any:
    """The sum, of which a checksum is the last 8 bits."""
    total = np.uint8(0)
    for i in range(count):
        total = np.uint8(total + load(address, np.uint8, i))
    return total


@kernel
def _body_of_checked(data: int, size: int, at: int, head_bytes: int) -> Any:
    """State, begin and end of the body of a record with a length before it and a checksum after it."""
    if at + 4 > size:
        return ENDS_EARLY, at, at
    begin = at + 4
    end = begin + np.int64(load(data + at, np.int32, 0))
    if end >= size:
        return ENDS_EARLY, begin, end
    if end < begin + head_bytes:
        return BAD_LENGTH, begin, end
    if _sum_of_bytes(data + begin, end - begin) != load(data + end, np.uint8, 0):
        return BAD_CHECKSUM, begin, end
    return WHOLE, begin, end


@kernel
def _copy_keys(keys: int, source: int, count: int, key_bytes: int) -> None:
    """Write keys of 4 or 8 bytes as int64."""
    if key_bytes == 8:
        for j in range(count):
            store(keys, np.int64, j, load(source, np.int64, j))
    else:
        for j in range(count):
            store(keys, np.int64, j, np.int64(load(source, np.uint32, j)))


@kernel
def _read_slots(data: int, at: int, end: int, form: RecordFormat, to: Target, result: Any) -> Any:
    """The slots of one record, which begin at a byte: the state, and the byte behind them."""
    key_bytes, most_keys, slot = form.key_bytes, form.most_keys, 0
    for number in range(len(form.slot_ends)):
        target, offset = to.keys[number], to.offsets[number]
        while slot < form.slot_ends[number]:
            if at + 4 > end:
                return ENDS_EARLY, at
            count = np.int64(load(data + at, np.int32, 0))
            at += 4
            if count < 0:
                return BAD_COUNT, at
            if count * key_bytes > end - at:
                return ENDS_EARLY, at
            if count > most_keys[slot]:
                result[SLOT], result[COUNT] = slot, count
                return TOO_MANY_KEYS, at
            if form.is_even and count != most_keys[slot]:
                return UNEVEN, at
            _copy_keys(target, data + at, count, key_bytes)
            target += 8 * count
            at += count * key_bytes
            if not form.is_even:
                store(offset, np.int64, 0, (target - to.keys_begin[number]) // 8)
                offset += 8
            slot += 1
        to.keys[number], to.offsets[number] = target, offset
    return WHOLE, at


@kernel
def read_records(data: int, size: int, at: int, num_records: int, form: RecordFormat, to: Target, result: Any) -> None:
    """Read up to `num_records` records from byte `at` on of `size` bytes at the address `data`.

    `result`: int64 [5], takes state, whole records, the byte where the next record begins, and slot and keys.
    """
    label_bytes, head_bytes, is_checked = form.label_bytes, form.head_bytes, form.is_checked
    state, dense_bytes = WHOLE, head_bytes - label_bytes
    result[NUM_WHOLE], result[NEXT] = num_records, at
    for i in range(num_records):
        begin, end = at, size
        if is_checked:
            state, begin, end = _body_of_checked(data, size, at, head_bytes)
        elif begin + head_bytes > end:
            state = ENDS_EARLY
        if state == WHOLE:
            copy_bytes(to.labels + i * label_bytes, data + begin, label_bytes)
            copy_bytes(to.dense + i * dense_bytes, data + begin + label_bytes, dense_bytes)
            state, at = _read_slots(data, begin + head_bytes, end, form, to, result)
            if is_checked and (state == ENDS_EARLY or (state == WHOLE and at != end)):
                state = BAD_LENGTH
        if state != WHOLE:
            result[NUM_WHOLE] = i
            break
        at += 1 if is_checked else 0
        result[NEXT] = at
    result[STATE] = state
