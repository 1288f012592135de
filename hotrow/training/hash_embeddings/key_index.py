"""From keys to the rows of a table that grows. Row 0 belongs to no key: it stands for keys that have no row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isqrt
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotrow.training.kernels import device_rows
from hotrow.training.kernels.growing_index import add_rows, find_rows, index_rows
from hotrow.training.row_access import longer
from inference_session.errors import UnavailableError
from inference_session.kernels.cpu.hash_index import BUCKET_BYTES, MAX_ROWS

_MIN_CAPACITY = 1024
_MAX_DEVICE_ROWS = 2**31 - 1
_KEYS_PER_BUCKET = 8
"""Used slots of 12, on average, at full capacity: few enough that few keys are outside of their own bucket."""


class KeyIndex(ABC):
    """A key table's index, on any device."""

    keys: Tensor
    """int64 [capacity]: the key of each row."""
    num_rows: int
    """Rows in use, row 0 among them."""

    @abstractmethod
    def find(self, keys: Tensor) -> Tensor:
        """int64 [n] to the rows, int64 [n], 0 for keys without a row."""

    @abstractmethod
    def find_or_add(self, keys: Tensor) -> Tensor:
        """int64 [n], perhaps with duplicates, to their rows; keys without one get the next, in any order.

        Raises:
            UnavailableError: there is no room for more rows.
        """

    def find_or_add_requested(self, messages: Tensor, message_size: int) -> tuple[Tensor, int]:
        """As `find_or_add`, of the keys in messages, of which what is no key gets row 0; and their `most_requested`."""
        rows = add_some(self, messages, requested(messages, message_size))
        return rows, most_requested(messages, message_size)

    @abstractmethod
    def keep(self, num_rows: int) -> None:
        """Forget all rows from the given one on. Keys of lower rows may have been overwritten before."""

    def _make_room(self, num_rows: int) -> None:
        """Make room for the keys of this many rows."""
        if num_rows > len(self.keys):
            self.keys = longer(self.keys, max(2 * len(self.keys), num_rows), 0)


class HashIndex(KeyIndex):
    """A hash index on the processor: that of the served tables, in compiled code."""

    def __init__(self, capacity: int = _MIN_CAPACITY) -> None:
        """`capacity`: rows that there is room for at first."""
        self.num_rows = 1
        self._set_capacity(max(capacity, 1) + 1)
        self.keys = torch.empty(self._capacity, dtype=torch.int64, device="cpu")
        self.keys[0] = 0

    def find(self, keys: Tensor) -> Tensor:
        rows = torch.empty(len(keys), dtype=torch.int64, device="cpu")
        find_rows(*self._addresses(), self.num_rows, keys.numpy(), rows.numpy())
        return rows

    def find_or_add(self, keys: Tensor) -> Tensor:
        rows = torch.empty(len(keys), dtype=torch.int64, device="cpu")
        progress = np.zeros(1, np.int64)
        while True:
            self.num_rows = add_rows(
                *self._addresses(), self._capacity, self.num_rows, keys.numpy(), rows.numpy(), progress
            )
            if progress[0] == len(keys):
                return rows
            self._grow()

    def keep(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._index_again()

    def _addresses(self) -> tuple[int, int, int]:
        return self._buckets.data_ptr(), len(self._buckets), self.keys.data_ptr()

    def _set_capacity(self, capacity: int) -> None:
        if capacity > MAX_ROWS:
            raise UnavailableError(f"a table of one rank holds no more than {MAX_ROWS} rows; train on more ranks")
        self._capacity = capacity
        # torch puts tensors at cache lines, as the index wants its buckets.
        shape = capacity // _KEYS_PER_BUCKET + 1, BUCKET_BYTES
        self._buckets = torch.zeros(shape, dtype=torch.uint8, device="cpu")

    def _grow(self) -> None:
        self._set_capacity(max(2 * self._capacity, _MIN_CAPACITY))
        self.keys = longer(self.keys, self._capacity)
        self._index_again()

    def _index_again(self) -> None:
        self._buckets.zero_()
        index_rows(*self._addresses(), self.num_rows)


class DeviceIndex(KeyIndex):
    """A hash index on a GPU, in device memory, by kernels."""

    def __init__(self, device: torch.device, capacity: int = _MIN_CAPACITY) -> None:
        """`capacity`: rows that there is room for at first."""
        self.num_rows = 1
        self.keys = torch.zeros(capacity + 1, dtype=torch.int64, device=device)
        self._entries = self._free_entries(capacity + 1)
        self._counted = torch.ones(2, dtype=torch.int64, device=device)
        """`num_rows`, where kernels count it up; and the `most_requested` of the last messages."""
        self._num_counted, self._most = self._counted.split(1)

    def find(self, keys: Tensor) -> Tensor:
        keys = keys.contiguous()
        rows = torch.empty_like(keys)
        device_rows.find_rows(self._entries, self.keys, keys, rows)
        return rows

    def find_or_add(self, keys: Tensor) -> Tensor:
        """See KeyIndex. Waits for the number of rows."""
        return self._find_or_add(keys.contiguous(), 0)[0]

    def find_or_add_requested(self, messages: Tensor, message_size: int) -> tuple[Tensor, int]:
        """See KeyIndex. Waits for the number of rows."""
        return self._find_or_add(messages, message_size)

    def start_to_add(
        self, messages: Tensor, message_size: int, initial: Tensor, vectors: Tensor
    ) -> tuple[Tensor, Callable[[], int]]:
        """As `find_or_add_requested`, where there is room for as many rows as messages have slots; waits for nothing.

        What is returned with the rows waits until these are counted, and returns `most_requested`; it has to be called
        before anything else here.

        Args:
            initial: what new rows are made of; as of `device_rows.write_claimed`.
            vectors: float32 [len(keys), dim], in which they are made.

        Raises:
            UnavailableError: 2^31 rows are in use.
        """
        rows, places = self._claim(messages, message_size)
        with self._or_nothing_added():
            numbers = device_rows.numbers_on_their_way(self._counted)
        device_rows.write_claimed(self._entries, self.keys, messages, places, rows, message_size, initial, vectors)

        def finish() -> int:
            self.num_rows, most = numbers()
            return most

        return rows, finish

    def _find_or_add(self, keys: Tensor, message_size: int) -> tuple[Tensor, int]:
        rows, places = self._claim(keys, message_size)
        with self._or_nothing_added():
            found, most_of_any = self._counted.tolist()
            self._make_room(found)
        device_rows.write_claimed(self._entries, self.keys, keys, places, rows, message_size)
        self.num_rows = found
        return rows, most_of_any

    def _claim(self, keys: Tensor, message_size: int) -> tuple[Tensor, Tensor]:
        self._make_room_for_entries(len(keys))
        rows, places = torch.empty_like(keys), torch.empty_like(keys, dtype=torch.int32)
        counts, most = self._num_counted, self._most
        device_rows.claim(self._entries, self.keys, keys, counts, places, rows, message_size, most)
        return rows, places

    @contextmanager
    def _or_nothing_added(self) -> Iterator[None]:
        """Forget what was claimed if there is not enough memory."""
        try:
            yield
        except RuntimeError:
            self.keep(self.num_rows)
            raise

    def keep(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._counted[0] = num_rows
        self._entries.zero_()
        device_rows.index_rows(self._entries, self.keys, num_rows)

    def _make_room_for_entries(self, num_added: int) -> None:
        needed = self.num_rows + num_added
        if needed > _MAX_DEVICE_ROWS:
            raise UnavailableError(f"a GPU holds no more than {_MAX_DEVICE_ROWS} rows of a table; train on more ranks")
        if 2 * needed > len(self._entries):
            self._entries = self._free_entries(needed)
            device_rows.index_rows(self._entries, self.keys, self.num_rows)

    def _free_entries(self, num_rows: int) -> Tensor:
        return torch.zeros(_num_entries(num_rows), dtype=torch.int64, device=self.keys.device)


class SortedIndex(KeyIndex):
    """An index on any device, by torch's operators: sorted keys, and apart from them the newest, merged at times."""

    def __init__(self, device: torch.device) -> None:
        self.num_rows = 1
        self.keys = torch.zeros(_MIN_CAPACITY, dtype=torch.int64, device=device)
        self._set_levels(1)

    def find(self, keys: Tensor) -> Tensor:
        return self._find_in(self._recent, keys) + self._find_in(self._older, keys)

    def find_or_add(self, keys: Tensor) -> Tensor:
        found, places = torch.unique(keys, return_inverse=True)
        rows = self.find(found)
        added = found[rows == 0]
        if len(added):
            first, self.num_rows = self.num_rows, self.num_rows + len(added)
            self._make_room(self.num_rows)
            self.keys[first : self.num_rows] = added
            rows[rows == 0] = torch.arange(first, self.num_rows, device=keys.device)
            is_merged = 8 * (self.num_rows - self._num_older) > self._num_older + 8 * _MIN_CAPACITY
            self._set_levels(self.num_rows if is_merged else self._num_older)
        return rows[places]

    def keep(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._set_levels(num_rows)

    def _set_levels(self, num_older: int) -> None:
        """Sort rows from 1 to num_older unless that is done, and those behind them."""
        if num_older != getattr(self, "_num_older", None) or num_older == self.num_rows:
            self._older = self._sorted(1, num_older)
        self._num_older = num_older
        self._recent = self._sorted(num_older, self.num_rows)

    def _sorted(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        keys, order = self.keys[first:last].sort()
        return keys, order + first

    def _find_in(self, level: tuple[Tensor, Tensor], keys: Tensor) -> Tensor:
        known, rows = level
        if not len(known):
            return torch.zeros_like(keys)
        places = torch.searchsorted(known, keys).clamp(max=len(known) - 1)
        return torch.where(known[places] == keys, rows[places], 0)


def create_index(device: torch.device) -> KeyIndex:
    """The index that fits a device."""
    if device.type == "cpu":
        return HashIndex()
    return DeviceIndex(device) if device_rows.can_run(device) else SortedIndex(device)


def _num_entries(num_rows: int) -> int:
    """Of a device's index with room for some rows."""
    return 1 << (2 * num_rows - 1).bit_length()


class Distinct(NamedTuple):
    """The distinct keys of a batch, ordered by owners."""

    keys: Tensor
    """int64 [m or more]: each once; what follows behind them has no meaning."""
    places: Tensor
    """int64 [n]: where each key of the batch is among them."""
    counts: Tensor
    """int64 [owners]: how many of them each owner has."""


class Requests(NamedTuple):
    """The distinct keys of a batch, in messages to their owners.

    A message has how many keys there are, the most of any message of the same sender, and the keys; what follows behind
    them has no meaning. If there are more keys than slots, it has some of them.
    """

    messages: Tensor
    """int64 [owners * message_size]"""
    places: Tensor
    """int64 [n]: where each key of the batch is among all slots; no meaning where these are too few."""


HEADER = 2
"""Numbers of a message in front of its keys."""


def message_size_for(num_keys: int) -> int:
    """Of messages with some room: in other batches there may be a few more keys."""
    return HEADER + 16 + num_keys + num_keys // 16 + 4 * isqrt(num_keys)


def requested(messages: Tensor, message_size: int) -> Tensor:
    """Where keys are in messages: bool [messages * message_size]."""
    shaped = messages.reshape(-1, message_size)
    slots = torch.arange(-HEADER, message_size - HEADER, device=messages.device)
    return ((slots >= 0) & (slots < shaped[:, :1])).reshape(-1)


def most_requested(messages: Tensor, message_size: int) -> int:
    """The most keys that any rank requests from any other, the same on all ranks. Waits for the messages."""
    return awaited_most(messages, message_size)()


def awaited_most(messages: Tensor, message_size: int) -> Callable[[], int]:
    """Waits for `most_requested`, but for nothing that is launched after this call."""
    most = messages[1::message_size].max().reshape(1)
    if not device_rows.can_run(messages.device):
        number = int(most)
        return lambda: number
    numbers = device_rows.numbers_on_their_way(most)
    return lambda: numbers()[0]


def add_some(index: KeyIndex, keys: Tensor, which: Tensor) -> Tensor:
    """As `find_or_add` of some of the keys, by a mask [n]; others get row 0."""
    rows = torch.zeros_like(keys)
    rows[which] = index.find_or_add(keys[which])
    return rows


def owners(keys: Tensor, num_owners: int) -> Tensor:
    """The owner of each key, int64 [n]: key % num_owners, also for negative keys."""
    return torch.remainder(keys, num_owners)


def mixed_bits(keys: Tensor) -> Tensor:
    """Well-mixed bits of keys: int64 [n], 0 to 2^62 (SplitMix64's finaliser; torch's products wrap around)."""
    mixed = keys ^ 0x1E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return (mixed ^ (mixed >> 31 & 0x1FFFFFFFF)) & 0x3FFFFFFFFFFFFFFF


def distinct(keys: Tensor) -> tuple[Tensor, Tensor]:
    """int64 [n] to each of them once, int64 [m], and where each of the n stands there, int64 [n]."""
    if device_rows.can_run(keys.device):
        found = number_by_owner(keys, torch.empty_like(keys), 1)
        return found.keys[: int(found.counts)], found.places
    if keys.device.type != "cpu":
        found, places = torch.unique(keys, return_inverse=True)
        return found, places
    index = HashIndex(len(keys) // 4)
    places = index.find_or_add(keys) - 1
    return index.keys[1 : index.num_rows], places


def distinct_in_common(keys: Tensor) -> tuple[Tensor, Tensor]:
    """As `distinct`, in an order that is the same for all processes that give the same keys."""
    found, places = distinct(keys)
    if keys.device.type == "cpu":  # in the order of the keys
        return found, places
    # The threads of a GPU number them in any order.
    found, order = found.sort()
    moved_to = torch.empty_like(order)
    moved_to[order] = torch.arange(len(order), device=order.device)
    return found, moved_to[places]


def distinct_by_owner(keys: Tensor, num_owners: int) -> Distinct:
    """As `distinct`, ordered by owners. Waits for no device where kernels run."""
    if device_rows.can_run(keys.device):
        return number_by_owner(keys, torch.empty_like(keys), num_owners)
    found, places = distinct(keys)
    owner = owners(found, num_owners)
    order = torch.argsort(owner.to(torch.int32), stable=True)
    moved_to = torch.empty_like(order)
    moved_to[order] = torch.arange(len(order), device=order.device)
    return Distinct(found[order], moved_to[places], torch.bincount(owner, minlength=num_owners))


def requests_by_owner(keys: Tensor, num_owners: int, message_size: int) -> Requests:
    """The distinct keys of a batch, int64 [n], in messages of one size. Waits for no device where kernels run."""
    if device_rows.can_run(keys.device):
        messages = keys.new_empty(num_owners * message_size)
        return Requests(messages, number_by_owner(keys, messages, num_owners, message_size).places)
    found, places, counts = distinct_by_owner(keys, num_owners)
    owner = owners(found, num_owners)
    numbers = torch.arange(len(found), device=found.device) - (counts.cumsum(0) - counts)[owner]
    slots = owner * message_size + numbers + HEADER
    fits = numbers < message_size - HEADER
    messages = keys.new_zeros(num_owners * message_size)
    messages[slots[fits]] = found[fits]
    messages[::message_size], messages[1::message_size] = counts, counts.max()
    return Requests(messages, slots[places])


def number_by_owner(
    keys: Tensor, found: Tensor, num_owners: int, message_size: int = 0, outputs: Tensor | None = None, rank: int = 0
) -> Distinct:
    """By kernels, the distinct keys of a batch to `found`, or in messages there or to `outputs`.

    `places` are those in `found`; with messages, those among all slots. See `device_rows.number_by_owner`.
    """
    keys = keys.contiguous()
    zeros = keys.new_zeros(_num_entries(len(keys)) + num_owners)
    entries, counts = zeros[:-num_owners], zeros[-num_owners:]
    claimed, numbers, places = torch.empty_like(keys), torch.empty_like(keys), torch.empty_like(keys, dtype=torch.int32)
    device_rows.claim(entries, found, keys, counts, places, claimed)
    arguments = keys, places, claimed, counts, numbers, message_size, outputs, rank
    device_rows.number_by_owner(entries, found, *arguments)
    return Distinct(found, numbers, counts)
