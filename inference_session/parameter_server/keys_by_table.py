"""Sets of keys, one per table, that stay small: of too many keys only the table is remembered."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class KeysByTable:
    """The keys, by table. Needs a lock where threads share it."""

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
        """All tables, with their keys, each once; None: all keys of the table."""
        return {
            table: None if parts is None else np.unique(np.concatenate(parts)) for table, parts in self._parts.items()
        }

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
        """Keep each key once; if too many are left to repeat this often, count all keys."""
        keys = np.unique(np.concatenate(parts))
        self._parts[table] = [keys] if len(keys) <= self._max_keys // 2 else None
        self._num_keys[table] = len(keys)

    def _remove(self, table: str) -> None:
        del self._parts[table]
        self._num_keys.pop(table, None)
