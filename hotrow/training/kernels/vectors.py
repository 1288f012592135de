"""Vectors of a table by their rows: read, written, added up."""

from __future__ import annotations

from typing import Any

import numpy as np

from inference_session.kernels.cpu.intrinsics import kernel, load, store
from inference_session.kernels.cpu.vectors import copy_vector, prefetch_vector_near
from inference_session.kernels.records import VectorCode

_FLOAT32 = int(VectorCode.FLOAT32)
_AHEAD = 16
"""Vectors between the one that is prefetched and the one in use."""


@kernel
def gather(table: int, dim: int, rows: Any, output: int) -> None:
    """Write the vectors of rows (int64 [n]) to output (address of float32 [n, dim])."""
    row_bytes = 4 * dim
    for i in range(len(rows)):
        if i + _AHEAD < len(rows):
            prefetch_vector_near(table + rows[i + _AHEAD] * row_bytes, row_bytes)
        copy_vector(output + i * row_bytes, table + rows[i] * row_bytes, _FLOAT32, dim)


@kernel
def scatter(table: int, dim: int, rows: Any, vectors: int) -> None:
    """Write vectors (address of float32 [n, dim]) to their rows."""
    row_bytes = 4 * dim
    for i in range(len(rows)):
        copy_vector(table + rows[i] * row_bytes, vectors + i * row_bytes, _FLOAT32, dim)


@kernel
def add_up(sums: int, dim: int, rows: Any, vectors: int, has_sources: bool, sources: Any, factors: Any) -> None:
    """Add vectors (address of float32 [any, dim]) to the rows of sums that `rows` (int64 [n]) names, in their order.

    sources: int64 [n], which vector is added to each, where `has_sources`; else they are in the order of `rows`.
    factors: float32 [n], or [0] where all are 1.
    """
    row_bytes = 4 * dim
    for i in range(len(rows)):
        if i + _AHEAD < len(rows):
            prefetch_vector_near(sums + rows[i + _AHEAD] * row_bytes, row_bytes)
        total = sums + rows[i] * row_bytes
        vector = vectors + (sources[i] if has_sources else i) * row_bytes
        if len(factors) == 0:
            for d in range(dim):
                store(total, np.float32, d, load(total, np.float32, d) + load(vector, np.float32, d))
        else:
            factor = factors[i]
            for d in range(dim):
                store(total, np.float32, d, load(total, np.float32, d) + load(vector, np.float32, d) * factor)
