"""Memory of this rank's GPU that the other ranks' GPUs write, where all of them are in one host and linked.

A collective would first copy rows into one piece, and then to the other GPUs; a kernel writes them there at once.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hotrow.training.hash_embeddings.key_exchange import MessageExchange
from hotrow.training.hash_embeddings.key_index import number_by_owner
from hotrow.training.kernels import device_rows
from hotrow.training.ranks import Ranks
from inference_session.platform.boot import boot_id

_ALIGNMENT = 64
"""Floats."""
_LOG = logging.getLogger(__name__)
_Made = TypeVar("_Made")


class PeerMemory:
    """Memory on the GPU of each rank, which all ranks write and read; `barrier` orders what they do."""

    def __init__(self, whole: Tensor, num_slots: int) -> None:
        """All ranks create it at the same time.

        Args:
            whole: what `_allocated` gave, of the same size on all ranks.
            num_slots: of messages; what follows behind them is for vectors, and as much for sums.

        Raises:
            RuntimeError: the other ranks' GPUs cannot access it.
        """
        import torch.distributed._symmetric_memory as symmetric

        self._handle: Any = symmetric.rendezvous(whole, dist.group.WORLD)
        addresses = [int(address) for address in self._handle.buffer_ptrs]
        if addresses[dist.get_rank()] != whole.data_ptr() or not all(addresses):
            raise RuntimeError("this memory does not begin where torch says that of each rank does")
        begin = _aligned(2 * num_slots)
        self.slots = whole[: 2 * num_slots].view(torch.int64)
        self.vectors, self.sums = whole[begin:].chunk(2)
        self.of_slots = torch.tensor(addresses, dtype=torch.int64, device=whole.device)
        """int64 [ranks]: where the slots of each rank are."""
        self.of_vectors = self.of_slots + 4 * begin
        """int64 [ranks]: where the vectors of each rank are."""
        self.of_sums = self.of_vectors + 4 * len(self.vectors)
        """int64 [ranks]: where the sums of each rank are."""
        self.num_zeros = 0
        """As many sums as this, from the first on, are zeros."""
        self.is_read = False
        """Whether other ranks may still read the sums."""
        self._stream: int | None = None
        self._timeout_ms = int(_timeout(whole.device).total_seconds() * 1000)
        self.barrier()  # fails here, not in a look-up, where torch has another one

    def follow(self) -> None:
        """Let what the current stream does with the memory come behind what another stream of this rank did with it."""
        stream = device_rows.current_stream(self.slots.get_device())
        if self._stream not in {None, stream}:
            torch.cuda.synchronize(self.slots.device)
        self._stream = stream

    def barrier(self) -> None:
        """What any rank has written before is there for all ranks afterwards. Waits on the GPU, not on the host.

        If a rank does not come within the timeout of the job's process group, kernels of the others fail.
        """
        self._handle.barrier(channel=0, timeout_ms=self._timeout_ms)
        self.is_read = False


class PeerExchange(MessageExchange):
    """As `MessageExchange`, by the memory of the ranks' GPUs.

    The memory is that of all look-ups: each part of one is done before the next part begins on any rank.
    """

    def __init__(self, memory: PeerMemory, keys: Tensor, num_ranks: int, message_size: int, dim: int) -> None:
        """`keys`: int64 [n], of this rank's batch."""
        self._memory, self._message_size, self._rank = memory, message_size, dist.get_rank()
        num_slots = num_ranks * message_size
        self._slots = memory.slots[:num_slots]
        self._vectors = memory.vectors[: num_slots * dim].view(num_slots, dim)
        self._sums = memory.sums[: num_slots * dim].view(num_slots, dim)
        self.new_sums = self._zeros
        memory.follow()
        super().__init__(keys, num_ranks, message_size)

    def _exchange_messages(self, keys: Tensor, num_ranks: int, message_size: int) -> tuple[Tensor, Tensor]:
        # All ranks have copied the messages of the look-up before: all have come to a barrier since then.
        outputs = self._memory.of_slots
        places = number_by_owner(keys, self._slots, num_ranks, message_size, outputs, self._rank).places
        self._memory.barrier()
        return self._slots.clone(), places

    def answers(self, table: Tensor, rows: Tensor) -> Tensor:
        """As `MessageExchange` says."""
        memory = self._memory
        # All ranks have read what was there before they sent messages. Zeros cost nothing here: links are the limit.
        self._exchange("send_rows", table, rows, memory.of_vectors, zeros=self._sums)
        memory.num_zeros = max(memory.num_zeros, self._sums.numel())
        memory.barrier()
        return self._vectors

    def gradients(self, sums: Tensor, rows: Tensor) -> Tensor:
        """As `MessageExchange` says, of the `new_sums` of all ranks; those of slots without a key mean nothing."""
        self._memory.barrier()
        gradients = torch.empty_like(self._sums)
        self._exchange("fetch_rows", gradients, rows, self._memory.of_sums)
        self._memory.is_read = True
        return gradients

    def learn(self, table: Tensor, rows: Tensor, rate: float) -> None:
        """Add the gradients in the `new_sums` of all ranks to rows [n] of a table [any, dim], times a rate."""
        self._memory.barrier()
        self._exchange("learn_rows", table, rows, self._memory.of_sums, rate)
        self._memory.is_read = True

    def _zeros(self) -> Tensor:
        memory = self._memory
        memory.follow()
        if memory.num_zeros < self._sums.numel():  # another look-up has used them
            if memory.is_read:
                memory.barrier()
            self._sums.zero_()
        memory.num_zeros = 0
        return self._sums

    def _exchange(
        self, way: str, table: Tensor, rows: Tensor, peers: Tensor, rate: float = 0.0, zeros: Tensor | None = None
    ) -> None:
        device_rows.exchange(way, table, rows, self.messages, self._message_size, self._rank, peers, rate, zeros)


_MEMORY: dict[tuple[Any, torch.device], PeerMemory | None] = {}
"""By the group of all ranks, so that what an earlier group has left behind is not used, and by device."""


def peer_memory(num_slots: int, num_floats: int, device: torch.device) -> PeerMemory | None:
    """The memory of this job, with some room; None where GPUs cannot write each other's memory. All ranks call it."""
    if not device_rows.can_run(device):
        return None
    place: tuple[Any, torch.device] = dist.group.WORLD, device
    if place not in _MEMORY:
        for other in [other for other in _MEMORY if other[0] is not place[0]]:
            del _MEMORY[other]
        _MEMORY[place] = _created(num_slots, num_floats, device) if _are_linked(device) else None
    memory = _MEMORY[place]
    if memory is not None and (num_slots > len(memory.slots) or num_floats > len(memory.vectors)):
        torch.cuda.synchronize(device)  # before the memory goes that kernels may still use
        num_slots, num_floats = max(num_slots, len(memory.slots)), max(num_floats, len(memory.vectors))
        memory = _MEMORY[place] = _created(num_slots, num_floats, device)
    return memory


def _created(num_slots: int, num_floats: int, device: torch.device) -> PeerMemory | None:
    """None where a rank cannot have it, for lack of memory, of permissions, or of that part of torch."""
    num_slots, num_floats = num_slots + num_slots // 4, num_floats + num_floats // 4
    with torch.inference_mode(False):  # what is made there could not be written to in training
        # All ranks have memory before any of them waits for the others to share it.
        whole = _on_all_ranks(lambda: _allocated(_aligned(2 * num_slots) + 2 * _aligned(num_floats), device))
        return None if whole is None else _on_all_ranks(lambda: PeerMemory(whole, num_slots))


def _allocated(num_floats: int, device: torch.device) -> Tensor:
    import torch.distributed._symmetric_memory as symmetric

    return symmetric.empty(num_floats, dtype=torch.float32, device=device)


def _aligned(num_floats: int) -> int:
    return -(-num_floats // _ALIGNMENT) * _ALIGNMENT


def _on_all_ranks(make: Callable[[], _Made]) -> _Made | None:
    """What this rank makes; None where any rank cannot."""
    made = None
    try:
        made = make()
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:
        _LOG.warning("hash embeddings use collectives, as GPUs cannot share memory: %s", error)
    return made if all(Ranks().gather(made is not None)) else None


def _timeout(device: torch.device) -> timedelta:
    """How long the job's collectives wait."""
    group: Any = dist.group.WORLD
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None) or timedelta(minutes=10)


def _are_linked(device: torch.device) -> bool:
    """Whether the GPUs of all ranks are in one host, and can access each other. All ranks call it."""
    found = Ranks().gather((_host(), _is_linked(device)))
    return len({host for host, _ in found}) == 1 and all(is_linked for _, is_linked in found)


def _host() -> tuple[str, str]:
    """The same for processes of one host, and only for those, also in containers."""
    return boot_id(), socket.gethostname()


def _is_linked(device: torch.device) -> bool:
    """Whether this rank's GPU can access those of all ranks."""
    own = torch.cuda.current_device() if device.index is None else device.index
    others = [other for other in range(torch.cuda.device_count()) if other != own]
    return len(others) + 1 >= dist.get_world_size() and all(
        torch.cuda.can_device_access_peer(own, other) for other in others
    )
