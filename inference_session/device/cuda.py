"""What the parts of a session share on a GPU: a stream, memory that requests pass through, whether it still works.

A request holds the device from its keys to its predictions. It does not wait in between; at the end `request` is
the one place where the host waits for the device. Only a look-up that has to know what is missing waits earlier, and
while it fetches that, other requests use the device (`paused`).
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy.cuda import runtime
from cupy.cuda.memory import OutOfMemoryError
from cupy_backends.cuda.api.driver import CUDADriverError
from cupy_backends.cuda.api.runtime import CUDARuntimeError
from numpy.typing import NDArray

from inference_session.device.arena import Arena
from inference_session.device.base import Columns, Device, UsedMemory
from inference_session.device.cuda_memory import memory_checked
from inference_session.device.current_context import keep_during_collections
from inference_session.device.host import HostColumns, adjacent_columns
from inference_session.device.pinned import pinned_empty
from inference_session.errors import InvalidRequestError, UnavailableError, as_thrown
from inference_session.kernels.cuda.launch import ColumnsWriter
from inference_session.kernels.cuda.records import COUNT_STRIDE

_FIRST_ARENA_BYTES = 1 << 20
_locks: dict[int, threading.RLock] = {}
"""One per GPU that this process has used: requests to one GPU take turns, those to different GPUs do not."""
_opening = threading.RLock()
"""Held while a session is made and warmed up: its tables are uploaded while others answer requests, but not while one
records CUDA graphs.
"""
_DEVICE_ERRORS = (OutOfMemoryError, CUDARuntimeError, CUDADriverError)
"""What CuPy raises where a device cannot do a requested operation, the last of them for launches."""
_log = logging.getLogger(__name__)


class _Memory(NamedTuple):
    """The memory that one request uses."""

    number: int
    """The lowest free number is taken, so that requests one after another always get the same addresses."""
    pinned: Arena
    device: Arena


class CudaDevice(Device):
    """One GPU as one session uses it: one request at a time, in order."""

    reads_by_column = True
    """Keys are read from host memory: if not adjacent, each key is a separate transfer."""

    def __init__(self, device_id: int) -> None:
        """ConfigurationError where the device has no memory left."""
        self.device_id = device_id
        self.name = f"cuda:{device_id}"
        self._broken: str | None = None
        self._is_open = False
        with _opening, cupy.cuda.Device(device_id), memory_checked(device_id, "free some memory or use another device"):
            self._lock = _locks.setdefault(device_id, threading.RLock())
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self._memory = _allocate_memory(0)
        self._free = [self._memory]
        """A heap of those that no request uses now: more than one where requests have overlapped others' pauses."""
        self._num_memories = 1
        keep_during_collections()

    @property
    def failure(self) -> str | None:
        return self._broken

    def opening(self) -> contextlib.AbstractContextManager[object]:
        return _opening

    def held(self) -> _Hold:
        """The device for launches on `stream` that are waited for, on memory that is known: a lean `request`.

        Raises:
            UnavailableError: see `request`.
        """
        return _Hold(self, self._lock)

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """The device and its stream for one request; on leaving, all that was launched has ended.

        Within a request of the same thread this is part of that one.

        Raises:
            UnavailableError: the device has failed, and CUDA refuses all further work of this process; or it has too
                little memory for this request.
        """
        with self._lock:
            if self._broken is not None:
                raise UnavailableError(self._broken)
            if self._is_open:
                yield
                return
            self._is_open = True
            memory: _Memory | None = None
            try:
                with cupy.cuda.Device(self.device_id), self.stream:
                    self._memory = memory = self._take_memory()
                    yield
            except _DEVICE_ERRORS as error:
                raise self._unanswerable(error) from as_thrown(error)
            finally:
                self._is_open = False
                # An error that ended a request may be a sign of the device's failure, which is then raised.
                self.wait()
                if memory is not None:
                    memory.pinned.reset()
                    memory.device.reset()
                    heapq.heappush(self._free, memory)

    def make_current(self) -> int | None:
        """Make CUDA calls of this thread go to the device; returns to which they went before, if to another.

        Raises:
            UnavailableError: see `request`.
        """
        if self._broken is not None:
            raise UnavailableError(self._broken)
        current: int = runtime.getDevice()
        if current == self.device_id:  # it usually is; setting it takes as long as a launch
            return None
        runtime.setDevice(self.device_id)
        return current

    def end_of(self, error: BaseException) -> None:
        """Wait for what was launched before an error; raises UnavailableError where the device is the cause of it."""
        self.wait()
        if isinstance(error, _DEVICE_ERRORS):
            raise self._unanswerable(error) from error

    def _unanswerable(self, error: BaseException) -> UnavailableError:
        """What to raise where the device cannot do what a request needs."""
        _log.warning("cuda:%s cannot answer a request: %s", self.device_id, error)
        return UnavailableError(f"cuda:{self.device_id} cannot answer this request: {error}")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let other requests use the device while this one waits for something else; it keeps the memory it has taken.

        Not within a request that is part of another.

        Raises:
            UnavailableError: the device has failed meanwhile.
        """
        self.wait()
        memory, self._is_open = self._memory, False
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            self._memory, self._is_open = memory, True
        if self._broken is not None:
            raise UnavailableError(self._broken)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[None]:
        """What is taken within is free again after it: then all that was launched has ended."""
        arenas = self._memory.pinned, self._memory.device
        positions = [arena.position() for arena in arenas]
        yield
        self.wait()
        for arena, position in zip(arenas, positions, strict=True):
            arena.reset(position)

    def used(self) -> UsedMemory:
        return UsedMemory(self._memory.number, self._memory.pinned.position(), self._memory.device.position())

    def skip(self, used: UsedMemory | None) -> None:
        if used is not None and used.number == self._memory.number:  # else all of this memory is another's
            self._memory.pinned.reset(used.pinned)
            self._memory.device.reset(used.device)

    def wait(self) -> None:
        """Wait until all that was launched has ended; UnavailableError where the device has failed."""
        try:
            self.stream.synchronize()
        except CUDARuntimeError as error:
            self._broken = (
                f"cuda:{self.device_id} has failed ({error}); CUDA does not let this process use it any more;"
                " load the model again"
            )
            _log.error("%s", self._broken)
            raise UnavailableError(self._broken) from error

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Hold all GPUs of this process: while a CUDA graph is recorded, no thread may allocate memory on any of them.

        Within a request, and within `opening`, so that there is one recording at a time: two would wait for each other.
        """
        with contextlib.ExitStack() as held:
            for device_id in sorted(_locks):
                held.enter_context(_locks[device_id])
            yield

    def end_recording(self) -> None:
        """Give up a CUDA graph that could not be recorded on the stream."""
        try:
            is_recording = self.stream.is_capturing()
        except RuntimeError:  # what CuPy reports for a recording that was invalidated but not ended
            is_recording = True
        if is_recording:
            with contextlib.suppress(CUDARuntimeError):  # that it has been invalidated
                self.stream.end_capture()

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """An array of this shape and type in host memory that kernels can read and write, until the request ends."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        memory, begin = self._memory.pinned.take(num_bytes)
        array: NDArray[Any] = memory[begin : begin + num_bytes].view(dtype).reshape(shape)
        return array

    def stage(self, array: Any) -> Any:
        """A copy in such memory; an array on the device stays there."""
        if not isinstance(array, np.ndarray):
            return cupy.ascontiguousarray(array)
        copy = self.pinned(array.shape, array.dtype)
        np.copyto(copy, array)
        return copy

    def stage_keys(self, parts: Sequence[Any]) -> Any:
        """See Device: in one pass over keys on the host; keys on the device are joined there."""
        if parts and not isinstance(parts[0], np.ndarray):
            return cupy.concatenate(parts, axis=None, dtype=np.int64)
        keys = self.pinned((sum(part.size for part in parts),), np.int64)
        if parts:
            np.concatenate(parts, axis=None, out=keys, casting="same_kind")
        return keys

    def given(self, array: Any) -> Any:
        """See Device. Arrays on the device are not copied; CuPy's current stream and theirs are waited for."""
        found = array
        if not isinstance(array, cupy.ndarray) or not array.flags.c_contiguous:
            with self.held():  # a copy takes memory
                found = cupy.ascontiguousarray(cupy.asarray(array))
        if found.device.id != self.device_id:
            raise InvalidRequestError(f"an input lies on cuda:{found.device.id}, the session on {self.name}")
        self.stream.wait_event(cupy.cuda.get_current_stream().record())
        return found

    def counts(self, num_counts: int) -> NDArray[np.int64]:
        """See Device: int64 [num_counts], COUNT_STRIDE elements apart."""
        counts = self.pinned((num_counts, COUNT_STRIDE), np.int64)[:, 0]
        counts[:] = 0
        return counts

    def output(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        return self.pinned(array.shape, np.float32)

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
        """An array on the device, until the request ends."""
        memory, begin = self._memory.device.take(math.prod(shape) * np.dtype(dtype).itemsize)
        return cupy.ndarray(shape, dtype, memory.data + begin)

    def columns(self, matrix: Any, first: int, widths: Sequence[int]) -> Columns:
        """See Device. A matrix on the host is that of rows that the processor looks up."""
        if isinstance(matrix, np.ndarray):
            return HostColumns(matrix, first, widths)
        return CudaColumns(self, matrix, first, widths)

    def column_copy(self, source: Any, matrix: Any, first: int) -> Callable[[], object]:
        if not source.size:
            return lambda: None
        begin, row_bytes = matrix.data.ptr + first * matrix.itemsize, source.strides[0]
        places = begin, matrix.strides[0], source.data.ptr, row_bytes
        kind, stream = runtime.memcpyDeviceToDevice, self.stream.ptr
        return partial(runtime.memcpy2DAsync, *places, row_bytes, len(source), kind, stream)

    def _take_memory(self) -> _Memory:
        """Must be called while holding the GPU's lock."""
        if self._free:
            return heapq.heappop(self._free)
        memory = _allocate_memory(self._num_memories)
        self._num_memories += 1
        return memory


class CudaColumns(Columns):
    """See Columns: a kernel copies them from pinned memory."""

    def __init__(self, device: CudaDevice, matrix: Any, first: int, widths: Sequence[int]) -> None:
        self._matrix, self._first = matrix, first
        values = device.pinned((len(matrix), sum(widths)), np.float32)
        self.arrays = adjacent_columns(values, widths)[:-1]
        self.upload = self._upload = partial(ColumnsWriter(values, matrix, first).start, device.stream.ptr)

    def fill(self, arrays: Sequence[Any]) -> None:
        if all(isinstance(array, np.ndarray) for array in arrays):
            for target, array in zip(self.arrays, arrays, strict=True):
                target[...] = array
            self._upload()
            return
        columns = self._matrix[:, self._first :]
        columns[...] = 0
        targets = adjacent_columns(columns, [array.shape[1] for array in arrays])[:-1]
        for target, array in zip(targets, arrays, strict=True):
            target[...] = cupy.asarray(array)


class _Hold:
    """See CudaDevice.held. A class: entering and leaving a generator takes several times as long."""

    def __init__(self, device: CudaDevice, lock: threading.RLock) -> None:
        self._device, self._lock = device, lock
        self._before: int | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            self._before = self._device.make_current()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        try:
            if error is not None:
                self._device.end_of(error)
        finally:
            if self._before is not None:
                runtime.setDevice(self._before)
            self._lock.release()


def _allocate_memory(number: int) -> _Memory:
    """Allocate the memory of a request on the current device."""
    return _Memory(
        number,
        Arena(lambda num_bytes: pinned_empty((num_bytes,), np.uint8), _FIRST_ARENA_BYTES),
        Arena(lambda num_bytes: cupy.empty(num_bytes, np.uint8), _FIRST_ARENA_BYTES),
    )
