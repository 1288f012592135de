"""The rows that one rank holds of a hash embedding: keys, vectors, and what the optimizer keeps for each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hotrow.training.hash_embeddings.key_index import (
    DeviceIndex,
    add_some,
    create_index,
    distinct,
    mixed_bits,
    most_requested,
    requested,
)
from hotrow.training.hash_embeddings.optimizers import RowOptimizer
from hotrow.training.kernels import device_rows
from hotrow.training.row_access import add_up, gather, longer, scatter

INITIAL_ROWS = 4096
"""Vectors that an initializer fills. Each element of a new row is that of the same column in one of them."""
_CHUNK_ELEMENTS = 1 << 17
"""Elements of the rows that an optimizer works on at a time, so that they stay in the processor's cache."""
_DEVICE_CHUNK_ELEMENTS = 1 << 26
"""The same on a GPU, so that copies of rows take a bounded part of its memory."""


@dataclass(frozen=True)
class Rows:
    """Rows of a hash embedding, in bulk. `[i]` of all tensors belongs to the same key."""

    keys: Tensor
    """int64 [n], each once."""
    vectors: Tensor
    """float32 [n, embedding_dim]"""
    states: Mapping[str, Tensor] = field(default_factory=dict)
    """The optimizer's states, by name: float32 [n, embedding_dim]."""
    last_used: Tensor | None = None
    """int64 [n]: the step of training that read the row last; None where that is not counted."""
    times_used: Tensor | None = None
    """int64 [n]: how often training has read it."""

    def chosen(self, which: Tensor) -> Rows:
        """Some of them, by a mask [n] or numbers."""
        states, use = ({name: tensor[which] for name, tensor in of.items()} for of in (self.states, self.use()))
        return Rows(self.keys[which], self.vectors[which], states, **use)

    def use(self) -> dict[str, Tensor]:
        """`last_used` and `times_used`, as far as they are counted."""
        use = {"last_used": self.last_used, "times_used": self.times_used}
        return {name: tensor for name, tensor in use.items() if tensor is not None}


class HashRows:
    """Row 0 is zeros and belongs to no key. Rows from 1 to `index.num_rows` are in use."""

    def __init__(
        self, initial: Tensor, optimizer: RowOptimizer, device: torch.device, *, counts_use: bool = False
    ) -> None:
        """No rows yet.

        Args:
            initial: float32 [INITIAL_ROWS, embedding_dim], what new rows are made of; on any device.
            counts_use: whether to note when and how often a row is read.
        """
        self.optimizer = optimizer
        self.initial = initial.to(device)
        self.counts_use = counts_use
        """Whether the time and the number of reads of each row are noted."""
        self.steps = 0
        """Completed steps of training."""
        self.generation = 0
        """Counts up when rows move: row numbers from before are then no longer valid."""
        self.listeners: OrderedDict[int, Callable[[Tensor, Tensor], None]] = OrderedDict()
        """Called with keys that training has read, and with keys that have lost their rows; int64 [n]."""
        self._make_empty()

    @property
    def num_rows(self) -> int:
        """Keys that have a row."""
        return self.index.num_rows - 1

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.initial.device

    def find(self, keys: Tensor) -> Tensor:
        """int64 [n] to their rows; 0 where a key has none."""
        return self.index.find(keys)

    def find_or_add(self, keys: Tensor) -> Tensor:
        """int64 [n] to their rows, for a step of training; a key that has none gets one."""
        first = self.index.num_rows
        rows = self.index.find_or_add(keys)
        self._begin_added(first)
        self.note_use(rows, keys)
        return rows

    def find_or_add_requested(
        self, messages: Tensor, message_size: int, padding: int | None
    ) -> tuple[Tensor, Callable[[], int]]:
        """As `find_or_add`, of the keys in messages, without `note_use`. What is no key, or is `padding`, gets row 0.

        What is returned with the rows waits until these are counted, and returns `most_requested`. It has to be called
        before anything else here. Work on the `vectors` that is launched before finds them as they will be.
        """
        index, first = self.index, self.index.num_rows
        # Only if there is room for any number of new rows, they may be made before the host knows how many there are.
        has_room = first + len(messages) <= len(self.vectors)
        if padding is None and has_room and isinstance(index, DeviceIndex):
            return self._start_to_add(index, messages, message_size)
        if padding is None:
            rows, most = index.find_or_add_requested(messages, message_size)
        else:
            most = most_requested(messages, message_size)
            rows = add_some(index, messages, requested(messages, message_size) & (messages != padding))
        self._begin_added(first)
        return rows, lambda: most

    def _start_to_add(
        self, index: DeviceIndex, messages: Tensor, message_size: int
    ) -> tuple[Tensor, Callable[[], int]]:
        first = index.num_rows
        rows, count = index.start_to_add(messages, message_size, self.initial, self.vectors)

        def finish() -> int:
            most = count()
            self._begin_states(first)
            return most

        return rows, finish

    def note_use(self, rows: Tensor, keys: Tensor) -> None:
        """Note that a step of training reads rows, int64 [n], of keys, int64 [n]; row 0 stands for none."""
        if self.counts_use:
            self.last_used[rows] = self.steps
            self.times_used[rows] += 1
        for listener in self.listeners.values():
            read = keys[rows != 0]
            listener(read, read[:0])

    def learn(self, rows: Tensor, gradients: Tensor, *, are_distinct: bool = False) -> None:
        """Apply the optimizer once to the sum of the gradients of each row.

        Args:
            rows: int64 [n]; 0 stands for none.
            gradients: float32 [n, embedding_dim]; may be overwritten.
            are_distinct: whether no row but 0 is named more than once.
        """
        kernel = self.optimizer.kernel(self.steps) if device_rows.can_run(self.device) else None
        if kernel is not None:
            name, settings = kernel
            states = [self.states[name] for name in self.optimizer.states()]
            device_rows.learn(name, self.vectors, states, rows, gradients, *settings, are_distinct=are_distinct)
            return
        if not are_distinct:
            found, places = distinct(rows)
            if len(found) < len(rows):
                rows, gradients = found, add_up(len(found), places, gradients)
        self._learn_by_operators(rows, gradients)

    def _learn_by_operators(self, rows: Tensor, gradients: Tensor) -> None:
        is_row = rows != 0
        if not bool(is_row.all()):
            rows, gradients = rows[is_row], gradients[is_row]
        for begin, end in self._chunks(len(rows)):
            self._learn_some(rows[begin:end], gradients[begin:end])

    def remove(self, rows: Tensor) -> None:
        """Remove rows, int64 [n], each named once: the last rows move to their places."""
        removed = self.index.keys[rows]
        num_left = self.index.num_rows - len(rows)
        is_gone = torch.zeros(self.index.num_rows, dtype=torch.bool, device=self.device)
        is_gone[rows] = True
        moved = (~is_gone[num_left:]).nonzero().squeeze(1) + num_left
        free = rows[rows < num_left]
        for tensor in (self.index.keys, *self._by_row()):
            tensor[free] = tensor[moved]
        self.index.keep(num_left)
        self.generation += 1
        for listener in self.listeners.values():
            listener(removed[:0], removed)

    def seldom_used(self, unused_for: int | None, used_less_than: int | None) -> Tensor:
        """The rows, int64 [n], read last more than one number of steps ago, and less often than the other number."""
        used = slice(1, self.index.num_rows)
        chosen = torch.ones(self.num_rows, dtype=torch.bool, device=self.device)
        if unused_for is not None:
            chosen &= self.last_used[used] < self.steps - 1 - unused_for
        if used_less_than is not None:
            chosen &= self.times_used[used] < used_less_than
        return chosen.nonzero().squeeze(1) + 1

    def least_used(self, num_rows: int, *, by_age: bool) -> Tensor:
        """As many rows as asked for: those least recently or least often read."""
        use = self.last_used if by_age else self.times_used
        return use[1 : self.index.num_rows].topk(num_rows, largest=False).indices + 1

    def all(self) -> Rows:
        """All rows that have a key, in no order; the tensors are the live ones."""
        used = slice(1, self.index.num_rows)
        states = {name: tensor[used] for name, tensor in self.states.items()}
        use = (self.last_used[used], self.times_used[used]) if self.counts_use else (None, None)
        return Rows(self.index.keys[used], self.vectors[used], states, *use)

    def put(self, rows: Rows) -> None:
        """Add rows, or overwrite them; parts of a row that are not given are as in a new row."""
        places = self.index.find_or_add(rows.keys.to(self.device))
        self._make_room()
        scatter(self.vectors, places, rows.vectors.to(self.device, torch.float32))
        for name, value in self.optimizer.states().items():
            given = rows.states.get(name)
            if given is None:
                self.states[name][places] = value
            else:
                scatter(self.states[name], places, given.to(self.device, torch.float32))
        if self.counts_use:
            self.last_used[places] = self.steps if rows.last_used is None else rows.last_used.to(self.device)
            self.times_used[places] = 0 if rows.times_used is None else rows.times_used.to(self.device)

    def clear(self) -> None:
        """Forget all rows."""
        self.generation += 1
        self._make_empty()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "listeners": OrderedDict()}  # a copy of the rows has no listeners

    def to(self, device: torch.device) -> HashRows:
        """The same rows on another device."""
        moved = HashRows(self.initial, self.optimizer, device, counts_use=self.counts_use)
        moved.steps, moved.listeners, moved.generation = self.steps, self.listeners, self.generation + 1
        moved.put(self.all())
        return moved

    def initial_vectors(self, keys: Tensor) -> Tensor:
        """int64 [n] to the vectors of new rows: they follow from the key alone, on any number of ranks."""
        mixed = mixed_bits(keys)
        columns = torch.arange(self.initial.shape[1], device=keys.device)
        # A parabola for each key, so that two keys hardly ever have the same vector.
        first, step, bend = mixed[:, None], mixed[:, None] >> 12, mixed[:, None] >> 24
        places = (first + (step + bend * columns) * columns) & (INITIAL_ROWS - 1)
        return self.initial.gather(0, places)

    def _make_empty(self) -> None:
        self.index = create_index(self.device)
        capacity, dim = len(self.index.keys), self.initial.shape[1]
        self.vectors = torch.empty((capacity, dim), device=self.device)
        self.vectors[0] = 0
        self.states = {name: torch.empty_like(self.vectors) for name in self.optimizer.states()}
        num_counted = capacity if self.counts_use else 0
        self.last_used = torch.zeros(num_counted, dtype=torch.int64, device=self.device)
        self.times_used = torch.zeros_like(self.last_used)

    def _by_row(self) -> list[Tensor]:
        use = [self.last_used, self.times_used] if self.counts_use else []
        return [self.vectors, *self.states.values(), *use]

    def _begin_added(self, first: int) -> None:
        """Make the rows that were added, from the given one on."""
        if self.index.num_rows > first:
            self._make_room()
            self._begin(first)

    def _make_room(self) -> None:
        """Make room for as many rows as the index has."""
        num_rows = len(self.index.keys)
        if num_rows <= len(self.vectors):
            return
        self.vectors = longer(self.vectors, num_rows)
        if self.counts_use:
            self.last_used, self.times_used = longer(self.last_used, num_rows), longer(self.times_used, num_rows)
        self.states = {name: longer(tensor, num_rows) for name, tensor in self.states.items()}

    def _begin(self, first: int) -> None:
        """Make new rows, from the given one on."""
        for begin, end in self._chunks(self.index.num_rows - first):
            rows = slice(first + begin, first + end)
            self.vectors[rows] = self.initial_vectors(self.index.keys[rows])
        self._begin_states(first)

    def _begin_states(self, first: int) -> None:
        if self.index.num_rows == first:
            return
        added = slice(first, self.index.num_rows)
        for name, value in self.optimizer.states().items():
            self.states[name][added] = value
        if self.counts_use:
            self.last_used[added] = self.steps
            self.times_used[added] = 0

    def _chunks(self, num_rows: int) -> Iterator[tuple[int, int]]:
        elements = _CHUNK_ELEMENTS if self.device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS
        step = max(1, elements // self.vectors.shape[1])
        for begin in range(0, num_rows, step):
            yield begin, min(begin + step, num_rows)

    def _learn_some(self, rows: Tensor, gradients: Tensor) -> None:
        vectors = gather(self.vectors, rows)
        states = {name: gather(tensor, rows) for name, tensor in self.states.items()}
        self.optimizer.update(vectors, gradients, states, self.steps)
        scatter(self.vectors, rows, vectors)
        for name, tensor in states.items():
            scatter(self.states[name], rows, tensor)
