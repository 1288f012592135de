"""Batches as tensors on the device that trains; on a GPU the reading thread copies them there, ahead of the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.training.hugectr.processes import Processes
from hotrow.training.hugectr.readers.block import Bags, Block
from hotrow.training.key_index import distinct


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
        """The keys, each once, int64 [m], and which of them each key is, int64 [n]. On a GPU the host waits for m."""
        return distinct(self.keys)

    def tensors(self) -> Iterator[Tensor]:
        """Those in device memory."""
        yield self.keys
        if self.offsets is not None:
            yield self.offsets
        yield from vars(self).get("distinct_keys", ())


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
        """Those in device memory."""
        yield from (self.labels, self.dense)
        for bags in self.bags:
            yield from bags.tensors()

    def find_distinct_keys(self) -> None:
        """Find them now, not when they are first used."""
        for bags in self.bags:
            _ = bags.distinct_keys


class Staging:
    """Copies batches to the device of a process."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._device = processes.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        """On which batches are copied ahead."""

    def ahead(self, block: Block, *, is_trained: bool = True) -> Block:
        """A block with its tensors in GPU memory; on the processor the block itself. For the reading thread.

        Of a block that is trained on, it finds the distinct keys too, so that the training thread does not wait for
        their number.
        """
        if self._stream is None:
            return block
        with torch.cuda.stream(self._stream):
            batch = self._copied(block)
            if is_trained:
                batch.find_distinct_keys()
        self._stream.synchronize()
        return replace(block, staged=batch)

    def take(self, block: Block) -> Batch:
        """The tensors of a block, for work on the current stream."""
        if block.staged is None:
            return self._copied(block)
        batch: Batch = block.staged
        for tensor in batch.tensors():
            tensor.record_stream(torch.cuda.current_stream(self._device))
        return batch

    def _copied(self, block: Block) -> Batch:
        begin, end = self._processes.part(len(block))
        bags = tuple(self._bags(bags, len(block), begin, end) for bags in block.bags)
        return Batch(self._tensor(block.labels[begin:end]), self._tensor(block.dense[begin:end]), bags)

    def _bags(self, bags: Bags, num_samples: int, begin: int, end: int) -> DeviceBags:
        slots = bags.num_bags // num_samples
        first, last = begin * slots, end * slots
        if bags.width:
            return DeviceBags(self._tensor(bags.keys), slice(first * bags.width, last * bags.width), None, bags.width)
        offsets = bags.offsets[first : last + 1]
        own = slice(int(offsets[0]), int(offsets[-1]))
        return DeviceBags(self._tensor(bags.keys), own, self._tensor(offsets - offsets[0]), None)

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        # Copies from pinned memory do not make the host wait; torch keeps that memory until they have ended.
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor
