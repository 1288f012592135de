"""Rows out of Redis's replies, without a Python object per row.

HMGET is answered by `*<n> CRLF`, then for each key `$<size> CRLF <row> CRLF` or, if it is absent, `$-1 CRLF`. The
replies to all commands of one connection come as one stream, which is read in pieces of any size: the kernel goes
through a piece, copies each row to where it belongs, and stops where the piece ends or something else comes. From
a plain socket it takes the pieces itself: waiting in Python, a thread would have to get the interpreter back after each
of them, while other threads want it too.
"""

from __future__ import annotations

import functools
import select
import time
from enum import IntEnum
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from inference_session.kernels.cpu.intrinsics import kernel, load, store

REPLY = np.dtype(
    [
        ("num_keys", np.int64),
        ("row_bytes", np.int64),
        ("positions_address", np.int64),  # int64[num_keys]: which row of the output each key is
        ("output_address", np.int64),
        ("output_stride", np.int64),
        ("found_address", np.int64),  # bool, by position
    ]
)
CURSOR = np.dtype(
    [
        ("reply", np.int64),  # replies that are complete
        ("key", np.int64),  # keys of the current one that are done; -1: its head is yet to come
        ("status", np.int64),
        ("found_bytes", np.int64),  # of the malformed row before `key`
        ("skip_bytes", np.int64),  # of that row, which are not read yet
    ]
)
STREAM = np.dtype(
    [
        ("socket", np.int32),  # these three are C's `struct pollfd`; -1: the socket cannot be read directly
        ("events", np.int16),
        ("happened", np.int16),
        ("now_s", np.int64),  # these two are C's `struct timespec`
        ("now_ns", np.int64),
        ("deadline_ns", np.int64),  # by the monotonic clock
        ("buffer_address", np.int64),
        ("buffer_bytes", np.int64),
        ("filled_bytes", np.int64),  # what has come and not been read
    ]
)
"""Where replies come from."""
POLLIN = select.POLLIN
_TIMESPEC_OFFSET, _NS_PER_S, _NS_PER_MS, _MAX_WAIT_MS = 8, 10**9, 10**6, 1000

_clock_gettime: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))
_poll: Any = types.ExternalFunction("poll", types.int32(types.intp, types.uintp, types.int32))
_recv: Any = types.ExternalFunction("recv", types.intp(types.int32, types.intp, types.uintp, types.int32))
_MONOTONIC = time.CLOCK_MONOTONIC


class Status(IntEnum):
    """Why the kernel stopped."""

    MORE = 0
    """The piece is used up, or ends within a line or row."""
    DONE = 1
    OTHER_WIDTH = 2
    """The row before `key` has another size than the table's. It is not found; reading can go on after it."""
    OTHER_REPLY = 3
    """The reply is not the one expected: an error, or the peer is not Redis. Nothing of it is read."""


_MORE, _DONE, _OTHER_WIDTH, _OTHER_REPLY = (int(status) for status in Status)
_CR, _LF, _MINUS, _ZERO, _STAR, _DOLLAR = (ord(c) for c in "\r\n-0*$")
_MAX_DIGITS = 10


@kernel
def _read_head(buffer: int, begin: int, end: int, first_byte: int) -> tuple[int, int]:
    """`<first byte><number> CRLF` at `begin` → (number, its end). The end is 0 if incomplete, -1 if malformed."""
    if load(buffer, np.uint8, begin) != first_byte:
        return 0, -1
    number, i, sign = 0, begin + 1, 1
    while i < end:
        byte = np.int64(load(buffer, np.uint8, i))
        if byte == _CR:
            if i + 1 == end:
                return 0, 0
            is_line = load(buffer, np.uint8, i + 1) == _LF and i > begin + (sign < 0) + 1
            return sign * number, i + 2 if is_line else -1
        if byte == _MINUS and i == begin + 1:
            sign = -1
        elif byte < _ZERO or byte > _ZERO + 9 or i > begin + _MAX_DIGITS:
            return 0, -1
        else:
            number = 10 * number + byte - _ZERO
        i += 1
    return 0, 0


@kernel
def _copy(source: int, target: int, num_bytes: int) -> None:
    for i in range(num_bytes // 4):
        store(target, np.uint32, i, load(source, np.uint32, i))


@kernel
def _skip(begin: int, num_bytes: int, skip_bytes: int) -> tuple[int, int]:
    """The place to continue reading at, and the number of bytes left to skip."""
    skipped = min(skip_bytes, num_bytes - begin)
    return begin + skipped, skip_bytes - skipped


@kernel
def read_rows(replies: NDArray[np.void], cursor: NDArray[np.void], buffer: int, num_bytes: int) -> int:
    """Go on reading the replies; returns how many of the bytes at address `buffer` are done with.

    `replies`: REPLY records; `cursor`: one CURSOR record, kept between calls. Rows that are not found
    stay unchanged in the output.
    """
    state: Any = cursor[0]
    begin = 0
    while state.reply < len(replies):
        if state.skip_bytes > 0:
            begin, state.skip_bytes = _skip(begin, num_bytes, state.skip_bytes)
        reply: Any = replies[state.reply]
        if state.key == reply.num_keys:
            state.reply += 1
            state.key = -1
            continue
        if begin == num_bytes:
            state.status = _MORE
            return begin
        number, body = _read_head(buffer, begin, num_bytes, _STAR if state.key < 0 else _DOLLAR)
        if body == 0:
            state.status = _MORE
            return begin
        if body < 0 or number < -1 or (state.key < 0 and number != reply.num_keys):
            state.status = _OTHER_REPLY
            return begin
        if state.key < 0:
            state.key = 0
            begin = body
            continue
        position = load(reply.positions_address, np.int64, state.key)
        if number >= 0 and number != reply.row_bytes:
            store(reply.found_address, np.uint8, position, np.uint8(0))
            state.status = _OTHER_WIDTH
            state.found_bytes = number
            state.skip_bytes = number + 2
            state.key += 1
            return body
        if number >= 0:
            if body + number + 2 > num_bytes:
                state.status = _MORE
                return begin
            _copy(buffer + body, reply.output_address + position * reply.output_stride, number)
            body += number + 2
        store(reply.found_address, np.uint8, position, np.uint8(number >= 0))
        state.key += 1
        begin = body
    state.status = _DONE
    return begin


@kernel
def _receive(stream: NDArray[np.void], address: int) -> Any:
    """Wait for more, but not for long; whether some came. `address`: of the STREAM record."""
    state: Any = stream[0]
    room = state.buffer_bytes - state.filled_bytes
    if state.socket < 0 or room == 0:
        return False
    _clock_gettime(_MONOTONIC, address + _TIMESPEC_OFFSET)
    left_ms = (state.deadline_ns - state.now_s * _NS_PER_S - state.now_ns) // _NS_PER_MS
    if left_ms <= 0 or _poll(address, 1, min(left_ms, _MAX_WAIT_MS)) <= 0:
        return False
    received = _recv(state.socket, state.buffer_address + state.filled_bytes, room, 0)
    state.filled_bytes += max(received, 0)
    return received > 0


@kernel
def receive_rows(replies: NDArray[np.void], cursor: NDArray[np.void], stream: NDArray[np.void], address: int) -> None:
    """`read_rows` out of a buffer that is filled again as long as its socket gives something.

    It ends with MORE where Python must handle the rest: there is no room, no time, no plain socket, or an error.
    """
    state: Any = stream[0]
    while True:
        used = read_rows(replies, cursor, state.buffer_address, state.filled_bytes)
        state.filled_bytes -= used
        if used > 0:
            for i in range(state.filled_bytes):
                store(state.buffer_address, np.uint8, i, load(state.buffer_address + used, np.uint8, i))
        if cursor[0].status != _MORE or not _receive(stream, address):
            return


@functools.cache
def compile_kernels() -> None:
    """Compile what is here, or load it from Numba's cache, before a request waits for an answer."""
    receive_rows(np.zeros(0, REPLY), np.zeros(1, CURSOR), np.zeros(1, STREAM), 0)
