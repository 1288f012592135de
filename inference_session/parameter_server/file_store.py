"""The table files of a version as a tier: all rows, none of which ever changes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import StoreError
from inference_session.parameter_server.base import EmbeddingStore
from inference_session.tables.base import RowBatch
from inference_session.version_directory.version import VersionDirectory


class TableFileStore(EmbeddingStore):
    """All tables of a version directory, by their folders, as a tier that is read only."""

    def __init__(self, version: VersionDirectory, *, verify_indexes: bool = False) -> None:
        """Open the tables as VersionDirectory.open_tables."""
        self._spec = version.spec
        files = version.open_tables(verify_indexes=verify_indexes)
        self._files = {file.spec.folder: file for file in files}

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables' folders."""
        return tuple(self._files)

    @property
    def supports_writes(self) -> bool:
        """Never."""
        return False

    def embedding_dim(self, table: str) -> int:
        """Number of elements of the table's vectors."""
        return self._spec.table_in(table).embedding_dim

    def num_rows(self, table: str) -> int:
        """Number of rows in the table's files."""
        return self._spec.table_in(table).num_rows

    def fetch(self, table: str, keys: NDArray[np.int64], out: NDArray[np.float32]) -> NDArray[np.bool_]:
        """See EmbeddingStore."""
        return self._files[self._spec.table_in(table).folder].fetch(keys, out)

    def scan(self, table: str) -> Iterator[RowBatch]:
        """See EmbeddingStore. Of rows with equal keys the last one, each time."""
        return self._files[self._spec.table_in(table).folder].scan()

    def insert(self, table: str, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:  # noqa: ARG002
        """Refused."""
        raise StoreError(f"table {self._spec.table_in(table).name!r} is in files, which are never changed")

    def erase(self, table: str, keys: NDArray[np.int64]) -> None:  # noqa: ARG002
        """Refused."""
        raise StoreError(f"table {self._spec.table_in(table).name!r} is in files, which are never changed")

    def close(self) -> None:
        """Close every table."""
        for file in self._files.values():
            file.close()
