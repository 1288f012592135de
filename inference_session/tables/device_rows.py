"""Rows that a GPU look-up reads where they lie when the cache lacks them: pinned in host memory, or on the device.

An index over all their keys is kept on the device, so that one kernel answers hits and misses alike.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime
from numpy.typing import ArrayLike, NDArray

from inference_session.embedding_cache.base import check_backing
from inference_session.errors import ConfigurationError
from inference_session.kernels.cuda import launch as gpu
from inference_session.kernels.cuda.records import (
    EVENTS,
    INDEX,
    MOST_BUCKETS,
    ROWS,
    SLOTS,
    buckets_for_all,
    index_bytes,
    is_wide,
)
from inference_session.kernels.records import VectorCode
from inference_session.platform.available_memory import available_bytes

_CHUNK_KEYS = 1 << 20
_REGISTER_PORTABLE, _REGISTER_MAPPED, _REGISTER_READ_ONLY = 1, 2, 8
_ELEMENT_BYTES = {VectorCode.FLOAT32: 4, VectorCode.FLOAT16: 2, VectorCode.INT8: 1}
_pinned_here: Counter[tuple[int, int]] = Counter()
"""How many arrays use what has been pinned where it lies, by address and number of bytes."""
_pinning = threading.RLock()  # may be taken again by a finalizer that runs within


class PinnedArray:
    """An array in host memory that the device can read: where it lies if it can be pinned there, else a pinned copy.

    Managed memory is never used: it moves pages when a kernel touches them.
    """

    def __init__(self, array: NDArray[Any]) -> None:
        """ConfigurationError where it has to be copied, and the host lacks the memory for that."""
        self._unpin: weakref.finalize[Any, PinnedArray] | None = None
        contiguous = np.ascontiguousarray(array)
        self.array = contiguous if contiguous.nbytes == 0 or self._pin(contiguous) else pinned_copy(contiguous)
        self.address = _device_address(self.array) if contiguous.nbytes else 0
        """The device's own address of the same memory."""

    def close(self) -> None:
        """Unpin what was pinned here. Nothing on the device may read it any more."""
        if self._unpin is not None:
            self._unpin()

    def _pin(self, array: NDArray[Any]) -> bool:
        place = array.ctypes.data, array.nbytes
        with _pinning:
            if place not in _pinned_here:
                if _is_pinned(*place):
                    return not _overlaps_pinned_here(*place)
                flags = _REGISTER_PORTABLE | _REGISTER_MAPPED  # a cache on another device may share it
                flags |= 0 if array.flags.writeable else _REGISTER_READ_ONLY
                try:
                    runtime.hostRegister(*place, flags)
                except runtime.CUDARuntimeError:  # memory of a kind that cannot be pinned, as that of mapped files
                    return False
            _pinned_here[place] += 1
            self._unpin = weakref.finalize(self, _unpin, place)
            self._unpin.atexit = False
        return True


def _is_pinned(address: int, num_bytes: int) -> bool:
    """Whether both ends are, by whomever."""
    ends = (address, address + num_bytes - 1)
    return all(runtime.pointerGetAttributes(end).type == runtime.memoryTypeHost for end in ends)


def _overlaps_pinned_here(address: int, num_bytes: int) -> bool:
    return any(begin < address + num_bytes and address < begin + size for begin, size in _pinned_here)


def _unpin(place: tuple[int, int]) -> None:
    """One array less uses the memory; the last one unpins it, before the memory can become something else's."""
    with _pinning:
        _pinned_here[place] -= 1
        if not _pinned_here[place]:
            del _pinned_here[place]
            with contextlib.suppress(runtime.CUDARuntimeError):  # a device that has failed gives nothing back
                runtime.hostUnregister(place[0])


def _device_address(array: NDArray[Any]) -> int:
    address: int = runtime.pointerGetAttributes(array.ctypes.data).devicePointer
    return address


def pinned_copy(array: NDArray[Any]) -> NDArray[Any]:
    """The same contents in pinned memory; ConfigurationError where the host has too little."""
    free = available_bytes()
    if free and array.nbytes > free:
        raise ConfigurationError(
            f"{array.nbytes} bytes of rows must be pinned in host memory, which has {free} bytes free: use a smaller"
            " table, or device memory (cache_bytes), or the device 'cpu', which reads files where they are"
        )
    copy = pinned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def pinned_empty(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An array in pinned host memory, whose addresses the device knows as well."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(max(num_bytes, 1)), 0)
    return np.frombuffer(memory, dtype, num_bytes // np.dtype(dtype).itemsize).reshape(shape)


class BaseRows:
    """All rows of one table, for the look-up kernel: keys by an index on the device, or as row numbers."""

    def __init__(
        self, keys: ArrayLike | None, vectors: Any, dim: int, *, code: VectorCode = VectorCode.FLOAT32
    ) -> None:
        """Index the rows; of equal keys the last row counts.

        Args:
            keys: int64 [n]; None: the numbers of the rows, negative ones counted from the end.
            vectors: rows as `bytes_per_row` says, [n, ...]: an array on the device, which is kept, or on the host.
            dim: embedding_dim.
            code: what the rows are stored as.
        """
        self.on_device = isinstance(vectors, cupy.ndarray)
        self._pinned = None if self.on_device else PinnedArray(vectors)
        self._vectors = vectors if self._pinned is not None else cupy.ascontiguousarray(vectors)
        self.num_rows = len(vectors)
        row_bytes = vectors.nbytes // self.num_rows if self.num_rows else 0
        address = self._vectors.data.ptr if self._pinned is None else self._pinned.address
        wide = is_wide(dim, _ELEMENT_BYTES[code], address, row_bytes)
        self.rows = np.array((address, row_bytes, int(code), int(wide)), ROWS)
        self.index, self.numbers_address, self.num_bytes = np.zeros((), INDEX), 0, 0
        self.by_number = keys is None
        self._memory: Any = None
        if keys is not None and self.num_rows:
            self._build(keys)
        if self.on_device:
            self.num_bytes += vectors.nbytes

    def close(self) -> None:
        """Give back what was pinned. No look-up may be under way."""
        if self._pinned is not None:
            self._pinned.close()

    def describe(self, table: np.void) -> None:
        """Enter the rows in a GPU_TABLE record."""
        table["base"], table["base_rows"] = self.index, self.rows
        table["base_numbers_address"], table["num_base_rows"] = self.numbers_address, self.num_rows
        table["base_by_number"] = int(self.by_number)

    def _build(self, keys: ArrayLike) -> None:
        num_buckets = buckets_for_all(self.num_rows)
        while not self._fill(keys, num_buckets):
            num_buckets += num_buckets // 8 + 1

    def _fill(self, keys: Any, num_buckets: int) -> bool:
        """Index all keys in so many buckets; False where one found no place."""
        if num_buckets > MOST_BUCKETS:
            raise ConfigurationError(
                f"{self.num_rows} rows with keys are more than an index on a GPU can hold: use the device 'cpu'"
            )
        self._memory = None  # of the attempt before
        self._memory = cupy.zeros(index_bytes(num_buckets, marks=False, numbers=True), np.uint8)
        events = cupy.zeros(len(EVENTS), np.uint64)
        tags_address = self._memory.data.ptr
        keys_address = tags_address + index_bytes(num_buckets, marks=False, numbers=False) - 8 * SLOTS * num_buckets
        self.numbers_address = keys_address + 8 * SLOTS * num_buckets
        numbers = cupy.ndarray(
            SLOTS * num_buckets, np.uint32, self._memory.data + (self.numbers_address - tags_address)
        )
        self.index = np.array((tags_address, keys_address, 0, num_buckets), INDEX)
        self.num_bytes = self._memory.nbytes
        writer = gpu.Writer(self.index, events.data.ptr, 0)
        for begin in range(0, self.num_rows, _CHUNK_KEYS):
            chunk = cupy.asarray(np.ascontiguousarray(keys[begin : begin + _CHUNK_KEYS], np.int64))
            claims = writer.claim(chunk, may_insert=True, may_evict=False)
            writer.write_numbers(numbers, chunk, begin, claims)
        return int(events[EVENTS.index("refused")]) == 0


def check_base(table: str, keys: ArrayLike, vectors: ArrayLike, dim: int) -> tuple[NDArray[np.int64], Any]:
    """Backing rows of a table as int64 [n] and float32 [n, dim]; ConfigurationError where they are not."""
    key_array = cupy.asnumpy(keys) if isinstance(keys, cupy.ndarray) else np.asarray(keys)
    rows = vectors if isinstance(vectors, cupy.ndarray) else np.asarray(vectors)
    if rows.size == 0:
        rows = np.zeros((len(rows), dim), np.float32)
    check_backing(table, key_array, rows, dim)
    return key_array.astype(np.int64, copy=False), rows
