"""A store in plain dictionaries: the specification of every other store, and a tier for tests. Not made for speed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from inference_session.parameter_server.base import EmbeddingStore, check_insert
from inference_session.tables.base import RowBatch, check_fetch


class MemoryStore(EmbeddingStore):
    """Tables that exist as long as the object."""

    def __init__(self, embedding_dims: Mapping[str, int]) -> None:
        super().__init__(embedding_dims)
        self.rows: dict[str, dict[int, NDArray[np.float32]]] = {table: {} for table in embedding_dims}
        self._notes: dict[str, str] = {}
        self._lock = threading.Lock()

    def num_rows(self, table: str) -> int:
        """Number of rows."""
        return len(self._open(table))

    def fetch(self, table: str, keys: NDArray[np.int64], out: NDArray[np.float32]) -> NDArray[np.bool_]:
        rows = self._open(table)
        check_fetch(keys, out, self.embedding_dim(table))
        found = np.zeros(len(keys), np.bool_)
        with self._lock:
            for i, key in enumerate(keys.tolist()):
                if key in rows:
                    out[i], found[i] = rows[key], True
        return found

    def scan(self, table: str) -> Iterator[RowBatch]:
        """See EmbeddingStore. All in one batch, a snapshot of one moment."""
        rows = self._open(table)
        with self._lock:
            keys, vectors = np.array(list(rows), np.int64), list(rows.values())
        if vectors:
            yield keys, np.array(vectors)

    def insert(self, table: str, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        rows = self._open(table)
        check_insert(keys, vectors, self.embedding_dim(table))
        with self._lock:
            rows.update(zip(keys.tolist(), vectors.copy(), strict=True))

    def erase(self, table: str, keys: NDArray[np.int64]) -> None:
        rows = self._open(table)
        with self._lock:
            for key in keys.tolist():
                rows.pop(key, None)

    def clear(self, table: str) -> None:
        rows = self._open(table)
        with self._lock:
            rows.clear()
            self._notes.pop(table, None)

    def check(self) -> None:
        self._refuse_if_closed()

    def note(self, table: str) -> str | None:
        self._open(table)
        return self._notes.get(table)

    def set_note(self, table: str, text: str) -> None:
        self._open(table)
        self._notes[table] = text

    def close(self) -> None:
        """Refuse further calls."""
        self._closed = True

    def __repr__(self) -> str:
        return f"<MemoryStore [{len(self.rows)} tables]>"

    def _open(self, table: str) -> dict[int, NDArray[np.float32]]:
        self._refuse_if_closed()
        self.embedding_dim(table)
        return self.rows[table]
