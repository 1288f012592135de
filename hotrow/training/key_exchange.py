"""Sends keys to the ranks that own their rows, vectors back, and gradients again, by torch's collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def owners(keys: Tensor, num_ranks: int) -> Tensor:
    """The rank of each key's row: key % num_ranks, also for negative keys."""
    return torch.remainder(keys, num_ranks)


def by_owner(keys: Tensor, places: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Keys, int64 [n], ordered by their owners, and the new places of given places in `keys`, int64 [any]."""
    order = torch.argsort(owners(keys, num_ranks).to(torch.int32), stable=True)
    moved_to = torch.empty_like(order)
    moved_to[order] = torch.arange(len(order), device=order.device)
    return keys[order], moved_to[places]


class KeyExchange:
    """One look-up of all ranks. Each calls the same methods in the same order."""

    def __init__(self, keys: Tensor, num_ranks: int) -> None:
        """`keys`: int64 [n], each once, ordered `by_owner`: what this rank looks up."""
        ranks = torch.arange(num_ranks + 1, device=keys.device)
        sent = torch.searchsorted(owners(keys, num_ranks), ranks).diff()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        self._sent, self._received = torch.stack([sent, received]).tolist()

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
