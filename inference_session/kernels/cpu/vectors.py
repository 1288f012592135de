"""What becomes of a vector: asked for, copied, widened, pooled."""

from __future__ import annotations

from typing import Any

import numpy as np

from inference_session.kernels.cpu.intrinsics import (
    copy_4_floats,
    copy_16_floats,
    half_to_float,
    kernel,
    load,
    prefetch,
    store,
)
from inference_session.kernels.records import PoolingCode, VectorCode

CHUNK = 256
"""Elements that pooling widens at a time."""
SUM_BLOCK = 32
"""Vectors of a bag that are added up one after the other in float32. Such sums are added up in double precision.

So a sum of many vectors has about as many exact digits as float32 has.
"""
MAX_PREFETCH_BYTES = 1024
"""Of one vector; the processor's own prefetcher follows a longer one."""
LINE_BYTES = 64

_FLOAT32, _FLOAT16 = int(VectorCode.FLOAT32), int(VectorCode.FLOAT16)
_MEAN, _MAX = int(PoolingCode.MEAN), int(PoolingCode.MAX)


@kernel
def prefetch_vector(vector: int, row_bytes: int) -> None:
    """Ask for all lines of a vector, or the first ones of a long vector.

    Where in a line a vector begins decides whether it needs one line more. A test of that costs more than to ask twice
    for the last line: vectors of int8 begin anywhere, and processors cannot foresee where.
    """
    end = vector + min(row_bytes, MAX_PREFETCH_BYTES)
    prefetch(vector)
    prefetch(end - 1)
    if row_bytes > LINE_BYTES:  # a test costs less than a loop that runs once
        for line in range(vector + LINE_BYTES, end, LINE_BYTES):
            prefetch(line)


@kernel
def copy_vector(output: int, source: int, code: int, dim: int) -> None:
    """Write a stored vector as float32."""
    if code == _FLOAT32:
        copy_floats(output, source, dim)
    else:
        _widen(output, source, code, dim, 0, dim)


@kernel
def copy_floats(output: int, source: int, count: int) -> None:
    """Copy float32 values. The last of several wide moves overlaps the one before, so that no tail is left."""
    end = 4 * count
    if count >= 16:
        copy_16_floats(output, source)
        if count > 16:  # a test costs less than a loop that runs once
            for i in range(1, count // 16):
                copy_16_floats(output + 64 * i, source + 64 * i)
            if count % 16 != 0:
                copy_16_floats(output + end - 64, source + end - 64)
    elif count >= 4:
        for i in range(count // 4):
            copy_4_floats(output + 16 * i, source + 16 * i)
        copy_4_floats(output + end - 16, source + end - 16)
    else:
        for i in range(count):
            store(output, np.float32, i, load(source, np.float32, i))


@kernel
def pool_vector(
    total: int, source: int, code: int, dim: int, weight: float, begins: bool, is_max: bool, scratch: Any
) -> None:
    """Add a vector times its weight to `total`, or take the larger elements; a vector that `begins` sets it.

    `scratch`: float32[CHUNK]; a source of 0 is a vector of zeros.
    """
    if source != 0 and code == _FLOAT32:
        _pool_floats(total, source, dim, weight, begins, is_max)
        return
    for begin in range(0, dim, CHUNK):
        count = min(CHUNK, dim - begin)
        _widen(scratch.ctypes.data, source, code, dim, begin, count)
        _pool_floats(total + 4 * begin, scratch.ctypes.data, count, weight, begins, is_max)


@kernel
def _pool_floats(total: int, vector: int, count: int, weight: float, begins: bool, is_max: bool) -> None:
    if begins:
        for d in range(count):
            store(total, np.float32, d, load(vector, np.float32, d) * weight)
    elif is_max:
        for d in range(count):
            store(total, np.float32, d, _maximum(load(total, np.float32, d), load(vector, np.float32, d)))
    else:
        for d in range(count):
            store(total, np.float32, d, load(total, np.float32, d) + load(vector, np.float32, d) * weight)


@kernel
def take_sums(sums: int, vector: int, count: int, begins: bool) -> None:
    """Add float32 values to sums in float64; those that `begins` set them."""
    if begins:
        fill_zeros(sums, 2 * count)
    for d in range(count):
        store(sums, np.float64, d, load(sums, np.float64, d) + load(vector, np.float32, d))


@kernel
def add_sums(vector: int, sums: int, count: int) -> None:
    """Add sums in float64 to float32 values."""
    for d in range(count):
        store(vector, np.float32, d, np.float32(load(sums, np.float64, d) + load(vector, np.float32, d)))


@kernel
def divide_floats(total: int, count: int, divisor: float) -> None:
    """Divide float32 values by a number."""
    for d in range(count):
        store(total, np.float32, d, load(total, np.float32, d) / divisor)


@kernel
def _maximum(a: float, b: float) -> float:
    """A NaN wins, as in NumPy and the frameworks."""
    return b if b > a or b != b else a  # noqa: PLR0124


@kernel
def _widen(output: int, source: int, code: int, dim: int, begin: int, count: int) -> None:
    """Write elements of a float16 or int8 vector, from `begin` on, as float32; a vector at address 0 is zeros."""
    if source == 0:
        fill_zeros(output, count)
    elif code == _FLOAT16:
        for d in range(count):
            store(output, np.float32, d, half_to_float(load(source, np.uint16, begin + d)))
    else:
        scale, bias = load(source + dim, np.float32, 0), load(source + dim, np.float32, 1)
        for d in range(count):
            store(output, np.float32, d, np.float32(load(source, np.int8, begin + d)) * scale + bias)


@kernel
def fill_zeros(output: int, count: int) -> None:
    """Set this many float32 to zero."""
    for d in range(count):
        store(output, np.float32, d, np.float32(0))
