"""Batches as tensors on the device that trains. To a GPU they are copied ahead of the step, several small ones at once.

For that, the thread that reads only copies in host memory; torch's operators run in the thread that trains. If both
threads ran them, each would wait for the other's turn in Python at every operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.training.hash_embeddings.key_index import distinct_in_common
from hotrow.training.hugectr.readers.block import Bags, Block
from hotrow.training.hugectr.trainer.processes import Processes

_ALIGNMENT = 512
"""Bytes; packed tensors begin at its multiples, as do those that torch makes on a GPU."""


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

    @cached_property
    def distinct_keys(self) -> tuple[Tensor, Tensor]:
        """The keys, each once, int64 [m], and which of them each key is, int64 [n].

        The order is the same on all processes: these add up the vectors of all keys by it.
        """
        return distinct_in_common(self.keys)


def joined(bags: Sequence[DeviceBags]) -> DeviceBags:
    """The keys of several sparse inputs, one behind the other. For several inputs, only `keys` is valid."""
    if len(bags) == 1:
        return bags[0]
    keys = torch.cat([each.keys for each in bags])
    return DeviceBags(keys, slice(0, 0), None, None)


@dataclass(frozen=True)
class Batch:
    """A batch on one process."""

    labels: Tensor
    """float32 [samples, label_dim], of the samples that this process computes."""
    dense: Tensor
    """float32 [samples, dense_dim], of the same samples."""
    bags: tuple[DeviceBags, ...]
    """One per sparse input."""


@dataclass(frozen=True)
class _Transfer:
    """Some samples of a piece that is on its way to the GPU."""

    piece: Block
    """As it was read."""
    tensors: Sequence[Tensor]
    """On the GPU, in the order of `_tensors`, all in one piece of memory."""
    arrival: torch.cuda.Event
    begin: int
    end: int

    def part(self, begin: int, end: int) -> _Transfer:
        """Samples `begin` up to `end` of these."""
        return replace(self, begin=self.begin + begin, end=self.begin + end)


class Staging:
    """Copies batches to the device of a process: `pack`, `send` and `take` one after the other, or only `take`.

    What is packed and sent may be several batches, a piece; what is taken is a part of it.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._device = processes.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        """On which batches are copied ahead."""

    def pack(self, piece: Block) -> Block:
        """For a GPU, a piece together with its arrays in pinned memory. For the thread that reads."""
        if self._stream is None:
            return piece
        with torch.cuda.device(self._device):  # pinning memory begins the use of a GPU
            return replace(piece, staged=packed(list(_tensors(piece))))

    def send(self, piece: Block) -> Block:
        """A packed piece on its way to the GPU. The host does not wait, and steps on the GPU do not, either."""
        if self._stream is None:
            return piece
        with torch.cuda.stream(self._stream):
            memory = piece.staged.to(self._device, non_blocking=True)
            arrival = torch.cuda.Event()
            arrival.record()
        tensors = unpacked(memory, list(_tensors(piece)))
        # Without the pinned memory, which torch gives to the next piece as soon as this one is copied.
        piece = replace(piece, staged=None)
        return replace(piece, staged=_Transfer(piece, tensors, arrival, 0, len(piece)))

    def take(self, block: Block) -> Batch:
        """The tensors of a batch, for work on the current stream, which waits until they have arrived."""
        sent = block.staged
        if sent is None:
            tensors = [tensor.to(self._device) for tensor in _tensors(block)]
            return self._batch(block, tensors, 0, len(block))
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(sent.arrival)
        sent.tensors[0].record_stream(stream)  # holds for the whole memory
        return self._batch(sent.piece, sent.tensors, sent.begin, sent.end)

    def _batch(self, piece: Block, tensors: Sequence[Tensor], begin: int, end: int) -> Batch:
        """What this process needs of a batch, which is samples `begin` up to `end` of a piece."""
        first, last = (begin + sample for sample in self._processes.part(end - begin))
        labels, dense, *others = tensors
        lists, bags = iter(others), []
        for each in piece.bags:
            slots, keys = each.num_bags // len(piece), next(lists)
            offsets = None if each.width else next(lists)
            bags.append(_bags(each, keys, offsets, *(slots * sample for sample in (begin, end, first, last))))
        return Batch(labels[first:last], dense[first:last], tuple(bags))


def _bags(bags: Bags, keys: Tensor, offsets: Tensor | None, begin: int, end: int, first: int, last: int) -> DeviceBags:
    """The lists `begin` up to `end`, of which `first` up to `last` are of the samples that this process computes."""
    if offsets is None:
        width = bags.width or 0
        whole, own = slice(begin * width, end * width), slice((first - begin) * width, (last - begin) * width)
        return DeviceBags(keys[whole], own, None, width)
    from_key, to_key, from_own, to_own = (int(bags.offsets[number]) for number in (begin, end, first, last))
    offsets = offsets[first : last + 1]
    own = slice(from_own - from_key, to_own - from_key)
    return DeviceBags(keys[from_key:to_key], own, offsets - from_own if from_own else offsets, None)


def _tensors(block: Block) -> Iterator[Tensor]:
    """What a device needs of a block, in host memory."""
    arrays: list[NDArray[np.generic]] = [block.labels, block.dense]
    for bags in block.bags:
        arrays += [bags.keys] if bags.width else [bags.keys, bags.offsets]
    return map(torch.from_numpy, map(np.ascontiguousarray, arrays))


def pinned_memory(num_bytes: int) -> Tensor:
    """Memory from which copies do not make the host wait, uint8 [num_bytes]; torch keeps it until they have ended."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors in host memory, pinned, uint8 [any]."""
    places, num_bytes = _places(tensors)
    memory = pinned_memory(num_bytes)
    target = memory.numpy()
    for tensor, place in zip(tensors, places, strict=True):
        target[place] = tensor.numpy().reshape(-1).view(np.uint8)
    return memory


def unpacked(memory: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that were packed, in that memory or a copy of it."""
    places, _ = _places(tensors)
    pairs = zip(tensors, places, strict=True)
    return [memory[place].view(tensor.dtype).view(tensor.shape) for tensor, place in pairs]


def _places(tensors: Sequence[Tensor]) -> tuple[list[slice], int]:
    """The bytes of each tensor in packed memory, and how many there are in all."""
    places, end = [], 0
    for tensor in tensors:
        places.append(slice(end, end + tensor.nbytes))
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return places, end
