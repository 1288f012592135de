"""Copies of a sharded table's hot rows in the memory of a GPU that would read them from another one.

The look-up kernel reads copies first, and notes some of the keys whose rows it read from another GPU. Rows that are
noted several times are copied while there is room, and later those that are noted more often than a copy is read on
average: they take the places of copies that are read least, so that copies follow the traffic.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from inference_session.device.cuda import CudaDevice
from inference_session.errors import UnavailableError
from inference_session.kernels.cuda import launch as gpu
from inference_session.kernels.cuda.records import (
    EVENTS,
    SAMPLES,
    SLOTS,
    rows_by_slot,
    table_bytes,
    target_record,
    zero_bytes,
)
from inference_session.platform.repeated_call import RepeatedCall
from inference_session.tables.cuda.hot_rows import LEAST_SAMPLED, Copies, hot_keys

_FEWEST_SAMPLES, _MOST_SAMPLES = 1 << 17, 1 << 20
"""Keys that there is room to note."""
_SAMPLES_PART = 16
"""Noted keys take one byte for this many bytes of copies: as many are noted for each row that can be copied."""
_ROWS_AT_ONCE, _KEYS_AT_ONCE = 1 << 12, 1 << 17
"""Rows that are copied, and noted keys that are read, while a request waits: well below a millisecond."""
_PART = 16
"""Copies take at most one byte for this many bytes of a shard: skewed traffic asks mostly for few rows."""
_INTERVAL_S = 1.0
_MAX_LOAD = 0.02
"""The part of one core's time that may go into copying."""
_log = logging.getLogger(__name__)


def bytes_to_copy(shard_bytes: int, row_bytes: int, spare: int) -> int:
    """Most memory for copies of a table: within `spare`; 0 where the table is too small to gain from copies."""
    num_bytes = min(shard_bytes // _PART, spare)
    return num_bytes if num_bytes >= samples_bytes(num_bytes) + table_bytes(1, row_bytes) else 0


def _max_sampled(num_bytes: int) -> int:
    """How many keys are noted for copies that take this much memory together with them."""
    return min(max(num_bytes // _SAMPLES_PART // 8, _FEWEST_SAMPLES), _MOST_SAMPLES)


def samples_bytes(num_bytes: int) -> int:
    """Memory for noted keys, of this much for them and copies."""
    return SAMPLES.itemsize + 8 * _max_sampled(num_bytes)


class LocalCopies:
    """The copies of one table on one GPU. The table's rows never change."""

    def __init__(self, device: CudaDevice, dim: int, num_rows: int, num_bytes: int) -> None:
        """Prepare for copies on the current device.

        Args:
            device: the GPU.
            dim: embedding_dim.
            num_rows: of the table, those on other GPUs.
            num_bytes: most memory, as `bytes_to_copy` says; that for copies is taken when the first rows are hot.
        """
        self._device, self._dim, self._num_rows = device, dim, num_rows
        self.max_sampled = _max_sampled(num_bytes)
        """Keys that there is room to note."""
        self._num_buckets = (num_bytes - samples_bytes(num_bytes)) // table_bytes(1, 4 * dim)
        self._keys = cupy.empty(self.max_sampled, np.int64)
        self._samples = cupy.asarray(np.array([0, 0, self._keys.data.ptr]))
        """A SAMPLES record."""
        self._events = cupy.zeros(len(EVENTS), np.uint64)
        self._memory: Any = None
        self.samples_address: int = self._samples.data.ptr

    @property
    def num_bytes(self) -> int:
        """Device memory taken."""
        return int(self._keys.nbytes + self._samples.nbytes + (self._memory.nbytes if self._memory is not None else 0))

    def hot_keys(self) -> NDArray[np.int64]:
        """Keys [n] whose rows are to be copied, the hottest first; once enough keys were noted. More are noted then.

        Raises:
            UnavailableError: the device has failed.
        """
        with self._device.request():
            counted, copies_read, _ = self._samples.get().tolist()
        if counted < LEAST_SAMPLED:
            return np.empty(0, np.int64)
        sampled = self._noted_keys(min(counted, self.max_sampled))
        with self._device.request():
            self._samples[:2] = 0
            events = dict(zip(EVENTS, self._events.get().tolist(), strict=True))
        num_copies = events["inserts"] - events["evictions"]
        return hot_keys(sampled, self._num_rows, Copies(self._num_buckets * SLOTS, num_copies, copies_read))

    def _noted_keys(self, count: int) -> NDArray[np.int64]:
        """The first ones, which stay as they are until the counts are 0 again; between two pieces requests go on."""
        pieces = []
        for begin in range(0, count, _KEYS_AT_ONCE):
            with self._device.request():
                pieces.append(self._keys[begin : min(begin + _KEYS_AT_ONCE, count)].get())
        return np.concatenate(pieces)

    def write(self, keys: Any, vectors: Any) -> None:
        """Copy rows, within a request of the device: int64 [n] and float32 [n, dim] on it."""
        if self._memory is None:
            self._memory = cupy.empty(table_bytes(self._num_buckets, 4 * self._dim), np.uint8)
            self._memory[: zero_bytes(self._num_buckets, marks=True)].fill(0)
            address = self._memory.data.ptr
            self.index, self.rows = rows_by_slot(address, self._num_buckets, self._dim)
        target = target_record(self.index, self._events.data.ptr, keys, self.rows, vectors)
        gpu.write_rows(target, may_insert=True, may_evict=True)


def repeat_copying(copy_hot_rows: Callable[[], object]) -> RepeatedCall:
    """Call a method once a second, until its object is gone, or the device has failed.

    Not to be closed while holding the device, which the method takes.
    """
    method = weakref.WeakMethod(copy_hot_rows)
    failure = "hot rows of other GPUs could not be copied"
    call = partial(_try_to_copy, method)
    return RepeatedCall("hotrow-local-copies", call, _INTERVAL_S, max_load=_MAX_LOAD, failure=failure)


def _try_to_copy(method: weakref.WeakMethod[Callable[[], object]]) -> bool:
    """Whether there may be more to copy later."""
    copy_hot_rows = method()
    try:
        if copy_hot_rows is not None:
            copy_hot_rows()
    except UnavailableError as error:
        _log.warning("Hot rows of other GPUs are not copied any more: %s", error)
        return False
    return copy_hot_rows is not None


def pieces_of(keys: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Keys [n], in pieces of as many as are copied at once."""
    return [keys[begin : begin + _ROWS_AT_ONCE] for begin in range(0, len(keys), _ROWS_AT_ONCE)]
