"""What becomes of a vector: asked for, copied, widened, pooled."""

from __future__ import annotations

from typing import Any, NamedTuple

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
"""Elements that pooling handles at a time."""
MAX_PREFETCH_BYTES = 1024
"""Of one vector; the processor's own prefetcher follows a longer one."""
LINE_BYTES = 64

_FLOAT32, _FLOAT16 = int(VectorCode.FLOAT32), int(VectorCode.FLOAT16)
_MEAN, _MAX = int(PoolingCode.MEAN), int(PoolingCode.MAX)


@kernel
def prefetch_vector(vector: int, row_bytes: int) -> None:
    """Ask for all lines of a vector, or the first ones of a long vector."""
    prefetch(vector)
    if (vector & (LINE_BYTES - 1)) + row_bytes > LINE_BYTES:  # a test costs less than a loop that runs once
        end = vector + min(row_bytes, MAX_PREFETCH_BYTES)
        for line in range((vector | (LINE_BYTES - 1)) + 1, end, LINE_BYTES):
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


class Share(NamedTuple):
    """The part that a vector has in its bag."""

    pooling: int
    weight: float
    place: int
    """Of the vector in its bag, from 0."""
    length: int
    """Vectors in the bag."""


@kernel
def pool_vector(output: int, source: int, code: int, dim: int, share: Any, scratch: Any) -> None:
    """Let one vector take part in its bag. `scratch`: float32[CHUNK]; a source of 0 is a vector of zeros."""
    for begin in range(0, dim, CHUNK):
        count = min(CHUNK, dim - begin)
        vector = source + 4 * begin
        if source == 0 or code != _FLOAT32:
            vector = scratch.ctypes.data
            _widen(vector, source, code, dim, begin, count)
        _pool_chunk(output + 4 * begin, vector, count, share)


@kernel
def _pool_chunk(output: int, vector: int, count: int, share: Any) -> None:
    """The first vector of a bag sets the output, further ones take part, the last one of a mean divides."""
    weight, length = np.float32(share.weight), np.float32(share.length)
    if share.place == 0:
        for d in range(count):
            store(output, np.float32, d, load(vector, np.float32, d) * weight)
    elif share.pooling == _MAX:
        for d in range(count):
            store(output, np.float32, d, _maximum(load(output, np.float32, d), load(vector, np.float32, d)))
    else:
        for d in range(count):
            store(output, np.float32, d, load(output, np.float32, d) + load(vector, np.float32, d) * weight)
    if share.pooling == _MEAN and share.place == share.length - 1:
        for d in range(count):
            store(output, np.float32, d, load(output, np.float32, d) / length)


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
