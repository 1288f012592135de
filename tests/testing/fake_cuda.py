"""CUDA as far as opening devices asks about it, for processes on machines without a GPU: which GPUs there are, and what
memory they have. Copies of host memory are made; nothing can be computed there.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np


class FakeGpu(NamedTuple):
    """What CUDA says about a GPU."""

    name: str
    total_bytes: int
    free_bytes: int


used: list[int] = []
"""The GPUs that were made current, on which CUDA takes memory then."""


class _Device:
    current = 0

    def __init__(self, number: int) -> None:
        self._number, self._before = number, 0

    def __enter__(self) -> None:
        self._before, _Device.current = _Device.current, self._number
        used.append(self._number)

    def __exit__(self, *_: object) -> None:
        _Device.current = self._before


def install(gpus: Sequence[FakeGpu], *, peers: bool = True) -> None:
    """From now on, `import cupy` gives these GPUs; `peers`: whether they can read each other's memory."""
    names = ("cupy", "cupy.cuda", "cupy.cuda.memory", "cupy_backends", "cupy_backends.cuda", "cupy_backends.cuda.api")
    modules: dict[str, Any] = {name: MagicMock() for name in names}
    for name in ("driver", "runtime"):
        modules[f"cupy_backends.cuda.api.{name}"] = MagicMock()
    runtime, cuda = MagicMock(), modules["cupy.cuda"]
    runtime.CUDARuntimeError = modules["cupy_backends.cuda.api.runtime"].CUDARuntimeError = RuntimeError
    cuda.driver.CUDADriverError = modules["cupy_backends.cuda.api.driver"].CUDADriverError = RuntimeError
    modules["cupy.cuda.memory"].OutOfMemoryError = MemoryError
    runtime.getDeviceCount = lambda: len(gpus)
    runtime.getDeviceProperties = lambda i: {
        "name": gpus[i].name.encode(),
        "totalGlobalMem": gpus[i].total_bytes,
        "uuid": bytes([i] * 16),
    }
    runtime.memGetInfo = lambda: (gpus[_Device.current].free_bytes, gpus[_Device.current].total_bytes)
    runtime.deviceCanAccessPeer = lambda _reader, _owner: int(peers)
    runtime.memcpy2DAsync = _copy_2d
    cuda.Device, cuda.runtime = _Device, runtime
    cuda.UnownedMemory = lambda address, _size, _owner, _device_id: address
    cuda.MemoryPointer = lambda address, begin: address + begin
    modules["cupy"].cuda, modules["cupy"].ndarray = cuda, _array_at
    sys.modules.update(modules)


class _Array(np.ndarray[Any, Any]):
    def set(self, rows: Any) -> None:
        self[...] = rows


def _array_at(shape: tuple[int, ...], dtype: Any, address: int) -> Any:
    """An array in memory of the host."""
    content = (ctypes.c_uint8 * (math.prod(shape) * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(content, dtype).reshape(shape).view(_Array)


def _copy_2d(  # noqa: PLR0917  as CuPy's
    target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, _kind: object, _stream: int
) -> None:
    """At once; CUDA refuses rows that are longer than from one row to the next."""
    assert width <= min(target_pitch, source_pitch)
    for row in range(height):
        ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)
