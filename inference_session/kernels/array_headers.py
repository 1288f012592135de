"""Where compiled code finds what Python knows of an array, so that it can read the arrays of a request by itself.

Neither Python nor NumPy promises these places to others than C compilers. So they are compared with what Python says of
some arrays, once in each process; if anything differs, they are not read (`can_read_arrays`).
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

LIST_ITEMS = 24
"""In a list, the address of the addresses of its items."""
OBJECT_TYPE = 8
"""In any object, the address of its type."""
DATA, RANK, SIZES, STRIDES, DTYPE, FLAGS = 16, 24, 32, 40, 56, 64
"""In an array, by byte: the address of the first element, int32 number of dimensions, the addresses of their sizes and
strides, the address of the dtype object, int32 flags.
"""
C_CONTIGUOUS = 1
"""The flag."""
_HEADER_BYTES = 72
_OBJECT_BYTES, _LIST_BYTES, _WORD_BYTES = 16, 40, 8
_MAX_ROOM = 64
"""A list of some items has room for no more."""


@functools.cache
def can_read_arrays() -> bool:
    """Whether the places above are true in this process."""
    if sys.implementation.name != "cpython" or struct.calcsize("P") != _WORD_BYTES:
        return False
    if "t" in sys.abiflags or hasattr(sys, "getobjects"):  # without the GIL, or traces references
        return False
    sizes = object.__basicsize__, list.__basicsize__
    if sizes != (_OBJECT_BYTES, _LIST_BYTES) or np.ndarray.__basicsize__ < _HEADER_BYTES:
        return False
    arrays = _samples()
    return _items(arrays) == [id(array) for array in arrays] and all(map(_is_as_described, arrays))


def dtype_addresses(dtype: np.dtype[Any]) -> tuple[int, int]:
    """The dtype objects that arrays of this type usually have: NumPy knows two for some integers of one size."""
    same = [np.dtype(code) for code in np.typecodes["AllInteger"] if np.dtype(code) == dtype]
    first, last = same[0] if same else dtype, same[-1] if same else dtype
    return id(first), id(last)


def _samples() -> list[NDArray[Any]]:
    """Arrays that differ in all that is read."""
    numbers = np.arange(24, dtype=np.int64)
    read_only = np.arange(3.0)
    read_only.flags.writeable = False
    return [
        numbers,
        numbers.reshape(2, 3, 4),
        numbers.reshape(4, 6)[:, 1:3],
        numbers[3:].astype(np.int32),
        np.zeros((0, 5), np.float32),
        np.asfortranarray(np.ones((3, 2))),
        numbers.astype(">i8"),
        np.array(1.5),
        read_only,
    ]


def _items(items: list[Any]) -> list[int]:
    """The addresses of a list's items; none where its sizes are not before and behind their address."""
    at = id(items) + LIST_ITEMS
    size, room = _int64(at - _WORD_BYTES), _int64(at + _WORD_BYTES)
    if size != len(items) or not size <= room <= _MAX_ROOM:
        return []
    return [_int64(_int64(id(items) + LIST_ITEMS) + _WORD_BYTES * i) for i in range(len(items))]


def _is_as_described(array: NDArray[Any]) -> bool:
    """Whether reading gives what Python says. Addresses are followed only after they were seen to be plausible."""
    at = id(array)
    sizes, strides = _int64(at + SIZES), _int64(at + STRIDES)
    known: Iterable[tuple[Callable[[int], int], int, int]] = (
        (_int64, OBJECT_TYPE, id(np.ndarray)),
        (_int64, DATA, array.ctypes.data),
        (_int32, RANK, array.ndim),
        (_int64, DTYPE, id(array.dtype)),
    )
    if any(read(at + place) != value for read, place, value in known):
        return False
    if bool(_int32(at + FLAGS) & C_CONTIGUOUS) != array.flags.c_contiguous:
        return False
    if array.ndim and strides - sizes != _WORD_BYTES * array.ndim:  # NumPy keeps them behind each other
        return False
    places = range(0, _WORD_BYTES * array.ndim, _WORD_BYTES)
    found = tuple(_int64(sizes + i) for i in places), tuple(_int64(strides + i) for i in places)
    return found == (array.shape, array.strides)


def _int64(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


def _int32(address: int) -> int:
    return ctypes.c_int32.from_address(address).value
