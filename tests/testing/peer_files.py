"""Memory that all ranks of a job write, as linked GPUs have it, in files; and what kernels do with it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from hotrow.training.hash_embeddings import peer_memory
from hotrow.training.hash_embeddings.key_index import Distinct, requested, requests_by_owner


def install(folder: Path) -> None:
    """From now on, this rank's processor has such memory, as if it were a GPU. All ranks give the same folder."""
    replaced: Any = peer_memory
    replaced._is_linked = lambda device: True
    replaced.number_by_owner = _number_by_owner
    replaced.device_rows = SimpleNamespace(
        can_run=lambda device: True, current_stream=lambda device: 0, exchange=_exchange
    )
    torch.cuda.synchronize = lambda device=None: None
    sys.modules["torch.distributed._symmetric_memory"] = _Symmetric(folder)  # type: ignore[assignment]


class _Symmetric:
    """In place of torch's module."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def empty(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of this rank, full of NaN."""
        self._count += 1
        return self._of(dist.get_rank(), size, dtype).fill_(torch.nan)

    def rendezvous(self, whole: Tensor, group: Any) -> _Handle:
        """Where that of all ranks is."""
        dist.barrier()
        ranks = range(dist.get_world_size())
        own = dist.get_rank()
        return _Handle([whole if rank == own else self._of(rank, len(whole), whole.dtype) for rank in ranks])

    def _of(self, rank: int, size: int, dtype: torch.dtype) -> Tensor:
        return torch.from_file(str(self._folder / f"memory{self._count}_{rank}"), True, size, dtype=dtype)


class _Handle:
    def __init__(self, parts: list[Tensor]) -> None:
        self._parts, self.buffer_ptrs = parts, [part.data_ptr() for part in parts]

    def barrier(self, *, channel: int, timeout_ms: int) -> None:
        assert (channel, timeout_ms > 0) == (0, True)
        dist.barrier()


def _at(address: int, size: int, dtype: Any) -> NDArray[Any]:
    """The array there."""
    described = {"version": 3, "shape": (size,), "typestr": np.dtype(dtype).str, "data": (address, False)}
    return np.asarray(SimpleNamespace(__array_interface__=described))


def _number_by_owner(  # noqa: PLR0917  as those of device_rows
    keys: Tensor, found: Tensor, num_owners: int, message_size: int, outputs: Tensor, rank: int
) -> Distinct:
    messages, places = requests_by_owner(keys, num_owners, message_size)
    for owner, address in enumerate(outputs.tolist()):
        of_all_ranks = _at(address, num_owners * message_size, np.int64).reshape(num_owners, message_size)
        of_all_ranks[rank] = messages.view(num_owners, message_size)[owner]
    return Distinct(found, places, messages[::message_size])


def _exchange(  # noqa: PLR0917
    way: str,
    table: Tensor,
    rows: Tensor,
    messages: Tensor,
    message_size: int,
    rank: int,
    peers: Tensor,
    rate: float = 0.0,
    zeros: Tensor | None = None,
) -> None:
    if zeros is not None:
        zeros.zero_()
    dim, is_key = table.shape[1], requested(messages, message_size)
    own = slice(rank * message_size, (rank + 1) * message_size)
    for other, address in enumerate(peers.tolist()):
        there = torch.from_numpy(_at(address, len(messages) * dim, np.float32)).view(-1, dim)[own]
        slots = slice(other * message_size, (other + 1) * message_size)
        which = is_key[slots]
        if way == "send_rows":
            there[which] = table[rows[slots][which]]
        elif way == "fetch_rows":
            table[slots][which] = there[which]
        else:
            which = which & (rows[slots] != 0)
            table.index_add_(0, rows[slots][which], there[which], alpha=rate)
