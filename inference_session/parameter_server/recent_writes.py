"""Which keys were written of late: rows that were fetched before a write of theirs must not be kept after it."""

from __future__ import annotations

from collections import deque
from itertools import islice

import numpy as np
from numpy.typing import NDArray

MAX_KEYS = 1 << 18
"""Keys of a table that are remembered, 2 MiB."""


class RecentWrites:
    """The writes to one table. Whoever shares it brings the lock.

    A reader notes the `moment` before it fetches, and asks later which of its keys have been written since. Of a moment
    so long ago that the writes after it are forgotten, all keys count as written.
    """

    def __init__(self) -> None:
        self.moment = 0
        """How many writes there have been."""
        self._keys: deque[NDArray[np.int64]] = deque()
        self._num_keys = 0

    def add(self, keys: NDArray[np.int64]) -> None:
        """A write of these keys is done."""
        if not len(keys):
            return
        self.moment += 1
        self._keys.append(keys.copy())
        self._num_keys += len(keys)
        while self._num_keys > MAX_KEYS:
            self._num_keys -= len(self._keys.popleft())

    def add_all(self) -> None:
        """A write of any keys is done."""
        self.moment += 1
        self._keys.clear()
        self._num_keys = 0

    def keys(self) -> NDArray[np.int64] | None:
        """The keys of all writes there have been; None if some are forgotten."""
        if self.moment > len(self._keys):
            return None
        return np.unique(np.concatenate([np.empty(0, np.int64), *self._keys]))

    def written(self, keys: NDArray[np.int64], since: int) -> NDArray[np.bool_]:
        """Which of the keys may have been written since a moment."""
        num_writes = self.moment - since
        if num_writes == 0:
            return np.zeros(len(keys), np.bool_)
        if num_writes > len(self._keys):
            return np.ones(len(keys), np.bool_)
        written: NDArray[np.bool_] = np.isin(keys, np.concatenate(list(islice(reversed(self._keys), num_writes))))
        return written
