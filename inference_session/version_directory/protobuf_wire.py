"""Protobuf messages as fields with positions, so that a large file need not be parsed to find a few of them."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import NamedTuple

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types. `BYTES` stands for strings and messages too."""


class Field(NamedTuple):
    """One field of a message."""

    number: int
    kind: int
    begin: int
    """Where the field begins, tag included."""
    value: int
    """Where its value begins, length excluded."""
    end: int


def message_fields(data: mmap.mmap | bytes, begin: int, end: int) -> Iterator[Field]:
    """The fields of the message between two positions, in their order; ValueError where the bytes are no message."""
    position = begin
    while position < end:
        tag, value = _varint(data, position, end)
        kind = tag & 7
        if kind == VARINT:
            stop = _varint(data, value, end)[1]
        elif kind == BYTES:
            length, value = _varint(data, value, end)
            stop = value + length
        elif kind in (FIXED64, FIXED32):
            stop = value + (8 if kind == FIXED64 else 4)
        else:
            raise ValueError(f"byte {position}: protobuf has no wire type {kind}")
        if stop > end:
            raise ValueError(f"byte {position}: a field ends at byte {stop}, after the last of {end} bytes")
        yield Field(tag >> 3, kind, position, value, stop)
        position = stop


def _varint(data: mmap.mmap | bytes, position: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if position >= end:
            raise ValueError(f"byte {position}: the data ends within a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError(f"byte {position}: a number of more than ten bytes")
