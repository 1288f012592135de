"""Rows on their way into the GPU's cache: from arrays on the device as they are, from the host piece by piece.

A piece is one transfer. The rows that look-ups missed are one piece, whatever their tables. While a piece is written,
the next one is copied to the device on a separate stream. What lies in pageable memory passes through pinned memory,
which several threads fill, because one cannot keep up with the bus.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import cupy
import numpy as np
from cupy.cuda import runtime
from numpy.typing import ArrayLike, NDArray

from inference_session.device.cuda import CudaDevice
from inference_session.device.pinned import is_pinned, pinned_empty
from inference_session.embedding_cache.missing_rows import MissingRows
from inference_session.errors import InvalidRequestError, UnavailableError
from inference_session.kernels.records import FLOAT_BYTES, KEY_BYTES
from inference_session.kernels.threads import run_parts

_STAGED_BYTES = 1 << 24
"""Of one piece from the host: half a millisecond of the device's time."""
_DEVICE_BYTES = 1 << 29
"""Of one piece that is on the device already: two milliseconds of its time at most."""
_SMALL_BYTES = 1 << 18
"""Of a piece whose transfer takes the device less time than it takes to let others use it meanwhile."""
_POLL_S = 20e-6
_THREAD_BYTES, _MAX_THREADS = 1 << 21, 4
_ALIGNMENT = 128
"""Of arrays on the device: bytes that it reads at once."""
_FROM_THE_FIRST, _NO_SPLITS = np.zeros((1, 2), np.int64), np.zeros(0, np.int64)


class GivenKeys:
    """Keys [n] of a caller, on the host or the device."""

    def __init__(self, device: CudaDevice, keys: NDArray[Any], *others: NDArray[Any]) -> None:
        """keys: [n]; `others`: arrays [n, …] that belong to them."""
        self._device, self.keys = device, keys
        self.on_device = any(isinstance(array, cupy.ndarray) for array in (keys, *others))
        self.ready: Any = None
        """The event after which arrays on the device are complete; None: they are on the host."""
        if self.on_device:  # perhaps not yet filled: the work that computes them was launched on the caller's stream
            with cupy.cuda.Device(device.device_id):
                self.ready = cupy.cuda.get_current_stream().record()

    def part(self, keys: slice) -> Any:
        """Within a request: some of the keys, int64 on the device."""
        if self.ready is not None:
            self._device.stream.wait_event(self.ready)
        return _on_device(self.keys[keys], np.int64)


class GivenRows(GivenKeys):
    """What a caller wants written to a table, given by its number: keys [n] and vectors [n, embedding_dim]."""

    def __init__(self, device: CudaDevice, table: int, keys: NDArray[Any], vectors: NDArray[Any]) -> None:
        super().__init__(device, keys, vectors)
        self.table, self.vectors = table, vectors

    @property
    def is_pinned(self) -> bool:
        """Whether the device can copy all of it from where it is on the host."""
        arrays = (self.keys, np.int64), (self.vectors, np.float32)
        return all(array.dtype == dtype and array.flags.c_contiguous and is_pinned(array) for array, dtype in arrays)

    def parts(self, num_bytes: int) -> Iterator[_Part]:
        """The rows in parts of about the same size, of at most this many bytes, or of one row."""
        row_bytes = KEY_BYTES + FLOAT_BYTES * self.vectors.shape[1]
        num_rows = len(self.keys)
        num_parts = -(-num_rows // max(num_bytes // row_bytes, 1))
        for i in range(num_parts):
            rows = slice(i * num_rows // num_parts, (i + 1) * num_rows // num_parts)
            keys = self.keys[rows]
            yield _Part(
                np.array([self.table]), np.array([len(keys)]), keys, self.vectors[rows], _FROM_THE_FIRST, _NO_SPLITS
            )


class _Part(NamedTuple):
    """Rows of some tables, where the caller has them."""

    tables: NDArray[np.intp]
    """Of each look-up once."""
    num_keys: NDArray[np.int64]
    """Of each table."""
    keys: NDArray[Any]
    vectors: NDArray[Any]
    begins: NDArray[np.int64]
    """[tables, 2]: bytes from the first key, int64, to those of each table, and from the first vector, float32."""
    splits: NDArray[np.int64] = _NO_SPLITS
    """Where in `tables` another look-up's begin: those before are written first, as tables may come again."""


class _GivenPiece(NamedTuple):
    """Rows in arrays on the device that the caller has, of any type."""

    part: _Part
    ready: Any
    """The event after which the arrays are complete."""

    def arrived(self, device: CudaDevice) -> tuple[NDArray[np.int64], Any]:
        """Within a request: addresses, [tables, 2], of keys, int64, and vectors, float32, for what is launched from now
        on; and what keeps them.
        """
        device.stream.wait_event(self.ready)
        arrays = _on_device(self.part.keys, np.int64), _on_device(self.part.vectors, np.float32)
        return self.part.begins + [array.data.ptr for array in arrays], arrays


class _UploadedPiece(NamedTuple):
    """Rows in memory of ours on the device, or on their way there."""

    part: _Part
    ready: Any
    """The event after which they are on the device."""
    memory: Any
    """Their keys, then their vectors."""

    def arrived(self, device: CudaDevice) -> tuple[NDArray[np.int64], Any]:
        """See _GivenPiece."""
        device.stream.wait_event(self.ready)
        offsets = np.array([0, _vectors_offset(self.part)])
        return self.part.begins + (self.memory.data.ptr + offsets), self.memory


Piece: TypeAlias = _GivenPiece | _UploadedPiece


class Uploads:
    """Brings rows to the device in pieces. Safe to use from several threads."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._free: list[_PinnedBuffers] = []
        num_threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="hotrow-rows")
        self._stream: Any = None

    def pieces(self, given: GivenRows) -> Iterator[Piece]:
        """The rows in pieces, each of which must be written, and be waited for, before the next one is taken: not
        within a request of the device.
        """
        if given.on_device:
            return (_GivenPiece(part, given.ready) for part in given.parts(_DEVICE_BYTES))
        return self._uploaded(given.parts(_STAGED_BYTES), is_pinned=given.is_pinned)

    def takes_at_once(self, missing: Sequence[MissingRows]) -> bool:
        """Whether the rows that look-ups missed may be one piece."""
        return sum(rows.keys.nbytes + rows.vectors.nbytes for rows in missing) <= _STAGED_BYTES

    def missing(self, missing: Sequence[MissingRows]) -> Iterator[Piece]:
        """All of these rows as one piece; see `pieces`."""
        return self._uploaded(iter([_joined([_part_of(rows) for rows in missing])]), is_pinned=False)

    def close(self) -> None:
        """Within a request: end the threads and free the pinned memory, which must not happen during a recording."""
        self._threads.shutdown()
        self._free.clear()

    def _uploaded(self, parts: Iterator[_Part], *, is_pinned: bool) -> Iterator[_UploadedPiece]:
        """Each piece is copied while the one before it is written. `is_pinned`: they are copied from where they are."""
        pinned = self._free.pop() if self._free else _PinnedBuffers(self._device, self._threads)
        try:
            previous = None
            for number, part in enumerate(parts):
                piece = self._upload(part, None if is_pinned else pinned, number % 2)
                if previous is not None:
                    yield self._arrived(previous)
                previous = piece
            if previous is not None:
                yield self._arrived(previous)
        except BaseException:  # not all pieces were taken, but what is under way reads the pinned memory
            with contextlib.suppress(UnavailableError), self._device.request():
                if self._stream is not None:
                    self._stream.synchronize()
            raise
        finally:
            self._free.append(pinned)

    def _arrived(self, piece: _UploadedPiece) -> _UploadedPiece:
        """The piece once its copies have ended, if they take long. Requests can use the device meanwhile."""
        while piece.memory.nbytes > _SMALL_BYTES:
            with self._device.request():  # no CUDA call is made while another session records a graph
                if piece.ready.done:
                    break
            time.sleep(_POLL_S)
        return piece

    def _upload(self, part: _Part, pinned: _PinnedBuffers | None, turn: int) -> _UploadedPiece:
        """Launch the copies to the device, through pinned memory or from where the rows are."""
        vectors_offset = _vectors_offset(part)
        num_bytes = vectors_offset + part.vectors.size * FLOAT_BYTES
        if pinned is None:
            sources = [(0, part.keys), (vectors_offset, part.vectors)]
        else:
            sources = [(0, pinned.filled(turn, part, num_bytes))]
        with self._device.request():
            if self._stream is None:
                self._stream = cupy.cuda.Stream(non_blocking=True)
            memory = cupy.empty(num_bytes, np.uint8)
            self._stream.wait_event(self._device.stream.record())  # the memory may have had another use before
            for offset, source in sources:
                place, kind = memory.data.ptr + offset, runtime.memcpyHostToDevice
                runtime.memcpyAsync(place, source.ctypes.data, source.nbytes, kind, self._stream.ptr)
            return _UploadedPiece(part, self._stream.record(), memory)


class _PinnedBuffers:
    """Two pieces of pinned memory that pageable rows pass through, by turns; they grow, and stay."""

    def __init__(self, device: CudaDevice, threads: ThreadPoolExecutor) -> None:
        self._device, self._threads = device, threads
        self._memory = [np.empty(0, np.uint8)] * 2

    def filled(self, turn: int, part: _Part, num_bytes: int) -> NDArray[np.uint8]:
        """Memory with a copy of some rows; the device has those before the last ones by now."""
        if len(self._memory[turn]) < num_bytes:
            with self._device.request():
                self._memory[turn] = pinned_empty((max(num_bytes, min(2 * num_bytes, _STAGED_BYTES)),), np.uint8)
        memory = self._memory[turn][:num_bytes]
        np.copyto(_at(memory, 0, part.keys, np.int64), part.keys)
        self._copy(_at(memory, _vectors_offset(part), part.vectors, np.float32), part.vectors)
        return memory

    def _copy(self, copies: NDArray[np.float32], vectors: NDArray[Any]) -> None:
        """By several threads, where there are many."""
        num_parts = max(min(copies.nbytes // _THREAD_BYTES, _MAX_THREADS), 1)
        if num_parts == 1:
            np.copyto(copies, vectors, casting="same_kind")
            return
        pairs = list(zip(np.array_split(copies, num_parts), np.array_split(vectors, num_parts), strict=True))
        run_parts(lambda part: np.copyto(*pairs[part], casting="same_kind"), num_parts, self._threads)


def as_array(values: ArrayLike, device: CudaDevice) -> NDArray[Any]:
    """An array on the device as CuPy's, anything else as NumPy's; InvalidRequestError for one on another device."""
    if not hasattr(values, "__cuda_array_interface__"):
        return np.asarray(values)
    with cupy.cuda.Device(device.device_id):
        array = cupy.asarray(values)
    if array.device.id != device.device_id:
        raise InvalidRequestError(f"an array is on cuda:{array.device.id}, but the cache on {device.name}")
    return array  # type: ignore[no-any-return]


def _part_of(rows: MissingRows) -> _Part:
    """The rows that a look-up missed."""
    tables = np.flatnonzero(rows.num_rows)
    begins = np.stack([KEY_BYTES * rows.first_keys[tables], FLOAT_BYTES * rows.first_elements[tables]], axis=1)
    return _Part(tables, rows.num_rows[tables], rows.keys, rows.vectors, begins)


def _joined(parts: Sequence[_Part]) -> _Part:
    """Those of several look-ups, one behind the other."""
    if len(parts) == 1:
        return parts[0]
    sizes = np.array([(part.keys.nbytes, part.vectors.nbytes) for part in parts])
    firsts = np.cumsum(sizes, axis=0) - sizes
    begins = np.concatenate([part.begins + first for part, first in zip(parts, firsts, strict=True)])
    splits = np.cumsum([len(part.tables) for part in parts])[:-1]
    tables, num_keys, keys, vectors = (np.concatenate([part[field] for part in parts]) for field in range(4))
    return _Part(tables, num_keys, keys, vectors, begins, splits)


def _vectors_offset(part: _Part) -> int:
    """Where the vectors begin in a piece of memory that begins with the keys."""
    return -(-part.keys.size * KEY_BYTES // _ALIGNMENT) * _ALIGNMENT


def _at(memory: NDArray[np.uint8], offset: int, like: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """An array in memory, of the shape of another one."""
    array: NDArray[Any] = memory[offset : offset + like.size * np.dtype(dtype).itemsize].view(dtype)
    return array.reshape(like.shape)


def _on_device(array: Any, dtype: Any) -> Any:
    """The array, contiguous and of this type, on the device."""
    if isinstance(array, cupy.ndarray):
        return cupy.ascontiguousarray(array, dtype)
    on_device = cupy.empty(array.shape, dtype)
    on_device.set(np.ascontiguousarray(array, dtype), stream=cupy.cuda.get_current_stream())
    return on_device
