"""Table files below a store that remembers which of their rows were erased: files themselves are never changed.

The erased keys are rows of a second table in the store, next to the one they were erased from, one element wide. They
outlive this process as the store's rows do, and every other process that reads the store sees them. What the store
loses, or cannot show because it is down, is not erased any more (docs/how-to/use-stores.md has a table by store).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import StoreError, UnavailableError
from inference_session.parameter_server.base import ERASED_SUFFIX, EmbeddingStore, FetchRequest
from inference_session.parameter_server.wrapper_store import WrapperStore
from inference_session.tables.base import RowBatch


class DeletableFiles(WrapperStore):
    """The rows of files, except erased ones. What is inserted is in the store, which is asked first."""

    def __init__(self, files: EmbeddingStore, store: EmbeddingStore) -> None:
        """`store` has a table `<table>~erased` of embedding_dim 1 for every table of the files; others close it."""
        super().__init__(files)
        self._memory = store
        self._any_erased = dict.fromkeys(files.tables, False)
        self.refresh()

    @property
    def supports_writes(self) -> bool:
        """Rows can be erased."""
        return True

    @property
    def keeps_rows(self) -> bool:
        """Never: see `insert`."""
        return False

    @property
    def is_shared(self) -> bool:
        """Whether other processes may erase rows."""
        return self._memory.is_shared

    def fetch(self, table: str, keys: NDArray[np.int64], out: NDArray[np.float32]) -> NDArray[np.bool_]:
        """See EmbeddingStore. While the store is down, rows erased from the files reappear."""
        found = self.store.fetch(table, keys, out)
        if self._any_erased[table] and found.any():
            with contextlib.suppress(UnavailableError, StoreError):
                found[found] = ~self._erased(table, keys[found])
        return found

    def fetch_many(self, requests: Sequence[FetchRequest]) -> list[NDArray[np.bool_]]:
        """See EmbeddingStore."""
        return [self.fetch(*request) for request in requests]

    def scan(self, table: str) -> Iterator[RowBatch]:
        """See EmbeddingStore."""
        for keys, vectors in self.store.scan(table):
            left = ~self._erased(table, keys)
            yield keys[left], vectors[left]

    def insert(self, table: str, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Nothing: the store above has the rows, and comes before the files."""

    def erase(self, table: str, keys: NDArray[np.int64]) -> None:
        """See EmbeddingStore."""
        held = self.store.fetch(table, keys, np.empty((len(keys), self.embedding_dim(table)), np.float32))
        if held.any():
            self._memory.insert(table + ERASED_SUFFIX, keys[held], np.ones((int(held.sum()), 1), np.float32))
            self._any_erased[table] = True

    def refresh(self) -> None:
        """See whether others have erased rows of a table from which none were erased so far."""
        with contextlib.suppress(UnavailableError, StoreError):
            for table in [table for table, known in self._any_erased.items() if not known]:
                if self._memory.num_rows(table + ERASED_SUFFIX):  # no other answer says that none is being erased now
                    self._any_erased[table] = True

    def _erased(self, table: str, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        keys = np.ascontiguousarray(keys)
        return self._memory.fetch(table + ERASED_SUFFIX, keys, np.empty((len(keys), 1), np.float32))
