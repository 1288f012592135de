"""Keys that no tier has, remembered briefly, so that not every request for a popular one asks all tiers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from inference_session.parameter_server.write_log import WriteLog

_SLOT_BITS = 13
NUM_SLOTS = 1 << _SLOT_BITS
MEMORY_S = 1.0

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(64 - _SLOT_BITS)


class _UnknownInTable:
    """Bounded: a later key takes the place of an earlier one whose hash it shares.

    Reading takes no lock: a key is entered before its time, and all keys that meet in a slot are unknown at that time.
    """

    def __init__(self) -> None:
        self.keys = np.zeros(NUM_SLOTS, np.int64)
        self.until = np.full(NUM_SLOTS, -np.inf)
        self.any_until = -np.inf


class UnknownKeys:
    """The unknown keys of all tables. Thread-safe."""

    def __init__(self, log: WriteLog, clock: Callable[[], float] = time.monotonic) -> None:
        """`log`: of writes to the tiers, each of which is followed by `forget`."""
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._tables: dict[str, _UnknownInTable] = {}

    def add(self, table: str, keys: NDArray[np.int64], since: int, now: float) -> None:
        """Remember keys, int64 [n], that no tier had, except those written meanwhile. They were asked for at the moment
        `since` of the log, and at the time `now` of the clock.
        """
        with self._lock:
            unknown = keys[~self._log.written(table, keys, since)]
            if len(unknown):
                memory, slots = self._tables.setdefault(table, _UnknownInTable()), _slots(unknown)
                memory.keys[slots] = unknown
                memory.until[slots] = memory.any_until = now + MEMORY_S

    def forget(self, table: str, keys: NDArray[np.int64]) -> None:
        """Forget keys, int64 [n], that were written; the log has the write already."""
        with self._lock:
            if memory := self._tables.get(table):
                slots = _slots(keys)
                memory.until[slots[memory.keys[slots] == keys]] = -np.inf

    def forget_all(self) -> None:
        """Forget all keys: any of them may have been written."""
        with self._lock:
            self._tables.clear()

    def holds(self, table: str, keys: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Which of the keys, int64 [n], were unknown a moment ago: bool [n]; None: none of them."""
        memory, now = self._tables.get(table), self._clock()
        if memory is None or now >= memory.any_until:
            return None
        slots = _slots(keys)
        unknown: NDArray[np.bool_] = (memory.keys[slots] == keys) & (memory.until[slots] > now)
        return unknown


def _slots(keys: NDArray[np.int64]) -> NDArray[np.uint64]:
    slots: NDArray[np.uint64] = (keys.view(np.uint64) * _MULTIPLIER) >> _SHIFT
    return slots
