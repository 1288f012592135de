"""Rows on their way into the GPU's cache: from arrays on the device as they are, from the host piece by piece.

While one piece is written, the next one is copied to the device on a separate stream. What lies in pageable memory
passes through pinned memory, which several threads fill, because one cannot keep up with the bus.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import cupy
import numpy as np
from numpy.typing import ArrayLike, NDArray

from inference_session.device.cuda import CudaDevice
from inference_session.device.pinned import is_pinned, pinned_empty
from inference_session.errors import InvalidRequestError, UnavailableError
from inference_session.kernels.threads import run_parts

_STAGED_BYTES = 1 << 24
"""Of one piece from the host: half a millisecond of the device's time."""
_DEVICE_BYTES = 1 << 29
"""Of one piece that is on the device already: two milliseconds of its time at most."""
_POLL_S = 20e-6
_THREAD_BYTES, _MAX_THREADS = 1 << 21, 4
_KEY_BYTES, _FLOAT_BYTES = 8, 4


class GivenRows:
    """What a caller wants written: keys [n], and vectors [n, embedding_dim] or None, on the host or the device."""

    def __init__(self, device: CudaDevice, keys: NDArray[Any], vectors: NDArray[Any] | None = None) -> None:
        self._device = device
        self.keys, self.vectors = keys, vectors
        self.on_device = any(isinstance(array, cupy.ndarray) for array in (keys, vectors))
        self.ready: Any = None
        """The event after which arrays on the device are complete; None: they are on the host."""
        if self.on_device:  # perhaps not yet filled: the work that computes them was launched on the caller's stream
            with cupy.cuda.Device(device.device_id):
                self.ready = cupy.cuda.get_current_stream().record()

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def row_bytes(self) -> int:
        """Of one key and its vector, once they are as the cache wants them."""
        return _KEY_BYTES + _FLOAT_BYTES * (0 if self.vectors is None else self.vectors.shape[1])

    @property
    def is_pinned(self) -> bool:
        """Whether the device can copy all of it from where it is on the host."""
        arrays = [(self.keys, np.int64), *([] if self.vectors is None else [(self.vectors, np.float32)])]
        return all(array.dtype == dtype and array.flags.c_contiguous and is_pinned(array) for array, dtype in arrays)

    def wait_for(self) -> None:
        """Within a request: what is launched from now on finds the arrays complete."""
        if self.ready is not None:
            self._device.stream.wait_event(self.ready)

    def keys_on_device(self, part: slice) -> Any:
        """Within a request: some of the keys, int64."""
        self.wait_for()
        return _on_device(self.keys[part], np.int64)


class Piece(NamedTuple):
    """Some of the rows, on the device or on their way there."""

    keys: Any
    vectors: Any
    ready: Any
    """The event after which they are on the device; None: they already are."""

    def on_device(self, device: CudaDevice) -> tuple[Any, Any]:
        """Within a request: keys int64 and vectors float32, contiguous, for what is launched from now on."""
        if self.ready is not None:
            device.stream.wait_event(self.ready)
        return _on_device(self.keys, np.int64), _on_device(self.vectors, np.float32)


class Uploads:
    """Cuts rows into pieces and brings them to the device. Safe to use from several threads."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._free: list[_PinnedBuffers] = []
        num_threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="hotrow-rows")
        self._stream: Any = None

    def pieces(self, given: GivenRows) -> Iterator[Piece]:
        """The rows in pieces, each of which must be written, and be waited for, before the next one is taken."""
        if given.on_device:
            return (
                Piece(given.keys[part], given.vectors[part], given.ready)  # type: ignore[index]
                for part in _cut(given, _DEVICE_BYTES)
            )
        return self._uploaded(given)

    def close(self) -> None:
        """Within a request: end the threads and free the pinned memory, which must not happen during a recording."""
        self._threads.shutdown()
        self._free.clear()

    def _uploaded(self, given: GivenRows) -> Iterator[Piece]:
        pinned = self._free.pop() if self._free else _PinnedBuffers(self._device, self._threads)
        try:
            previous, is_pinned = None, given.is_pinned
            for number, part in enumerate(_cut(given, _STAGED_BYTES)):
                keys, vectors = given.keys[part], given.vectors[part]  # type: ignore[index]
                piece = self._upload(*((keys, vectors) if is_pinned else pinned.filled(number % 2, keys, vectors)))
                if previous is not None:
                    yield self._arrived(previous)
                previous = piece
            if previous is not None:
                yield self._arrived(previous)
        finally:
            with contextlib.suppress(UnavailableError), self._device.request():
                if self._stream is not None:
                    self._stream.synchronize()  # where the caller has not taken all pieces
            self._free.append(pinned)

    def _arrived(self, piece: Piece) -> Piece:
        """The piece once its copies have ended. Requests can use the device meanwhile."""
        while True:
            with self._device.request():  # no CUDA call is made while another session records a graph
                if piece.ready.done:
                    return piece
            time.sleep(_POLL_S)

    def _upload(self, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> Piece:
        """Launch the copies to the device."""
        with self._device.request():
            if self._stream is None:
                self._stream = cupy.cuda.Stream(non_blocking=True)
            on_device = cupy.empty(keys.shape, np.int64), cupy.empty(vectors.shape, np.float32)
            self._stream.wait_event(self._device.stream.record())  # the memory may have had another use before
            for array, source in zip(on_device, (keys, vectors), strict=True):
                array.set(source, stream=self._stream)
            return Piece(*on_device, self._stream.record())


class _PinnedBuffers:
    """Two pieces of pinned memory that pageable rows pass through, by turns; they grow, and stay."""

    def __init__(self, device: CudaDevice, threads: ThreadPoolExecutor) -> None:
        self._device, self._threads = device, threads
        self._memory = [np.empty(0, np.uint8)] * 2

    def filled(
        self, turn: int, keys: NDArray[Any], vectors: NDArray[Any]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Copies of some rows; the device has those before the last ones by now."""
        ends = keys.size * _KEY_BYTES, keys.size * _KEY_BYTES + vectors.size * _FLOAT_BYTES
        if len(self._memory[turn]) < ends[1]:
            with self._device.request():
                self._memory[turn] = pinned_empty((max(ends[1], min(2 * ends[1], _STAGED_BYTES)),), np.uint8)
        memory = self._memory[turn]
        copies = memory[ends[0] : ends[1]].view(np.float32).reshape(vectors.shape)
        copied_keys = memory[: ends[0]].view(np.int64)
        np.copyto(copied_keys, keys)
        num_parts = max(min(vectors.nbytes // _THREAD_BYTES, _MAX_THREADS), 1)
        if num_parts == 1:
            _copy((copies, vectors))
        else:
            parts = list(zip(np.array_split(copies, num_parts), np.array_split(vectors, num_parts), strict=True))
            run_parts(lambda part: _copy(parts[part]), num_parts, self._threads)
        return copied_keys, copies


def as_array(values: ArrayLike, device: CudaDevice) -> NDArray[Any]:
    """An array on the device as CuPy's, anything else as NumPy's; InvalidRequestError for one on another device."""
    if not hasattr(values, "__cuda_array_interface__"):
        return np.asarray(values)
    with cupy.cuda.Device(device.device_id):
        array = cupy.asarray(values)
    if array.device.id != device.device_id:
        raise InvalidRequestError(f"an array is on cuda:{array.device.id}, but the cache on {device.name}")
    return array  # type: ignore[no-any-return]


def _cut(given: GivenRows, num_bytes: int) -> Iterator[slice]:
    """Pieces of about the same size, of at most this many bytes, or of one row."""
    num_pieces = -(-len(given) // max(num_bytes // given.row_bytes, 1))
    return (slice(i * len(given) // num_pieces, (i + 1) * len(given) // num_pieces) for i in range(num_pieces))


def _copy(pair: tuple[NDArray[np.float32], NDArray[Any]]) -> None:
    np.copyto(*pair, casting="same_kind")


def _on_device(array: Any, dtype: Any) -> Any:
    """The array, contiguous and of this type, on the device."""
    if isinstance(array, cupy.ndarray):
        return cupy.ascontiguousarray(array, dtype)
    on_device = cupy.empty(array.shape, dtype)
    on_device.set(np.ascontiguousarray(array, dtype), stream=cupy.cuda.get_current_stream())
    return on_device
