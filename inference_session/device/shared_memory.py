"""Memory of GPUs that several processes map, by CUDA's virtual memory management.

The memory lives as long as any process maps it or has the file that stands for it. So it stays whole if the process
that made it dies, unlike memory of `cudaIpcGetMemHandle`, which CUDA frees then.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from functools import cache
from typing import Any

import cupy

from inference_session.errors import ConfigurationError

_PINNED, _FILE, _ON_DEVICE, _READ_WRITE = 1, 1, 1, 3
_NO_MEMORY = 2
_SUPPORTS_FILES = 103
"""CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class SharedMemory:
    """Memory of one GPU, mapped for kernels of another or the same one."""

    def __init__(self, handle: ctypes.c_uint64, descriptor: int, num_bytes: int, reader: int) -> None:
        """Use `create` or `opened`. The handle and the descriptor are this object's from here on."""
        self.descriptor, self.num_bytes, self._reader = descriptor, num_bytes, reader
        address, size = ctypes.c_uint64(), _size(num_bytes)
        with contextlib.ExitStack() as opened, contextlib.ExitStack() as mapping:
            opened.callback(os.close, descriptor)
            mapping.callback(_call, "cuMemRelease", handle)  # then the mapping and the file keep the memory
            _call("cuMemAddressReserve", ctypes.byref(address), size, _size(0), ctypes.c_uint64(0), _NO_FLAGS)
            opened.callback(_call, "cuMemAddressFree", address, size)
            _call("cuMemMap", address, size, _size(0), handle, _NO_FLAGS)
            opened.callback(_call, "cuMemUnmap", address, size)
            access = _Access(_Location(_ON_DEVICE, reader), _READ_WRITE)
            _call("cuMemSetAccess", address, size, ctypes.byref(access), _size(1))
            self._opened = opened.pop_all()
        self._address: int = address.value

    @classmethod
    def create(cls, num_bytes: int, device_id: int, reader: int) -> SharedMemory:
        """Memory of GPU `device_id`, mapped for GPU `reader`, the current device.

        Raises:
            ConfigurationError: the GPU has too little memory, or cannot share it.
        """
        size, properties = rounded(num_bytes, device_id), ctypes.byref(_properties(device_id))
        handle, descriptor = ctypes.c_uint64(), ctypes.c_int()
        _call("cuMemCreate", ctypes.byref(handle), _size(size), properties, _NO_FLAGS, device_id=device_id)
        try:
            _call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, ctypes.c_int(_FILE), _NO_FLAGS)
        except BaseException:
            _call("cuMemRelease", handle)
            raise
        os.set_inheritable(descriptor.value, False)
        return cls(handle, descriptor.value, size, reader)

    @classmethod
    def opened(cls, descriptor: int, num_bytes: int, device_id: int, reader: int) -> SharedMemory:
        """Memory that another process has created with this `num_bytes`; the descriptor stays the caller's."""
        size, handle, own = rounded(num_bytes, device_id), ctypes.c_uint64(), os.dup(descriptor)
        try:
            kind = ctypes.c_int(_FILE)
            _call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(own), kind)
        except BaseException:
            os.close(own)
            raise
        return cls(handle, own, size, reader)

    def array(self, begin: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array on the reader, from byte `begin` on."""
        whole = cupy.cuda.UnownedMemory(self._address, self.num_bytes, self, self._reader)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(whole, begin))

    def close(self) -> None:
        """Give it back, as far as this process goes. No kernel may read it any more."""
        with contextlib.suppress(ConfigurationError):  # a failed GPU releases nothing
            self._opened.close()


def unshareable(device_id: int) -> str | None:
    """Why processes cannot share memory of a GPU; None: they can."""
    supported = ctypes.c_int()
    _call("cuDeviceGetAttribute", ctypes.byref(supported), ctypes.c_int(_SUPPORTS_FILES), ctypes.c_int(device_id))
    return None if supported.value else f"cuda:{device_id} cannot share memory between processes"


def rounded(num_bytes: int, device_id: int) -> int:
    """The bytes that are taken for this many."""
    granularity, properties = ctypes.c_size_t(), _properties(device_id)
    _call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(properties), ctypes.c_int(1))
    return max(-(-num_bytes // granularity.value), 1) * granularity.value


def _properties(device_id: int) -> _Properties:
    return _Properties(_PINNED, _FILE, _Location(_ON_DEVICE, device_id))


_size = ctypes.c_size_t
_NO_FLAGS = ctypes.c_uint64(0)


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuInit(0)  # as the runtime does; where it fails, so does every other call
    return driver


def _call(name: str, *arguments: Any, device_id: int | None = None) -> None:
    """Call a function of CUDA's driver; ConfigurationError where it fails, as all run while a version is loaded."""
    status = getattr(_driver(), name)(*arguments)
    if status == _NO_MEMORY and device_id is not None:
        raise ConfigurationError(
            f"memory ran out on cuda:{device_id}, for rows that processes share: free some, or use more GPUs or smaller"
            " tables"
        )
    if status:
        raise ConfigurationError(
            f"processes cannot share the memory of GPUs here: {name} failed with CUDA's error {status}; set shard=none"
        )
