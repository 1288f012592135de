"""The rows of one table that were changed since its files were written, where one GPU looks them up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import cupy
import numpy as np
from cupy.cuda.memory import OutOfMemoryError

from inference_session.device.cuda import CudaDevice
from inference_session.errors import UnavailableError, as_thrown
from inference_session.kernels.cuda import launch as gpu
from inference_session.kernels.cuda.records import (
    EVENTS,
    buckets_for_all,
    rows_by_slot,
    table_bytes,
    target_record,
    zero_bytes,
)
from inference_session.tables.base import UpdatedRows

_REFUSED = EVENTS.index("refused")
_BYTES_AT_ONCE = 16 << 20
"""Bytes of rows written within one request of the device: few enough not to delay others that wait for it."""


class CudaUpdatedTable:
    """Keys and float32 vectors in device memory, with room for a number of rows. One thread writes at a time."""

    def __init__(self, device: CudaDevice, dim: int, num_rows: int) -> None:
        """Allocate room for this many rows, and perhaps a few more. UnavailableError where the device has too little
        memory.
        """
        self._device, self._dim = device, dim
        num_buckets = buckets_for_all(num_rows)
        with self._request(num_rows):
            self._memory = cupy.empty(table_bytes(num_buckets, 4 * dim), np.uint8)
            self._memory[: zero_bytes(num_buckets, marks=True)].fill(0)
            self._events = cupy.zeros(len(EVENTS), np.uint64)
        self.index, self.rows = rows_by_slot(self._memory.data.ptr, num_buckets, dim)
        self.num_bytes = self._memory.nbytes

    def put(self, updated: UpdatedRows) -> bool:
        """Write rows, of equal keys the last; False: some found no room, now or in an earlier call."""
        return all(map(self._put, self._pieces(updated)))

    def _put(self, updated: UpdatedRows) -> bool:
        """Rows that are all deleted, or all not."""
        with self._request(len(updated.keys)):
            keys, vectors = cupy.asarray(updated.keys), cupy.asarray(updated.vectors)
            target = target_record(self.index, self._events.data.ptr, keys, self.rows, vectors)
            gpu.write_rows(target, may_insert=True, may_evict=False)
            if updated.deleted.any():
                gpu.mark_deleted(self.index, keys)
            return not int(self._events[_REFUSED])  # waits for the writes

    @contextlib.contextmanager
    def _request(self, num_rows: int) -> Iterator[None]:
        """A request of the device that allocates memory for `num_rows` rows."""
        with self._device.request():
            try:
                yield
            except OutOfMemoryError as error:
                raise UnavailableError(
                    f"{self._device.name} has too little memory for {num_rows} changed rows of {self._dim} elements:"
                    " free some memory, or load a version with newer files"
                ) from as_thrown(error)

    def _pieces(self, updated: UpdatedRows) -> Iterator[UpdatedRows]:
        step = max(_BYTES_AT_ONCE // (8 + 4 * self._dim), 1)
        for deleted in (False, True):
            these = updated.where(updated.deleted == deleted)
            for begin in range(0, len(these.keys), step):
                yield these.where(slice(begin, begin + step))
