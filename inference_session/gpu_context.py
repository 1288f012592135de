"""What the parts of a session share on a GPU: a stream, memory that requests pass through, whether it still works.

A request holds the context from its keys to its predictions. In between nothing is waited for; at the end `request` is
the one place where the host waits for the device.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import cupy
import numpy as np
from cupy.cuda.driver import CUDADriverError
from cupy.cuda.runtime import CUDARuntimeError
from numpy.typing import NDArray

from inference_session.embedding_cache.base_rows import pinned_empty
from inference_session.errors import InvalidRequestError, UnavailableError

_ALIGNMENT = 64
_FIRST_ARENA_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class GpuContext:
    """One GPU as one session uses it: one request at a time, in order."""

    def __init__(self, device_id: int) -> None:
        self.device_id = device_id
        self._lock = threading.RLock()
        self._broken: str | None = None
        with cupy.cuda.Device(device_id):
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self._arena = pinned_empty((_FIRST_ARENA_BYTES,), np.uint8)
        self._used = 0
        self._full: list[NDArray[np.uint8]] = []

    @property
    def failure(self) -> str | None:
        """Why the device can be used no more; None: it can."""
        return self._broken

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """The device and its stream for one request; on leaving, all that was launched has ended.

        Raises:
            UnavailableError: the device has failed. CUDA then refuses all further work of this process.
        """
        with self._lock:
            if self._broken is not None:
                raise UnavailableError(self._broken)
            try:
                with cupy.cuda.Device(self.device_id), self.stream:
                    yield
                    self.stream.synchronize()
            except (CUDARuntimeError, CUDADriverError) as error:
                raise self._break(error) from error
            except InvalidRequestError:
                # What looks like bad values may be the network's way to say that the device has failed.
                try:
                    self.stream.synchronize()
                except CUDARuntimeError as error:
                    raise self._break(error) from error
                raise
            finally:
                self._used = 0
                self._full.clear()

    def stage(self, array: NDArray[Any]) -> NDArray[Any]:
        """A copy in pinned memory, where kernels read it, until the request ends."""
        num_bytes = -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._used + num_bytes > len(self._arena):
            self._full.append(self._arena)  # kernels may be reading it
            self._arena, self._used = pinned_empty((max(num_bytes, 2 * len(self._arena)),), np.uint8), 0
        copy = self._arena[self._used : self._used + array.nbytes].view(array.dtype).reshape(array.shape)
        self._used += num_bytes
        np.copyto(copy, array)
        return copy

    def _break(self, error: Exception) -> UnavailableError:
        self._broken = (
            f"cuda:{self.device_id} has failed ({error}); CUDA lets this process use it no more: load the model again"
        )
        _log.error("%s", self._broken)
        return UnavailableError(self._broken)
