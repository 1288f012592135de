"""The processor as a device: its memory is the process's own, and a call is done when it returns."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import Event, get_ident
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from inference_session.device.base import Columns, Device
from inference_session.kernels.records import address_of

_Result = TypeVar("_Result")

LINE_BYTES = 64
_WAIT_S = 0.1
"""After this time a writer looks again: an interrupted look-up may not have woken it."""
_NOTHING_HELD = contextlib.nullcontext()
_NO_KEYS = np.empty(0, np.int64)


class HostDevice(Device):
    """The processor. Requests do not wait for one another."""

    name = "cpu"

    def request(self) -> contextlib.AbstractContextManager[None]:
        return _NOTHING_HELD

    held = request

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
        return np.empty(shape, dtype)

    def columns(self, matrix: NDArray[np.float32], first: int, widths: Sequence[int]) -> HostColumns:
        return HostColumns(matrix, first, widths)

    def column_copy(self, source: NDArray[Any], matrix: NDArray[Any], first: int) -> Callable[[], object]:
        return partial(np.copyto, matrix[:, first : first + source.shape[1]], source)

    def counts(self, num_counts: int) -> NDArray[np.int64]:
        return np.zeros(num_counts, np.int64)

    def stage(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.ascontiguousarray(array)

    def stage_keys(self, parts: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
        return concatenated_keys(parts)

    def output(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        return array

    def wait(self) -> None:
        """See Device."""


class HostColumns(Columns):
    """See Columns: they are written in place."""

    def __init__(self, matrix: NDArray[np.float32], first: int, widths: Sequence[int]) -> None:
        *self.arrays, behind = adjacent_columns(matrix[:, first:], widths)
        behind[...] = 0

    def fill(self, arrays: Sequence[NDArray[np.float32]]) -> None:
        for target, values in zip(self.arrays, arrays, strict=True):
            target[...] = values


def adjacent_columns(matrix: NDArray[np.float32], widths: Iterable[int]) -> list[NDArray[np.float32]]:
    """Views of a matrix [rows, columns]: parts of `widths` columns each, and all columns behind them."""
    ends = itertools.accumulate(widths, initial=0)
    return [matrix[:, begin:end] for begin, end in itertools.pairwise((*ends, matrix.shape[1]))]


HOST = HostDevice()


class Readers:
    """The look-ups that read some memory now. They enter and leave without a lock; one writer at a time may wait."""

    def __init__(self) -> None:
        self._under_way: set[tuple[int, object]] = set()
        self._left = Event()
        self.writer_waits = False
        """Whether a writer waits for look-ups to end."""

    def read(self, use: Callable[[], _Result]) -> _Result:
        """Call `use`: what it reads stays unchanged until it returns.

        This is no context manager, because Ctrl-C may come between the calls of one, or inside them. A look-up that did
        not leave would have writers wait for ever.
        """
        reader = get_ident(), object()
        try:
            self._under_way.add(reader)
            return use()
        finally:
            self._under_way.discard(reader)  # in one step, as all methods of a set
            if self.writer_waits:
                self._left.set()

    @property
    def includes_this_thread(self) -> bool:
        """Whether this thread is among them: then it would wait for itself, and never end."""
        return any(thread == get_ident() for thread, _ in self._under_way.copy())

    def wait_for_those_under_way(self) -> None:
        """Wait until the look-ups that are running now have ended; later ones see what was written before."""
        waited_for = self._under_way.copy()
        self.writer_waits = True
        while not waited_for.isdisjoint(self._under_way):
            self._left.wait(_WAIT_S)
            self._left.clear()
        self.writer_waits = False


def concatenated_keys(parts: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    """Keys of any shapes and types as int64 [keys], in one pass; a single array that already fits is not copied."""
    if len(parts) == 1:
        return np.ascontiguousarray(parts[0], np.int64)
    return np.concatenate(parts, axis=None, dtype=np.int64) if parts else _NO_KEYS


def zeros_at_line(num_rows: int, row_bytes: int) -> NDArray[np.uint8]:
    """Zeros, [num_rows, row_bytes], that begin at a line of the processor's caches; takes a line more."""
    num_bytes = num_rows * row_bytes
    return _from_line(np.zeros(num_bytes + LINE_BYTES, np.uint8))[:num_bytes].reshape(num_rows, row_bytes)


def vectors_at_line(num_rows: int, embedding_dim: int) -> NDArray[np.float32]:
    """An array [num_rows, embedding_dim] for vectors, as `zeros_at_line`: large look-ups write whole lines faster."""
    num_bytes = 4 * num_rows * embedding_dim
    memory = _from_line(np.empty(num_bytes + LINE_BYTES, np.uint8))
    return memory[:num_bytes].view(np.float32).reshape(num_rows, embedding_dim)


def _from_line(memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return memory[-address_of(memory) % LINE_BYTES :]
