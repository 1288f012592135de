"""Batches as tensors on the device that trains. On a GPU they are copied there, and prepared, one ahead of the step.

For that, the thread that reads only copies in host memory; torch's operators run in the thread that trains. If both
threads ran them, each would wait for the other's turn in Python at every operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.training.hugectr.processes import Processes
from hotrow.training.hugectr.readers.block import Bags, Block
from hotrow.training.key_index import Distinct, distinct, distinct_by_owner

_ALIGNMENT = 512
"""Bytes; packed tensors begin at its multiples, as do those that torch makes on a GPU."""
_Found = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class DeviceBags:
    """The keys of one sparse input."""

    keys: Tensor
    """int64 [n], of the whole batch."""
    own: slice
    """Those of the samples that this process computes."""
    offsets: Tensor | None
    """int64 [lists + 1], where each list begins among `own`; None where `width` is given."""
    width: int | None
    """The number of keys in each list, where all have the same number."""
    found: _Found | None = None
    """The distinct keys, where they were found before."""

    @cached_property
    def distinct_keys(self) -> _Found:
        """The keys, each once, int64 [m], and which of them each key is, int64 [n]."""
        return distinct(self.keys) if self.found is None else self.found


@dataclass(frozen=True)
class Batch:
    """A batch on one process."""

    labels: Tensor
    """float32 [samples, label_dim], of the samples that this process computes."""
    dense: Tensor
    """float32 [samples, dense_dim], of the same samples."""
    bags: tuple[DeviceBags, ...]
    """One per sparse input."""

    def tensors(self) -> Iterator[Tensor]:
        """All of them."""
        yield from (self.labels, self.dense)
        for bags in self.bags:
            yield bags.keys
            if bags.offsets is not None:
                yield bags.offsets

    def of(self, tensors: Iterable[Tensor], found: Sequence[_Found] = ()) -> Batch:
        """The same batch with other tensors, ordered as `tensors`, and with the distinct keys, if these were found."""
        others = iter(tensors)
        labels, dense = next(others), next(others)
        bags = []
        for number, each in enumerate(self.bags):
            keys, offsets = next(others), None if each.offsets is None else next(others)
            bags.append(replace(each, keys=keys, offsets=offsets, found=found[number] if found else None))
        return Batch(labels, dense, tuple(bags))


@dataclass(frozen=True)
class _Packed:
    """A batch in host memory that a GPU can copy from at once."""

    batch: Batch
    memory: Tensor
    """As `packed` makes it."""


@dataclass(frozen=True)
class _Sent:
    """A batch on its way to the GPU."""

    batch: Batch
    memory: Tensor
    """uint8, of all tensors of the batch."""
    found: Sequence[Distinct]
    """By sparse input, the distinct keys, where the batch is trained on."""
    counts: Tensor | None
    """int64 [sparse inputs], in host memory: how many they are."""
    arrival: torch.cuda.Event


class Staging:
    """Copies batches to the device of a process: `pack`, `send` and `take` one after the other, or only `take`."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._device = processes.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        """On which batches are copied ahead."""

    def pack(self, block: Block) -> Block:
        """For a GPU, a block with its tensors in one piece of pinned memory. For the thread that reads."""
        if self._stream is None:
            return block
        batch = self._part(block)
        with torch.cuda.device(self._device):  # pinning memory begins the use of a GPU
            return replace(block, staged=_Packed(batch, packed(batch)))

    def send(self, block: Block, *, is_trained: bool = True) -> Block:
        """A packed block on its way to the GPU, where the distinct keys are found if it is trained on.

        The host does not wait; and this neither waits for steps on the GPU, nor do these wait for it.
        """
        if self._stream is None:
            return block
        with torch.cuda.stream(self._stream):
            memory = block.staged.memory.to(self._device, non_blocking=True)
            batch = unpacked(memory, block.staged.batch)
            found = [distinct_by_owner(bags.keys, 1) for bags in batch.bags] if is_trained else []
            counts = torch.cat([each.counts for each in found]).to("cpu", non_blocking=True) if found else None
            arrival = torch.cuda.Event()
            arrival.record()
        return replace(block, staged=_Sent(batch, memory, found, counts, arrival))

    def take(self, block: Block) -> Batch:
        """The tensors of a block, for work on the current stream. The host waits until they have arrived."""
        sent = block.staged
        if sent is None:
            part = self._part(block)
            return part.of(tensor.to(self._device) for tensor in part.tensors())
        sent.arrival.synchronize()
        for tensor in (sent.memory, *(tensor for each in sent.found for tensor in (each.keys, each.places))):
            tensor.record_stream(torch.cuda.current_stream(self._device))
        counts = [] if sent.counts is None else sent.counts.tolist()
        found = [(each.keys[:count], each.places) for each, count in zip(sent.found, counts, strict=True)]
        return sent.batch.of(sent.batch.tensors(), found)

    def _part(self, block: Block) -> Batch:
        """What this process needs of a block, in host memory."""
        begin, end = self._processes.part(len(block))
        bags = tuple(_bags(bags, len(block), begin, end) for bags in block.bags)
        return Batch(_tensor(block.labels[begin:end]), _tensor(block.dense[begin:end]), bags)


def _bags(bags: Bags, num_samples: int, begin: int, end: int) -> DeviceBags:
    slots = bags.num_bags // num_samples
    first, last = begin * slots, end * slots
    if bags.width:
        return DeviceBags(_tensor(bags.keys), slice(first * bags.width, last * bags.width), None, bags.width)
    offsets = bags.offsets[first : last + 1]
    own = slice(int(offsets[0]), int(offsets[-1]))
    return DeviceBags(_tensor(bags.keys), own, _tensor(offsets - offsets[0]), None)


def _tensor(array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def pinned_memory(num_bytes: int) -> Tensor:
    """Memory from which copies do not make the host wait, uint8 [num_bytes]; torch keeps it until they have ended."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def packed(batch: Batch) -> Tensor:
    """The bytes of a batch in host memory, pinned, uint8 [any]."""
    places, num_bytes = _places(batch)
    memory = pinned_memory(num_bytes)
    for tensor, place in zip(batch.tensors(), places, strict=True):
        memory.numpy()[place] = tensor.numpy().reshape(-1).view(np.uint8)
    return memory


def unpacked(memory: Tensor, batch: Batch) -> Batch:
    """The batch that was packed, in that memory or a copy of it."""
    places, _ = _places(batch)
    pairs = zip(batch.tensors(), places, strict=True)
    return batch.of(memory[place].view(tensor.dtype).view(tensor.shape) for tensor, place in pairs)


def _places(batch: Batch) -> tuple[list[slice], int]:
    """The bytes of each tensor in packed memory, and how many there are in all."""
    places, end = [], 0
    for tensor in batch.tensors():
        places.append(slice(end, end + tensor.nbytes))
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return places, end
