"""Arranges the candidates of a batch in blocks: all blocks have one length, and each has one context."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_BLOCK_COST = 16
"""What a block costs beside its rows, in rows: the context's values are copied for each."""


class Blocks(NamedTuple):
    """The positions of the candidates of a batch."""

    row_context: NDArray[np.int64]
    """The context of each row."""
    block_context: NDArray[np.int64]
    """The context of each block."""
    candidates: NDArray[np.int64] | None
    """The candidate in each row; None: they stand in their order. Rows that fill up a block repeat a candidate."""
    rows: NDArray[np.int64] | None
    """The row of each candidate; None as above."""


def arrange(counts: NDArray[np.int64], *, may_pad: bool) -> Blocks:
    """Blocks for contexts with these numbers of candidates; at least one block.

    Args:
        may_pad: whether blocks may be filled up by repeating candidates.
    """
    length = _block_length(counts, may_pad=may_pad)
    num_blocks = -(-counts // length)
    block_context = np.repeat(np.arange(len(counts)), num_blocks)
    row_context = np.repeat(block_context, length)
    if length * len(block_context) == counts.sum():
        return Blocks(row_context, block_context, None, None)
    begins, first_rows = np.cumsum(counts) - counts, length * (np.cumsum(num_blocks) - num_blocks)
    within = np.arange(len(row_context)) - first_rows[row_context]
    candidates = begins[row_context] + np.minimum(within, counts[row_context] - 1)
    rows = np.arange(counts.sum()) + np.repeat(first_rows - begins, counts)
    return Blocks(row_context, block_context, candidates, rows)


def _block_length(counts: NDArray[np.int64], *, may_pad: bool) -> int:
    present = counts[counts > 0]
    longest = int(present.max())
    if not may_pad or longest == present.min():
        return int(np.gcd.reduce(present))
    powers = 1 << np.arange(longest.bit_length())
    lengths = np.unique(np.append(powers, longest))
    blocks = (-(-present[:, None] // lengths)).sum(axis=0)
    return int(lengths[np.argmin(blocks * (lengths + _BLOCK_COST))])
