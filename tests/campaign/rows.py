"""Vectors that encode their table, key, owner and write, with a check digit.

All elements are whole numbers below 1000, which float16 holds as well as float32.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

EMBEDDING_DIM = 8
_BASE = 1000
_WEIGHTS = np.array([3, 7, 31, 127, 211, 307, 401])
_MODULUS = 997

Integers = NDArray[np.int64]


class DecodedRows(NamedTuple):
    """The decoded vectors; arrays of one element per vector."""

    whole: NDArray[np.bool_]
    """It is a row of the table and key that were asked for. Elsewhere the other arrays mean nothing."""
    tags: Integers
    """Whose row it is: the content whose files or whose writer it came from, 0 for the update stream."""
    numbers: Integers
    """Which write of its key it is, counted from 1; 0: the row in the files."""


def encode(table: int, keys: Integers, tags: Integers | int, numbers: Integers | int) -> NDArray[np.float32]:
    """Rows float32 [n, 8] of a table, of keys by their positions among the table's keys."""
    fields = np.stack(np.broadcast_arrays(np.asarray(keys), tags, numbers))
    digits = np.empty((fields.shape[1], EMBEDDING_DIM), np.int64)
    digits[:, 0] = table + 1
    digits[:, 1:7:2], digits[:, 2:7:2] = fields.T // _BASE, fields.T % _BASE
    digits[:, 7] = 1 + digits[:, :7] @ _WEIGHTS % _MODULUS
    return digits.astype(np.float32)


def decode(table: int, keys: Integers, vectors: NDArray[np.float32]) -> DecodedRows:
    """Read vectors [n, 8] that were answered for these keys of a table."""
    with np.errstate(invalid="ignore"):
        digits = np.nan_to_num(vectors, nan=-1, posinf=-1, neginf=-1).astype(np.int64)
    fields = digits[:, 1:7:2] * _BASE + digits[:, 2:7:2]
    expected = encode(table, keys, fields[:, 1], fields[:, 2])
    return DecodedRows((vectors == expected).all(axis=1), fields[:, 1], fields[:, 2])
