"""What look-ups promise of the sums of bags."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inference_session.kernels.cpu.vectors import SUM_BLOCK
from inference_session.kernels.records import PoolingCode

LENGTHS = 0, 1, 2, 31, 32, 33, 63, 64, 65, 200, 10_000, 100_000
"""Keys of bags: around one block and two, and more."""


def summed(vectors: NDArray[np.float32], pooling: PoolingCode = PoolingCode.SUM) -> NDArray[np.float32]:
    """The sum or mean of vectors [n, dim] to the last bit: blocks of SUM_BLOCK, one vector after the other.

    The sums of blocks are added up in float64.
    """
    if len(vectors) == 0:
        return np.zeros(vectors.shape[1], np.float32)
    blocks = [_in_turn(vectors[begin : begin + SUM_BLOCK]) for begin in range(0, len(vectors), SUM_BLOCK)]
    total = np.cumsum(blocks, axis=0, dtype=np.float64)[-1].astype(np.float32)
    return total / np.float32(len(vectors)) if pooling == PoolingCode.MEAN else total


def most_error(vectors: NDArray[np.float32], pooling: PoolingCode = PoolingCode.SUM) -> NDArray[np.float64]:
    """How far the sum or mean of vectors [n, dim] may be from the exact one, for each element.

    Each rounding to float32 may be off by half of eps of its result: of the additions of a block, SUM_BLOCK at most, of
    the whole sum, and of the division of a mean.
    """
    num_roundings = SUM_BLOCK + 2
    error = num_roundings * np.finfo(np.float32).eps / 2 * np.abs(vectors).sum(axis=0, dtype=np.float64)
    return error / max(len(vectors), 1) if pooling == PoolingCode.MEAN else error


def _in_turn(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.cumsum(vectors, axis=0, dtype=np.float32)[-1]  # unlike `sum`, which adds up pairs
