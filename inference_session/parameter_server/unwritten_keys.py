"""Keys whose newest rows a volatile tier has missed: it drops the older ones before it is used again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_KEYS = 1_000_000
"""Different keys of a table that are remembered; with more of them the tier drops the whole table."""


class UnwrittenKeys:
    """The keys, by table. Whoever shares it brings the lock."""

    def __init__(self) -> None:
        self._parts: dict[str, list[NDArray[np.int64]] | None] = {}
        """None: all keys of the table."""
        self._num_keys: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, table: str, keys: NDArray[np.int64] | None) -> None:
        """Rows of these keys have been missed; None: of any key."""
        parts = self._parts.get(table, [])
        if keys is None or parts is None:
            self._parts[table] = None
        elif len(keys):
            parts.append(keys.copy())
            self._num_keys[table] = self._num_keys.get(table, 0) + len(keys)
            self._parts[table] = parts
            if self._num_keys[table] > MAX_KEYS:
                self._merge(table, parts)

    def take(self, max_keys: int) -> tuple[str, NDArray[np.int64] | None]:
        """Some keys of a table, or None for all of its keys. They are forgotten unless they are added again."""
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
        """Keep each key once; all keys where too many are left to do this again and again."""
        keys = np.unique(np.concatenate(parts))
        self._parts[table] = [keys] if len(keys) <= MAX_KEYS // 2 else None
        self._num_keys[table] = len(keys)

    def _remove(self, table: str) -> None:
        del self._parts[table]
        self._num_keys.pop(table, None)
