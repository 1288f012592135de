"""Sends keys to the ranks that own their rows, vectors back, and gradients again, by torch's collectives."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


class KeyExchange:
    """One look-up of all ranks. Each calls the same methods in the same order."""

    def __init__(self, counts: Tensor) -> None:
        """`counts`: int64 [ranks]: how many keys this rank requests from each, ordered by ranks."""
        both = counts.new_empty((2, len(counts)))
        both[0] = counts
        dist.all_to_all_single(both[1], both[0])
        self._sent, self._received = both.tolist()

    @property
    def num_keys(self) -> int:
        """The keys that this rank requests."""
        return sum(self._sent)

    def to_owners(self, values: Tensor) -> Tensor:
        """[n, ...] of this rank's keys to [m, ...] of the keys that all ranks request from this one."""
        return _exchanged(values, self._received, self._sent)

    def back(self, values: Tensor) -> Tensor:
        """[m, ...] of the keys that were requested from this rank to [n, ...] of this rank's keys."""
        return _exchanged(values, self._sent, self._received)


def _exchanged(values: Tensor, received: list[int], sent: list[int]) -> Tensor:
    output = values.new_empty((sum(received), *values.shape[1:]))
    dist.all_to_all_single(output, values.contiguous(), received, sent)
    return output
