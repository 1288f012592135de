"""Records in columns: readers make them, and batches are cut from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SparseInput:
    """One sparse input of the model: `slot_num` lists of keys per sample."""

    name: str
    slot_num: int
    nnz_per_slot: tuple[int, ...]
    """The most keys in a slot, or their number where the length is fixed; one element per slot."""
    is_fixed_length: bool
    slot_sizes: tuple[int, ...] = ()
    """Where keys of a Raw file count per slot: how many each slot has. A slot's keys begin behind those before it."""
    keys_are_slots: bool = False
    """Whether the one slot, of exactly as many keys as `nnz_per_slot` says, is a slot for each of them to the model."""


@dataclass(frozen=True)
class RecordShape:
    """The fields of a record."""

    label_dim: int
    """Columns of all labels together."""
    dense_dim: int
    sparse: tuple[SparseInput, ...]
    key_bytes: int = 4
    """4: uint32 keys; 8: int64 keys. Parquet stores its own types."""
    num_classes: tuple[tuple[int, int], ...] = ()
    """Columns of labels that hold the number of a class, each with how many classes there are."""

    @property
    def slot_num(self) -> int:
        """Slots of all sparse inputs together."""
        return sum(item.slot_num for item in self.sparse)

    @cached_property
    def most_keys(self) -> NDArray[np.int64]:
        """int64 [all slots]: the most keys of each slot."""
        return np.array([count for item in self.sparse for count in item.nnz_per_slot], np.int64)

    @cached_property
    def slot_ends(self) -> NDArray[np.int64]:
        """int64 [sparse inputs]: the slot behind the last one of each."""
        return np.cumsum([item.slot_num for item in self.sparse], dtype=np.int64)


class Bags:
    """The keys of one sparse input, as lists: a list for each slot of each sample, sample by sample."""

    def __init__(
        self, keys: NDArray[np.int64], offsets: NDArray[np.int64] | None = None, *, width: int | None = None
    ) -> None:
        """
        Args:
            keys: int64 [n].
            offsets: int64 [lists + 1], where each list begins, and the end of the last one; the first is 0. May be
                left out where `width` is given.
            width: the number of keys in each list, where all have the same number, at least 1.
        """
        self.keys, self.width = keys, width
        self._offsets = offsets

    @property
    def num_bags(self) -> int:
        """The number of lists."""
        return len(self.keys) // self.width if self.width else len(self.offsets) - 1

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """int64 [lists + 1], where each list begins, and the end of the last one."""
        if self._offsets is not None:
            return self._offsets
        return np.arange(0, len(self.keys) + 1, self.width, dtype=np.int64)

    def part(self, begin: int, end: int) -> Bags:
        """Lists `begin` up to `end`."""
        if self.width:
            return Bags(self.keys[begin * self.width : end * self.width], width=self.width)
        chosen = self.offsets[begin : end + 1]
        return Bags(self.keys[chosen[0] : chosen[-1]], chosen - chosen[0])


@dataclass(frozen=True)
class Block:
    """Some records, side by side."""

    labels: NDArray[np.float32]
    """[samples, label_dim]"""
    dense: NDArray[np.float32]
    """[samples, dense_dim]"""
    bags: tuple[Bags, ...]
    """One per sparse input."""
    staged: Any = None
    """The same on its way to the device that trains; it has a `part`, too."""

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, begin: int, end: int) -> Block:
        """Samples `begin` up to `end`."""
        if begin == 0 and end >= len(self):
            return self
        slots = [bags.num_bags // max(len(self), 1) for bags in self.bags]
        parts = tuple(bags.part(begin * n, end * n) for bags, n in zip(self.bags, slots, strict=True))
        staged = self.staged and self.staged.part(begin, min(end, len(self)))
        return Block(self.labels[begin:end], self.dense[begin:end], parts, staged)


def joined(blocks: Sequence[Block]) -> Block:
    """Concatenated blocks; at least one."""
    if len(blocks) == 1:
        return blocks[0]
    bags = tuple(_joined_bags([block.bags[i] for block in blocks]) for i in range(len(blocks[0].bags)))
    return Block(_rows([b.labels for b in blocks]), _rows([b.dense for b in blocks]), bags)


def _rows(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(parts, axis=0)


def _joined_bags(parts: Sequence[Bags]) -> Bags:
    keys = np.concatenate([part.keys for part in parts])
    if len({part.width for part in parts}) == 1 and parts[0].width:
        return Bags(keys, width=parts[0].width)
    ends = np.cumsum([len(part.keys) for part in parts])
    offsets = [parts[0].offsets, *(part.offsets[1:] + end for part, end in zip(parts[1:], ends[:-1], strict=True))]
    return Bags(keys, np.concatenate(offsets))


def even_bags(item: SparseInput, keys: NDArray[np.int64]) -> Bags:
    """Lists of keys, int64 [n], that all have as many as `nnz_per_slot` allows, sample by sample."""
    counts = item.nnz_per_slot
    if counts[0] and len(set(counts)) == 1:
        return Bags(keys, width=counts[0])
    num_samples = len(keys) // sum(counts) if sum(counts) else 0
    return Bags(keys, offsets_of(np.tile(np.array(counts, np.int64), num_samples)))


def offsets_of(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The begin of each list, and the end of the last one, int64 [lists + 1], from the numbers of keys, int64."""
    offsets = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts.ravel(), out=offsets[1:])
    return offsets
