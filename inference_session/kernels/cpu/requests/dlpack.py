"""Describes outputs as DLPack does, so that their consumer needs neither NumPy nor Python."""

from __future__ import annotations

from typing import Any

import numpy as np

from inference_session.kernels.array_headers import (
    C_CONTIGUOUS,
    DATA,
    DTYPE,
    FLAGS,
    LIST_ITEMS,
    OBJECT_TYPE,
    RANK,
    SIZES,
)
from inference_session.kernels.cpu.arguments import array_at, int_at
from inference_session.kernels.cpu.intrinsics import copy_bytes, kernel, load
from inference_session.kernels.machine_code import of_ints

MAX_RANK = 8
DESCRIBED, NOT_DESCRIBED, NO_ROOM = range(3)
"""What `describe_rows` returns: all are described; an array has no such description, or is too large; values have no
room.
"""
_BYTE = np.dtype(np.uint8)
_LINE = 64

MANAGED_TENSOR = np.dtype(
    [
        ("data", np.int64),
        ("device_type", np.int32),
        ("device_id", np.int32),
        ("rank", np.int32),
        ("kind", np.uint8),
        ("bits", np.uint8),
        ("lanes", np.uint16),
        ("shape_address", np.int64),
        ("strides_address", np.int64),  # 0: contiguous
        ("byte_offset", np.int64),
        ("context", np.int64),
        ("deleter", np.int64),
        ("shape", np.int64, MAX_RANK),  # ours: where `shape_address` points to
    ],
    align=True,
)
"""DLManagedTensor (dlpack.h, version 0), and its shape."""
ELEMENT = np.dtype(
    [("dtypes", np.int64, 2), ("bytes", np.int64), ("kind", np.int64)],  # addresses of NumPy's objects for it
    align=True,
)
"""A type of elements."""


@kernel
def describe_rows(arguments: int, items: int, num_arrays: int, counts: int, copies: int) -> int:
    """Copy some arrays, and describe the rows of each request in the copies.

    Args:
        arguments: address of Arguments:
            array_type: address of NumPy's type of arrays.
            max_bytes: of the rows of one request in one array, on average.
            elements: ELEMENT records of the types that are known.
            tensors: receives MANAGED_TENSOR records, request after request, whose other fields are set.
            values: uint8, receives the elements of the arrays.
        items: address of a list of arrays, in each of which the rows of one request follow those of the other.
        num_arrays: its length.
        counts: address of an array, int64 [requests], contiguous: the rows of each.
        copies: whether they are copied; 0: they are described where they are.
    """
    array_type, max_bytes = int_at(arguments, 0), int_at(arguments, 1)
    elements, tensors = array_at(arguments, 2, ELEMENT), array_at(arguments, 3, MANAGED_TENSOR)
    values, num_bytes = int_at(arguments, 4), len(array_at(arguments, 4, _BYTE))
    arrays, total, begin = load(items + LIST_ITEMS, np.int64, 0), np.int64(0), np.int64(0)
    num_requests, counts = load(load(counts + SIZES, np.int64, 0), np.int64, 0), load(counts + DATA, np.int64, 0)
    for r in range(num_requests):
        total += load(counts, np.int64, r)
    for a in range(num_arrays):
        array = load(arrays, np.int64, a)
        if load(array + OBJECT_TYPE, np.int64, 0) != array_type:
            return NOT_DESCRIBED
        row_bytes, element = _row_bytes(array, total, elements), _element_of(array, elements)
        if row_bytes <= 0 or total <= 0 or row_bytes > max_bytes * num_requests // total:
            return NOT_DESCRIBED
        data = load(array + DATA, np.int64, 0)
        if copies:
            if row_bytes * total > num_bytes - begin:
                return NO_ROOM
            copy_bytes(values + begin, data, row_bytes * total)
            data = values + begin
            begin = min((begin + row_bytes * total + _LINE - 1) // _LINE * _LINE, num_bytes)
        for r in range(num_requests):
            tensor, count = tensors[r * num_arrays + a], load(counts, np.int64, r)
            tensor.data, tensor.kind, tensor.bits = data, elements[element].kind, 8 * elements[element].bytes
            _copy_shape(array, count, tensor)
            data += row_bytes * count
    return DESCRIBED


@kernel
def _row_bytes(array: int, num_rows: int, elements: Any) -> Any:
    """Bytes of a row; 0: the array cannot be described, or has another number of rows."""
    rank, sizes, element = (
        load(array + RANK, np.int32, 0),
        load(array + SIZES, np.int64, 0),
        _element_of(array, elements),
    )
    if element < 0 or rank < 1 or rank > MAX_RANK or not load(array + FLAGS, np.int32, 0) & C_CONTIGUOUS:
        return 0
    if load(sizes, np.int64, 0) != num_rows:
        return 0
    num_bytes = elements[element].bytes
    for axis in range(1, rank):
        num_bytes *= load(sizes, np.int64, axis)
    return num_bytes


@kernel
def _copy_shape(array: int, num_rows: int, tensor: Any) -> None:
    """The shape of some rows of an array."""
    sizes = load(array + SIZES, np.int64, 0)
    tensor.rank, tensor.shape[0] = load(array + RANK, np.int32, 0), num_rows
    for axis in range(1, tensor.rank):
        tensor.shape[axis] = load(sizes, np.int64, axis)


@kernel
def _element_of(array: int, elements: Any) -> Any:
    """The number of the type of an array's elements; -1: it is none of these."""
    dtype = load(array + DTYPE, np.int64, 0)
    for i in range(len(elements)):
        if elements[i].dtypes[0] == dtype or elements[i].dtypes[1] == dtype:
            return i
    return -1


def compile_kernels() -> None:
    """Compile what is here, or load it from Numba's cache."""
    of_ints(describe_rows)
