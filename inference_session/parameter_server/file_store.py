"""The table files of a version as a tier: all of their rows, except those that were erased.

Files are never changed. A store keeps the erased keys as the keys of a second table, one element wide. So they outlive
this process if the store's rows do, and other processes that read the store see them. If the store loses them, or is
down, the rows of the files are answered again (docs/how-to/use-stores.md has a table by store).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import StoreError, UnavailableError
from inference_session.parameter_server.base import ERASED_SUFFIX, EmbeddingStore
from inference_session.tables.base import RowBatch
from inference_session.tables.table_file import TableFile
from inference_session.version_directory.version import VersionDirectory


class TableFileStore(EmbeddingStore):
    """All tables of a version directory, by their folders, except erased rows.

    What is inserted is in the store above, which is asked first.
    """

    def __init__(
        self,
        version: VersionDirectory,
        store: EmbeddingStore,
        *,
        verify_indexes: bool = False,
        asks_for_erased: Callable[[], bool] = bool,
    ) -> None:
        """Open the tables as VersionDirectory.open_tables.

        `store`: has a table `<table>~erased` of embedding_dim 1 for each of them; the caller closes it.
        `asks_for_erased`: whether to ask the store which rows of a table are erased even where no erased one is known.
        """
        self._files = {file.spec.folder: file for file in version.open_tables(verify_indexes=verify_indexes)}
        super().__init__({table: file.spec.embedding_dim for table, file in self._files.items()})
        self._store, self._asks_for_erased = store, asks_for_erased
        self._any_erased = dict.fromkeys(self._files, False)
        self.refresh()

    @property
    def keeps_rows(self) -> bool:
        """Never: see `insert`."""
        return False

    @property
    def is_shared(self) -> bool:
        """Whether other processes may erase rows."""
        return self._store.is_shared

    def num_rows(self, table: str) -> int:
        """Number of rows in the table's files, erased ones as well."""
        return self._file(table).spec.num_rows

    def fetch(self, table: str, keys: NDArray[np.int64], out: NDArray[np.float32]) -> NDArray[np.bool_]:
        """See EmbeddingStore. While the store is down, rows erased from the files reappear."""
        found = self._file(table).fetch(keys, out)
        if found.any() and (self._any_erased[table] or self._asks_for_erased()):
            with contextlib.suppress(UnavailableError, StoreError):
                found[found] = ~self._erased(table, keys[found])
        return found

    def scan(self, table: str) -> Iterator[RowBatch]:
        """See EmbeddingStore. Of rows with equal keys the last one, each time."""
        for keys, vectors in self._file(table).scan():
            left = ~self._erased(table, keys)
            yield keys[left], vectors[left]

    def insert(self, table: str, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Does nothing: the store above has the rows, and is asked before the files."""

    def erase(self, table: str, keys: NDArray[np.int64]) -> None:
        found = self._file(table).fetch(keys, np.empty((len(keys), self.embedding_dim(table)), np.float32))
        if found.any():
            self._store.insert(table + ERASED_SUFFIX, keys[found], np.ones((int(found.sum()), 1), np.float32))
            self._any_erased[table] = True

    def refresh(self) -> None:
        """See whether others have erased rows of a table from which none were erased so far."""
        with contextlib.suppress(UnavailableError, StoreError):
            for table in [table for table, known in self._any_erased.items() if not known]:
                if self._store.num_rows(table + ERASED_SUFFIX):
                    self._any_erased[table] = True

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _file(self, table: str) -> TableFile:
        self.embedding_dim(table)  # refuses other tables
        return self._files[table]

    def _erased(self, table: str, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        keys = np.ascontiguousarray(keys)
        return self._store.fetch(table + ERASED_SUFFIX, keys, np.empty((len(keys), 1), np.float32))
