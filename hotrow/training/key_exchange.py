"""Sends keys to the ranks that own their rows, vectors back, and gradients again, by torch's collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class KeyExchange:
    """One look-up of all ranks. Each calls the same methods in the same order."""

    def __init__(self, counts: Tensor) -> None:
        """`counts`: int64 [ranks]: how many keys this rank requests from each, ordered by ranks."""
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        self._sent, self._received = torch.stack([counts, received]).tolist()

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
    if not values.is_cuda:
        dist.all_to_all_single(output, values.contiguous(), received, sent)
        return output
    # NCCL is not given what stays on this rank: a copy is faster, and runs beside the exchange.
    outputs, inputs = list(output.split(received)), list(values.contiguous().split(sent))
    rank = dist.get_rank()
    own_output, own_input = outputs[rank], inputs[rank]
    outputs[rank], inputs[rank] = own_output[:0], own_input[:0]
    exchange = dist.all_to_all(outputs, inputs, async_op=True)
    own_output.copy_(own_input)
    exchange.wait()
    return output
