"""When rows were written: what was read before a write must not be kept after it.

Rows are copied upward: from a store to a tier above it, to the embedding cache, into what was computed of a context.
A copy may be made of the old row and arrive after the new one. So code that copies rows reads the log's `moment`, then
the rows; code that stores the copy checks, under the lock that writers of the copy take, whether they have been written
since. A writer changes the rows within `writing`.

A write takes time: first one tier has the new row, then another, then the caches. What is read meanwhile may be the old
row or the new one, and a look-up may have answered the new one already. So rows count as written from the beginning of
a write on, and `moment` tells of a write when it has ended: no copy that was read before the end is stored after the
beginning.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MAX_WRITTEN_KEYS = 1 << 18
"""Different keys of a table that are remembered for the case that a volatile store loses what was written to it."""
_SLOT_BITS = 20
_NUM_SLOTS = 1 << _SLOT_BITS
"""Keys of all tables share these, 8 MiB: an unwritten row may seem written, but never the reverse."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(64 - _SLOT_BITS)


class WriteLog:
    """The writes to the rows of all tables, by a clock that counts writes. Thread-safe.

    Tables are named by their folders. Reading takes no lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of threads that write
        self._numbers = itertools.count(1)
        self._num_begun = 0
        self._under_way: set[int] = set()
        """The numbers of writes that have begun and not ended."""
        self._all_written_at = 0
        self._written_at = np.zeros(_NUM_SLOTS, np.int64)

    @property
    def moment(self) -> int:
        """All writes up to this number have ended: rows read from now on include them."""
        num_begun = self._num_begun  # read first, as writes may begin meanwhile
        return min(self._under_way, default=num_begun + 1) - 1

    @property
    def num_begun(self) -> int:
        """How many writes have begun: those that begin from now on have larger numbers."""
        return self._num_begun

    @contextlib.contextmanager
    def writing(self, table: str, keys: NDArray[np.int64]) -> Iterator[None]:
        """Within the context, the rows of these keys, int64 [n], are written, also where it ends by an error."""
        slots, number = self.slots(table, keys), 0
        try:
            with self._lock:
                number = next(self._numbers)
                self._under_way.add(number)
                self._written_at[slots] = self._num_begun = number
            yield
        finally:
            self._under_way.discard(number)  # also if Ctrl-C came between any two of these steps

    def add(self, table: str, keys: NDArray[np.int64]) -> None:
        """The rows of these keys, int64 [n], have been written."""
        with self.writing(table, keys):
            pass

    def add_all(self) -> None:
        """Any rows of any table may have been written."""
        with self._lock:
            self._all_written_at = self._num_begun = next(self._numbers)

    def any_since(self, moment: int) -> bool:
        """Whether any write has begun since a moment, or after so many writes."""
        return self._num_begun != moment

    def written(self, table: str, keys: NDArray[np.int64], since: int) -> NDArray[np.bool_]:
        """Which of the rows, bool [n], may have been written since a moment, or by a write after so many."""
        if not self.any_since(since):
            return np.zeros(len(keys), np.bool_)
        if self._all_written_at > since:
            return np.ones(len(keys), np.bool_)
        return self._written_at[self.slots(table, keys)] > since

    def slots(self, table: str, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """What `any_written` needs for these rows, int64 [n]; may be joined with those of other tables."""
        hashed = (np.asarray(keys, np.int64) ^ hash(table)).view(np.uint64)
        hashed *= _FACTOR
        hashed >>= _SHIFT
        return hashed.view(np.int64)

    def any_written(self, slots: NDArray[np.int64], since: int) -> bool:
        """Whether a row of these slots [n] may have been written since a moment."""
        return bool(len(slots)) and (self._all_written_at > since or int(self._written_at[slots].max()) > since)


class KeysByTable:
    """Sets of keys by table that stay small: of too many keys only the table is remembered. Not thread-safe."""

    def __init__(self, max_keys: int) -> None:
        """`max_keys`: different keys of a table that are remembered; more of them count as all keys of the table."""
        self._max_keys = max_keys
        self._parts: dict[str, list[NDArray[np.int64]] | None] = {}
        """None: all keys of the table."""
        self._num_keys: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, table: str, keys: NDArray[np.int64] | None) -> None:
        """Add keys of a table, int64 [n]; None: all of its keys."""
        parts = self._parts.get(table, [])
        if keys is None or parts is None:
            self._parts[table] = None
        elif len(keys):
            parts.append(keys.copy())
            self._num_keys[table] = self._num_keys.get(table, 0) + len(keys)
            self._parts[table] = parts
            if self._num_keys[table] > self._max_keys:
                self._merge(table, parts)

    def as_dict(self) -> dict[str, NDArray[np.int64] | None]:
        """All tables, with their keys [n], each once; None: all keys of the table."""
        return {
            table: None if parts is None else np.unique(np.concatenate(parts)) for table, parts in self._parts.items()
        }

    def take(self, max_keys: int) -> tuple[str, NDArray[np.int64] | None]:
        """A table and some of its keys [n], or None for all of them. They are forgotten unless they are added again."""
        table, parts = next(iter(self._parts.items()))
        if parts is None:
            self._remove(table)
            return table, None
        taken = [parts.pop()]
        while parts and sum(map(len, taken)) + len(parts[-1]) <= max_keys:
            taken.append(parts.pop())
        keys = np.concatenate(taken)
        if len(keys) > max_keys:
            parts.append(keys[max_keys:])
        self._num_keys[table] -= len(keys[:max_keys])
        if not parts:
            self._remove(table)
        return table, keys[:max_keys]

    def _merge(self, table: str, parts: list[NDArray[np.int64]]) -> None:
        """Keep each key once; if too many are left to repeat this often, count all keys."""
        keys = np.unique(np.concatenate(parts))
        self._parts[table] = [keys] if len(keys) <= self._max_keys // 2 else None
        self._num_keys[table] = len(keys)

    def _remove(self, table: str) -> None:
        del self._parts[table]
        self._num_keys.pop(table, None)


@dataclass(frozen=True)
class TierWrites:
    """The writes to the tiers of a parameter server."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while rows are written and added to the following."""
    log: WriteLog = field(default_factory=WriteLog)
    """Writes to the rows of all tables, by their folders."""
    own: WriteLog = field(default_factory=WriteLog)
    """The writes among these that this process has made to all tiers."""
    keys: KeysByTable = field(default_factory=lambda: KeysByTable(MAX_WRITTEN_KEYS))
    """The keys that were written since the server was made."""
