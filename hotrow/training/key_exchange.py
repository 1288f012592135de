"""Keys of this rank to the ranks that own their rows, vectors back, and gradients again: torch's collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def owners(keys: Tensor, num_ranks: int) -> Tensor:
    """The rank of each key's row: key % num_ranks, also for negative keys."""
    return torch.remainder(keys, num_ranks)


class KeyExchange:
    """One look-up of all ranks. Each calls the same methods in the same order."""

    def __init__(self, keys: Tensor, num_ranks: int) -> None:
        """`keys`: int64 [n], each once, what this rank looks up."""
        owner = owners(keys, num_ranks)
        self._order = torch.argsort(owner, stable=True)
        sent = torch.bincount(owner, minlength=num_ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        self._sent: list[int] = sent.tolist()
        self._received: list[int] = received.tolist()

    def to_owners(self, values: Tensor) -> Tensor:
        """[n, ...] of this rank's keys to [m, ...] of the keys that all ranks ask of this one."""
        return _exchanged(values[self._order], self._received, self._sent)

    def back(self, values: Tensor) -> Tensor:
        """[m, ...] of the keys that were asked of this rank to [n, ...] of this rank's keys."""
        received = _exchanged(values, self._sent, self._received)
        ordered = torch.empty_like(received)
        ordered[self._order] = received
        return ordered


def _exchanged(values: Tensor, received: list[int], sent: list[int]) -> Tensor:
    output = values.new_empty((sum(received), *values.shape[1:]))
    dist.all_to_all_single(output, values.contiguous(), received, sent)
    return output
