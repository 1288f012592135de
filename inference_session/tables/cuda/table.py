"""The rows of one table's files, where a GPU looks them up: in its memory, in several GPUs', or pinned in the host's.

The index of their keys is always on the device. Look-ups search rows that were updated or copied first, then these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import cupy
import numpy as np
from numpy.typing import ArrayLike

from inference_session.device.pinned import PinnedArray
from inference_session.errors import ConfigurationError
from inference_session.kernels.cuda import launch as gpu
from inference_session.kernels.cuda.records import (
    EVENTS,
    INDEX,
    MOST_BUCKETS,
    buckets_for_all,
    index_bytes,
    index_record,
    rows_record,
    table_record,
    target_record,
)
from inference_session.kernels.records import VectorCode

_CHUNK_KEYS = 1 << 20


class Shards(NamedTuple):
    """The vectors of a table, divided among GPUs: row r is row r // n of array r % n, of n arrays."""

    arrays: Sequence[Any]
    """One on each GPU, all of whose memory each GPU can read."""
    this: int
    """Which of them lies on the GPU that looks up."""
    num_rows: int
    """The number of all rows."""


class CudaTable:
    """The records of one table for the look-up kernel; it keeps the memory that they point to."""

    def __init__(self, keys: ArrayLike | None, vectors: Any, dim: int, *, code: VectorCode) -> None:
        """Index the rows; of equal keys the last row counts.

        Args:
            keys: int64 [n]; None: the numbers of the rows, negative ones counted from the end.
            vectors: rows as `bytes_per_row` says, [n, ...]: an array on the device, which is kept, or on the host; or
                Shards, which are kept.
            dim: embedding_dim.
            code: what the rows are stored as.
        """
        shards = vectors if isinstance(vectors, Shards) else Shards((), 0, len(vectors))
        self._shards, self.num_rows = shards.arrays, shards.num_rows
        if shards.arrays:
            vectors = shards.arrays[shards.this]
        self.on_device = isinstance(vectors, cupy.ndarray)
        self._pinned = None if self.on_device else PinnedArray(vectors)
        self._vectors = vectors if self._pinned is not None else cupy.ascontiguousarray(vectors)
        self.num_host_rows = 0 if self.on_device else self.num_rows
        """Rows that look-ups read from host memory."""
        self.row_bytes = row_bytes = vectors.itemsize * math.prod(vectors.shape[1:])
        address = self._vectors.data.ptr if self._pinned is None else self._pinned.address
        self._dim = dim
        self.rows = rows_record(address, row_bytes, code, dim)
        self.index, self.numbers_address, self.num_bytes = np.zeros((), INDEX), 0, 0
        self.by_number = keys is None
        self._memory: Any = None
        if keys is not None and self.num_rows:
            self._build(keys)
        if self.on_device:
            self.num_bytes += vectors.nbytes

    def close(self) -> None:
        """Give back pinned memory. No look-up may be running."""
        if self._pinned is not None:
            self._pinned.close()

    def record(self, default_address: int) -> np.void:
        """A GPU_TABLE record of these rows."""
        return table_record(
            self._dim,
            base=self.index,
            base_rows=self.rows,
            base_numbers_address=self.numbers_address,
            num_base_rows=self.num_rows,
            num_row_numbers=self.num_rows if self.by_number else 0,
            default_address=default_address,
            shard_addresses=[array.data.ptr for array in self._shards],
        )

    def _build(self, keys: ArrayLike) -> None:
        num_buckets, first_key = buckets_for_all(self.num_rows), int(np.min(keys))
        while not self._fill(keys, num_buckets, first_key):
            num_buckets += num_buckets // 8 + 1

    def _fill(self, keys: Any, num_buckets: int, first_key: int) -> bool:
        """Index all keys in this many buckets; False where one found no place."""
        if num_buckets > MOST_BUCKETS:
            raise ConfigurationError(
                f"{self.num_rows} rows with keys are too many for an index on a GPU; use the device 'cpu'"
            )
        self._memory = None  # of the attempt before
        self._memory = cupy.zeros(index_bytes(num_buckets, marks=False, numbers=True), np.uint8)
        events = cupy.zeros(len(EVENTS), np.uint64)
        self.index = index_record(self._memory.data.ptr, num_buckets, marks=False, first_key=first_key)
        self.numbers_address = self._memory.data.ptr + index_bytes(num_buckets, marks=False, numbers=False)
        self.num_bytes = self._memory.nbytes
        for begin in range(0, self.num_rows, _CHUNK_KEYS):
            chunk = cupy.asarray(np.ascontiguousarray(keys[begin : begin + _CHUNK_KEYS], np.int64))
            target = target_record(self.index, events.data.ptr, chunk)
            gpu.write_numbers(target, self.numbers_address, begin)
        return int(events[EVENTS.index("refused")]) == 0
