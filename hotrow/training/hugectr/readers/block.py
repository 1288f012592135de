"""Records in columns: readers make them, and batches are cut from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import ModelFormatError


@dataclass(frozen=True)
class SparseInput:
    """One sparse input of the model: `slot_num` lists of keys per sample."""

    name: str
    slot_num: int
    nnz_per_slot: tuple[int, ...]
    """The most keys in a slot, or their number where the length is fixed; one element per slot."""
    is_fixed_length: bool


@dataclass(frozen=True)
class RecordShape:
    """The fields of a record."""

    label_dim: int
    """Columns of all labels together."""
    dense_dim: int
    sparse: tuple[SparseInput, ...]
    key_bytes: int = 4
    """4: uint32 keys; 8: int64 keys. Parquet stores its own types."""

    @property
    def slot_num(self) -> int:
        """Slots of all sparse inputs together."""
        return sum(item.slot_num for item in self.sparse)


class Bags(NamedTuple):
    """The keys of one sparse input: of sample s and slot t, those from offsets[s * slots + t] to the next offset."""

    keys: NDArray[np.int64]
    offsets: NDArray[np.int64]
    """[samples * slots + 1]; the first is 0."""


@dataclass(frozen=True)
class Block:
    """Some records, side by side."""

    labels: NDArray[np.float32]
    """[samples, label_dim]"""
    dense: NDArray[np.float32]
    """[samples, dense_dim]"""
    bags: tuple[Bags, ...]
    """One per sparse input."""

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, begin: int, end: int) -> Block:
        """Samples `begin` up to `end`."""
        if begin == 0 and end >= len(self):
            return self
        num_samples = max(len(self), 1)
        bags = []
        for keys, offsets in self.bags:
            slots = (len(offsets) - 1) // num_samples
            chosen = offsets[begin * slots : end * slots + 1]
            bags.append(Bags(keys[chosen[0] : chosen[-1]], chosen - chosen[0]))
        return Block(self.labels[begin:end], self.dense[begin:end], tuple(bags))


def joined(blocks: Sequence[Block]) -> Block:
    """Concatenated blocks; at least one."""
    if len(blocks) == 1:
        return blocks[0]
    bags = tuple(_joined_bags([block.bags[i] for block in blocks]) for i in range(len(blocks[0].bags)))
    return Block(_rows([b.labels for b in blocks]), _rows([b.dense for b in blocks]), bags)


def _rows(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(parts, axis=0)


def _joined_bags(parts: Sequence[Bags]) -> Bags:
    ends = np.cumsum([len(part.keys) for part in parts])
    offsets = [parts[0].offsets, *(part.offsets[1:] + end for part, end in zip(parts[1:], ends[:-1], strict=True))]
    return Bags(np.concatenate([part.keys for part in parts]), np.concatenate(offsets))


def bags_of_counts(
    keys: NDArray[np.int64], counts: NDArray[np.int64], sparse: Sequence[SparseInput]
) -> tuple[Bags, ...]:
    """Split keys that are ordered by sample, then slot, into the sparse inputs.

    Args:
        keys: of all samples and slots.
        counts: [samples, all slots], the number of keys in each.
    """
    if len(sparse) == 1:
        return (Bags(keys, offsets_of(counts)),)
    ends = np.cumsum([0, *(item.slot_num for item in sparse)])
    parts = [np.ascontiguousarray(counts[:, ends[i] : ends[i + 1]]) for i in range(len(sparse))]
    if len(counts) and (counts == counts[0]).all():
        columns = np.cumsum([0, *(int(part[0].sum()) for part in parts)])
        table = keys.reshape(len(counts), columns[-1])
        split = [np.ascontiguousarray(table[:, columns[i] : columns[i + 1]]).ravel() for i in range(len(sparse))]
    else:
        owner = np.repeat(np.arange(len(sparse)), np.diff(ends))
        owner_of_key = np.repeat(np.tile(owner, len(counts)), counts.ravel())
        split = [keys[owner_of_key == i] for i in range(len(sparse))]
    return tuple(Bags(part, offsets_of(count)) for part, count in zip(split, parts, strict=True))


def offsets_of(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The begin of each list, and the end of the last one."""
    offsets = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts.ravel(), out=offsets[1:])
    return offsets


def check_counts(place: str, first: int, counts: NDArray[np.int64], shape: RecordShape) -> None:
    """Refuse slots with more keys than the model's Input says.

    Args:
        place: the file, for the message.
        first: the number of the first record.
        counts: [records, all slots].

    Raises:
        ModelFormatError: names the record, the slot and both numbers.
    """
    most = np.array([count for item in shape.sparse for count in item.nnz_per_slot], np.int64)
    if (counts <= most).all():
        return
    record, slot = np.argwhere(counts > most)[0]
    raise ModelFormatError(
        f"{place}: record {first + record}: slot {slot} has {counts[record, slot]} keys; nnz_per_slot of the model's "
        f"Input allows {most[slot]}"
    )
