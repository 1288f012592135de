"""NullEmbeddingCache: the contract with nothing in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inference_session.embedding_cache.cpu import HostCache
from inference_session.embedding_cache.missing_rows import empty_tables
from inference_session.embedding_cache.stats import RowCounts

_Result = TypeVar("_Result")


class NullEmbeddingCache(HostCache):
    """Takes rows and forgets them; every look-up misses. It refuses only what every cache refuses."""

    def read(self, use: Callable[[NDArray[np.void]], _Result]) -> _Result:
        self._check_open()
        return use(empty_tables(self._dims))

    def insert(self, table: str, keys: ArrayLike, vectors: ArrayLike) -> None:
        self._checked_rows(table, keys, vectors)

    update = insert

    def erase(self, table: str, keys: ArrayLike) -> None:
        self._checked_keys(table, keys)

    def dump(self, table: str) -> NDArray[np.int64]:
        self._check(table)
        return np.empty(0, np.int64)

    def close(self) -> None:
        self._closed = True

    def _row_counts(self, table: str) -> RowCounts:
        self._check(table)
        return RowCounts(0, 0, 0, 0, 0, 0, 0)
