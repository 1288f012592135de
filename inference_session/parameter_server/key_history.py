"""What has happened to keys of late: which were written, and which no tier had."""

from __future__ import annotations

import threading
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from inference_session.parameter_server.recent_writes import RecentWrites
from inference_session.parameter_server.unknown_keys import UnknownKeys


class KeyHistory:
    """Of each table, the recent writes and the unknown keys. Thread-safe.

    Both change together: a key that is written while a fetch finds it nowhere is not remembered as unknown.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writes: defaultdict[str, RecentWrites] = defaultdict(RecentWrites)
        self._unknown: dict[str, UnknownKeys] = {}

    def moment(self, table: str) -> int:
        """Of the table's writes, for `written` to count from."""
        with self._lock:
            return self._writes[table].moment

    def written(self, table: str, keys: NDArray[np.int64], since: int) -> NDArray[np.bool_]:
        """Which of the keys may have been written since a moment."""
        with self._lock:
            return self._writes[table].written(keys, since)

    def unknown(self, table: str, keys: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Which of the keys no tier had a moment ago; None: none of them."""
        memory = self._unknown.get(table)
        return None if memory is None else memory.holds(keys)

    def add_written(self, table: str, keys: NDArray[np.int64]) -> None:
        """A write of these keys is done."""
        with self._lock:
            self._writes[table].add(keys)
            if table in self._unknown:
                self._unknown[table].forget(keys)

    def add_unknown(self, table: str, keys: NDArray[np.int64], since: int, now: float) -> None:
        """No tier had these keys, which were asked for at a moment of writes, and at a time of the monotonic clock."""
        with self._lock:
            written = self._writes[table].written(keys, since)  # and so may be there by now
            self._unknown.setdefault(table, UnknownKeys()).add(keys[~written], now)

    def forget_unknown(self) -> None:
        """Any key may be known from now on."""
        with self._lock:
            self._unknown.clear()

    @property
    def any_written(self) -> bool:
        """Whether there have been any writes."""
        with self._lock:
            return any(writes.moment for writes in self._writes.values())

    def written_tables(self) -> dict[str, NDArray[np.int64] | None]:
        """The tables that have been written to, and the keys of all their writes; None where some are forgotten."""
        with self._lock:
            return {table: writes.keys() for table, writes in self._writes.items() if writes.moment}
