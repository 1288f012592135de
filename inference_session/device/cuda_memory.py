"""Error messages for a GPU, or the host's pinned memory, with too little room for what is to stay there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import cupy
from cupy.cuda import driver, runtime
from cupy.cuda.memory import OutOfMemoryError

from inference_session.errors import ConfigurationError, as_thrown

_NO_MEMORY = 2
"""cudaErrorMemoryAllocation, and the driver's CUDA_ERROR_OUT_OF_MEMORY."""


def check_free(num_bytes: int, device_id: int) -> None:
    """ConfigurationError where the current device has less memory free than this, which `cache_bytes` asks for."""
    free, total = runtime.memGetInfo()
    if num_bytes > free:
        cupy.get_default_memory_pool().free_all_blocks()
        free, total = runtime.memGetInfo()
    if num_bytes > free:
        raise ConfigurationError(
            f"cache_bytes needs {num_bytes} bytes on cuda:{device_id}, which has {free} free of {total}:"
            " set a smaller value or free some memory"
        )


def check_room(num_bytes: int, device_id: int) -> None:
    """ConfigurationError where this much memory cannot be allocated now."""
    with cupy.cuda.Device(device_id), memory_checked(device_id, "free some memory or use another device"):
        cupy.cuda.Memory(num_bytes)  # freed at once


@contextlib.contextmanager
def memory_checked(device_id: int, way_out: str) -> Iterator[None]:
    """ConfigurationError where memory runs out after all: fragmented, taken by other code meanwhile, or
    the host's, which must be pinned. The device is the current one.
    """
    try:
        yield
    except (OutOfMemoryError, runtime.CUDARuntimeError, driver.CUDADriverError) as error:
        # CuPy's pool raises its own error, CUDA gives a number.
        if getattr(error, "status", _NO_MEMORY) != _NO_MEMORY:
            raise
        raise memory_ran_out(device_id, error, way_out) from as_thrown(error)


def memory_ran_out(device_id: int, reason: object, way_out: str) -> ConfigurationError:
    """The error for a device that had too little memory. The device is the current one."""
    free, total = runtime.memGetInfo()
    return ConfigurationError(
        f"memory ran out on cuda:{device_id}, which has {free} bytes free of {total}, or in pinned host"
        f" memory ({reason}): {way_out}"
    )
