"""Sends keys to the ranks that own their rows, vectors back, and gradients again, by torch's collectives."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from hotrow.training.hash_embeddings.key_index import requests_by_owner
from hotrow.training.row_access import gather


class MessageExchange:
    """One look-up of all ranks, in messages of one size. Each calls the same methods in the same order.

    No rank has to know how many keys it gets before it gets them.
    """

    new_sums: Callable[[], Tensor] | None = None
    """Makes the zeros for the gradients of this rank's slots; None where they may be anywhere."""

    def __init__(self, keys: Tensor, num_ranks: int, message_size: int) -> None:
        """`keys`: int64 [n], of this rank's batch."""
        self.messages, self.places = self._exchange_messages(keys, num_ranks, message_size)
        """int64 [ranks * message_size], of all ranks to this one; and int64 [n], the slot of each key of this rank."""

    def _exchange_messages(self, keys: Tensor, num_ranks: int, message_size: int) -> tuple[Tensor, Tensor]:
        messages, places = requests_by_owner(keys, num_ranks, message_size)
        return _exchanged(messages), places

    def answers(self, table: Tensor, rows: Tensor) -> Tensor:
        """Rows of a table, int64 [slots], of the messages to this rank, to the vectors of its slots, [slots, dim]."""
        return _exchanged(gather(table, rows))

    def gradients(self, sums: Tensor, rows: Tensor) -> Tensor:
        """The gradients of this rank's slots to those of the messages to it, both [slots, dim]; `rows` as before."""
        return _exchanged(sums)


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


def _exchanged(values: Tensor, received: list[int] | None = None, sent: list[int] | None = None) -> Tensor:
    """Without numbers, each rank sends as much to each."""
    num_received = len(values) if received is None else sum(received)
    output = values.new_empty((num_received, *values.shape[1:]))
    dist.all_to_all_single(output, values.contiguous(), received, sent)
    return output
