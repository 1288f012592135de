"""Remembers which rows this process has changed, for those who keep what they computed from rows."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

_NUM_PLACES = 1 << 15
"""Of each table. Keys share them: a row may seem to have changed that has not, never the other way round."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(64 - 15)


class RowChanges:
    """When rows were last changed, by a clock that counts changes. Thread-safe."""

    def __init__(self, num_tables: int) -> None:
        self._lock = threading.Lock()
        self._changed = np.zeros(num_tables * _NUM_PLACES, np.int64)
        self._moment = 0

    @property
    def moment(self) -> int:
        """How many changes there have been: what is read from now on has all of them."""
        return self._moment

    def add(self, table: int, keys: NDArray[np.int64] | None) -> None:
        """These rows, or all of the table, have changed: look-ups already answer the new ones."""
        with self._lock:
            self._moment += 1
            if keys is None:
                self._changed[table * _NUM_PLACES : (table + 1) * _NUM_PLACES] = self._moment
            else:
                self._changed[self.places(table, keys)] = self._moment

    def places(self, table: int, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """What `any_since` wants to know of these rows."""
        hashed = (np.ascontiguousarray(keys, np.int64).view(np.uint64) * _FACTOR) >> _SHIFT
        return np.asarray(hashed.astype(np.int64) + table * _NUM_PLACES)

    def any_since(self, places: NDArray[np.int64], moment: int) -> bool:
        """Whether any of the rows has changed since that moment."""
        return bool(len(places)) and int(self._changed[places].max()) > moment
