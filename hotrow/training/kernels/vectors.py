"""Vectors of a table by their rows: read, written, added up.

Tables and vectors are contiguous arrays. Not their addresses: a caller could free what these point to.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from inference_session.kernels.cpu.intrinsics import kernel, load, store
from inference_session.kernels.cpu.vectors import copy_vector, prefetch_vector
from inference_session.kernels.records import VectorCode

_FLOAT32 = int(VectorCode.FLOAT32)
_AHEAD = 16
"""Vectors between the one that is prefetched and the one in use."""


@kernel
def gather(table: Any, rows: Any, output: Any) -> None:
    """Write the vectors of rows, int64 [n], of a table, float32 [any, dim], to output, float32 [n, dim]."""
    dim, source, target = table.shape[1], table.ctypes.data, output.ctypes.data
    row_bytes = 4 * dim
    for i in range(len(rows)):
        if i + _AHEAD < len(rows):
            prefetch_vector(source + rows[i + _AHEAD] * row_bytes, row_bytes)
        copy_vector(target + i * row_bytes, source + rows[i] * row_bytes, _FLOAT32, dim)


@kernel
def scatter(table: Any, rows: Any, vectors: Any) -> None:
    """Write vectors, float32 [n, dim], to rows, int64 [n], of a table, float32 [any, dim]."""
    dim, target, source = table.shape[1], table.ctypes.data, vectors.ctypes.data
    row_bytes = 4 * dim
    for i in range(len(rows)):
        copy_vector(target + rows[i] * row_bytes, source + i * row_bytes, _FLOAT32, dim)


@kernel
def add_up(sums: Any, rows: Any, vectors: Any, has_sources: bool, sources: Any, factors: Any) -> None:
    """Add vectors, float32 [any, dim], to the rows of sums, float32 [any, dim], that `rows` names, in their order.

    rows: int64 [n].
    sources: int64 [n], which vector is added to each, where `has_sources`; else they are in the order of `rows`.
    factors: float32 [n], or [0] where all are 1.
    """
    dim, totals, added = sums.shape[1], sums.ctypes.data, vectors.ctypes.data
    row_bytes = 4 * dim
    for i in range(len(rows)):
        if i + _AHEAD < len(rows):
            prefetch_vector(totals + rows[i + _AHEAD] * row_bytes, row_bytes)
        total = totals + rows[i] * row_bytes
        vector = added + (sources[i] if has_sources else i) * row_bytes
        if len(factors) == 0:
            for d in range(dim):
                store(total, np.float32, d, load(total, np.float32, d) + load(vector, np.float32, d))
        else:
            factor = factors[i]
            for d in range(dim):
                store(total, np.float32, d, load(total, np.float32, d) + load(vector, np.float32, d) * factor)
