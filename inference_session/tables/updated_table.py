"""UpdatedTable: the rows of one table that are newer than its files, all of them in memory."""

from __future__ import annotations

from threading import Lock

import numpy as np
from numpy.typing import NDArray

from inference_session.device.host import Readers, zeros_at_line
from inference_session.kernels.cpu.hash_index import BUCKET_BYTES
from inference_session.kernels.cpu.updated_table import FREE, RETIRED, UpdatedArrays, free_retired, put_rows
from inference_session.kernels.records import address_of, table_record
from inference_session.tables.base import UpdatedRows

_FIRST_CAPACITY = 1024
_SPARE_PARTS = 8
"""One row in this many must be free after replaced rows have been freed; with fewer the table grows."""


class UpdatedTable:
    """Grows with the number of different keys. One thread writes while look-ups, which enter `readers`, go on."""

    def __init__(self, default_vector: NDArray[np.float32], readers: Readers) -> None:
        """`default_vector`, float32 [embedding_dim]: the answer for deleted keys."""
        self._default_vector = default_vector
        self._readers = readers
        self._lock = Lock()
        self.arrays = _allocate(_FIRST_CAPACITY, len(default_vector))
        self.any_deleted = False
        """Whether any row has ever been deleted."""
        put_rows(self.arrays, *_rows(np.empty(0, np.int64), np.empty((0, len(default_vector)), np.float32), 0), 0)
        free_retired(self.arrays)

    @property
    def num_rows(self) -> int:
        """Keys held, those that were deleted included."""
        return len(self.arrays.keys) - int(self.arrays.counts.sum())

    @property
    def num_bytes(self) -> int:
        """Memory allocated."""
        return sum(array.nbytes for array in self.arrays)

    def insert(self, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Keep rows: int64 [n], float32 [n, embedding_dim]; of equal keys the last."""
        with self._lock:
            self._put(*_rows(keys, vectors, 0))

    def erase(self, keys: NDArray[np.int64]) -> None:
        """Answer keys, int64 [n], with the default vector, whatever is in the files."""
        with self._lock:
            self.any_deleted = True
            self._put(*_rows(keys, np.tile(self._default_vector, (len(keys), 1)), 1))

    def record(self, default_address: int, next_table: int) -> np.void:
        """A TABLE record of the present arrays, for the look-up kernels; the caller keeps the arrays."""
        arrays = self.arrays
        return table_record(
            arrays.vectors,
            len(self._default_vector),
            keys=arrays.keys,
            index_address=address_of(arrays.buckets),
            num_buckets=len(arrays.buckets),
            default_address=default_address,
            next_table=next_table,
        )

    def all_rows(self) -> UpdatedRows:
        """Copies of all rows; of row numbers, the keys may be those counted from the end too."""
        with self._lock:
            rows = _in_use(self.arrays)
            return UpdatedRows(self.arrays.keys[rows], self.arrays.vectors[rows], self.arrays.deleted[rows] != 0)

    def _put(self, keys: NDArray[np.int64], vectors: NDArray[np.float32], deleted: NDArray[np.uint8]) -> None:
        """Must be called while holding the lock."""
        done = put_rows(self.arrays, keys, vectors, deleted, 0)
        while done < len(keys):
            if self.arrays.counts[RETIRED] < len(self.arrays.keys) // _SPARE_PARTS:
                self.arrays = self._grown(len(keys) - done)
            else:
                self._readers.wait_for_those_under_way()
                free_retired(self.arrays)
            done = put_rows(self.arrays, keys, vectors, deleted, done)

    def _grown(self, num_new: int) -> UpdatedArrays:
        """The same rows in arrays twice as large; look-ups under way keep the old ones."""
        old = self.arrays
        in_use = _in_use(old)
        new = _allocate(2 * max(len(old.keys), num_new), old.vectors.shape[1])
        put_rows(new, old.keys[in_use], old.vectors[in_use], old.deleted[in_use], 0)
        return new


def _in_use(arrays: UpdatedArrays) -> NDArray[np.bool_]:
    """Which rows have a key."""
    in_use = np.ones(len(arrays.keys), np.bool_)
    for kind in (FREE, RETIRED):
        in_use[arrays.unused[kind, : arrays.counts[kind]]] = False
    return in_use


def _rows(
    keys: NDArray[np.int64], vectors: NDArray[np.float32], deleted: int
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.uint8]]:
    """The rows in arrays of the one kind that the kernels are compiled for."""
    return (
        np.require(keys, np.int64, ("C", "A", "W")),
        np.require(vectors, np.float32, ("C", "A", "W")),
        np.full(len(keys), deleted, np.uint8),
    )


def _allocate(capacity: int, embedding_dim: int) -> UpdatedArrays:
    num_buckets = capacity * 2 // 17 + 1  # 8.5 rows for 12 slots
    return UpdatedArrays(
        buckets=zeros_at_line(num_buckets, BUCKET_BYTES),
        keys=np.zeros(capacity, np.int64),
        vectors=np.zeros((capacity, embedding_dim), np.float32),
        deleted=np.zeros(capacity, np.uint8),
        unused=np.tile(np.arange(capacity)[::-1], (2, 1)),
        counts=np.array([capacity, 0]),
    )
