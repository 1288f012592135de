"""Host memory that a GPU reads and writes: pinned where it lies, or allocated so."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime
from numpy.typing import NDArray

from inference_session.errors import ConfigurationError
from inference_session.platform.memory import available_bytes

_REGISTER_PORTABLE, _REGISTER_MAPPED, _REGISTER_READ_ONLY = 1, 2, 8
_pinned_here: Counter[tuple[int, int]] = Counter()
"""How many arrays use what has been pinned where it lies, by address and number of bytes."""
_pinning = threading.RLock()  # may be taken again by a finalizer that runs within


class PinnedArray:
    """An array in host memory that the device can read: where it lies if it can be pinned there, else a pinned copy.

    Managed memory is never used: it moves pages when a kernel touches them.
    """

    def __init__(self, array: NDArray[Any]) -> None:
        """`array`: of any shape; ConfigurationError where it has to be copied, and the host lacks memory for that."""
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
                if is_pinned(array):
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


def is_pinned(array: NDArray[Any]) -> bool:
    """Whether a contiguous array lies in pinned memory, judged by its ends, no matter which code pinned it."""
    ends = (array.ctypes.data, array.ctypes.data + max(array.nbytes, 1) - 1)
    return all(runtime.pointerGetAttributes(end).type == runtime.memoryTypeHost for end in ends)


def _overlaps_pinned_here(address: int, num_bytes: int) -> bool:
    return any(begin < address + num_bytes and address < begin + size for begin, size in _pinned_here)


def _unpin(place: tuple[int, int]) -> None:
    """One array fewer uses the memory; the last one unpins it, before the memory can be reused."""
    with _pinning:
        _pinned_here[place] -= 1
        if not _pinned_here[place]:
            del _pinned_here[place]
            with contextlib.suppress(runtime.CUDARuntimeError):  # a failed device releases nothing
                runtime.hostUnregister(place[0])


def _device_address(array: NDArray[Any]) -> int:
    address: int = runtime.pointerGetAttributes(array.ctypes.data).devicePointer
    return address


def pinned_copy(array: NDArray[Any]) -> NDArray[Any]:
    """The same shape, type and contents in pinned memory; ConfigurationError where the host has too little."""
    free = available_bytes()
    if free and array.nbytes > free:
        raise ConfigurationError(
            f"{array.nbytes} bytes of rows must be pinned in host memory, which has {free} bytes free: use a smaller"
            " table, put it into device memory (cache_bytes), or use the device 'cpu'"
        )
    copy = pinned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def pinned_empty(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An array of this shape and type in pinned host memory, whose addresses the device knows as well."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(max(num_bytes, 1)), 0)
    return np.frombuffer(memory, dtype, num_bytes // np.dtype(dtype).itemsize).reshape(shape)
