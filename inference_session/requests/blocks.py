"""Arranges the candidates of a batch in blocks: all blocks have one length, and each has one context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_BLOCK_COST = 16
"""The cost of a block in addition to its rows, counted in rows: the context's values are copied for each block."""
_MAX_FILL, _MAX_FILLED = 2000, 4000
"""A batch may be filled up to a size that is replayed. These limit the rows that are added, and all rows of the batch
then. A replay saves about 0.25 ms of launches. In that time an H200 computes 3,600 rows of a network with attention by
an MLP; the host takes longer than that to move 16,000 rows.
"""


class Blocks(NamedTuple):
    """The positions of the candidates of a batch."""

    row_context: NDArray[np.int64]
    """The context of each row."""
    block_context: NDArray[np.int64]
    """The context of each block."""
    candidates: NDArray[np.int64] | None
    """The candidate in each row; None: in order. Rows that fill up a block repeat a candidate."""
    rows: NDArray[np.int64] | None
    """The row of each candidate; None: in order."""
    num_contexts: int
    """The contexts of the batch. Where it is filled up, the last one is repeated, and counts each time."""


def arrange(counts: NDArray[np.int64], *, may_pad: bool, replayed: Sequence[tuple[int, int]] = ()) -> Blocks:
    """Blocks for contexts with these numbers of candidates, [contexts]; at least one block.

    Args:
        may_pad: whether blocks may be filled up by repeating candidates, and added.
        replayed: contexts, and candidates of each, of batches that the device replays: a slightly smaller one is filled
            up to one of these.
    """
    nearest = _nearest(counts, replayed) if may_pad else None
    length = nearest[1] if nearest else _block_length(counts, may_pad=may_pad)
    num_blocks = -(-counts // length)
    block_context = np.repeat(np.arange(len(counts)), num_blocks)
    num_contexts = len(counts)
    if nearest:
        num_contexts = nearest[0]
        num_missing = num_contexts - len(block_context)
        block_context = np.append(block_context, np.full(num_missing, block_context[-1]))
    row_context = np.repeat(block_context, length)
    if length * len(block_context) == counts.sum():
        return Blocks(row_context, block_context, None, None, num_contexts)
    begins, first_rows = np.cumsum(counts) - counts, length * (np.cumsum(num_blocks) - num_blocks)
    within = np.arange(len(row_context)) - first_rows[row_context]
    candidates = begins[row_context] + np.minimum(within, counts[row_context] - 1)
    rows = np.arange(counts.sum()) + np.repeat(first_rows - begins, counts)
    return Blocks(row_context, block_context, candidates, rows, num_contexts)


def _nearest(counts: NDArray[np.int64], replayed: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """The smallest of the replayed sizes that has room for these contexts; None: it is too large, or there is none."""
    least, longest, total = len(counts), int(counts.max()), int(counts.sum())
    fitting = [size for size in replayed if size[0] >= least and size[1] >= longest]
    nearest = min(fitting, key=lambda size: size[0] * size[1], default=None)
    if nearest is None:
        return None
    num_rows = nearest[0] * nearest[1]
    return nearest if num_rows == total or (num_rows <= _MAX_FILLED and num_rows - total <= _MAX_FILL) else None


def _block_length(counts: NDArray[np.int64], *, may_pad: bool) -> int:
    present = counts[counts > 0]
    longest = int(present.max())
    if not may_pad or longest == present.min():
        return int(np.gcd.reduce(present))
    powers = 1 << np.arange(longest.bit_length())
    lengths = np.unique(np.append(powers, longest))
    blocks = (-(-present[:, None] // lengths)).sum(axis=0)
    return int(lengths[np.argmin(blocks * (lengths + _BLOCK_COST))])
