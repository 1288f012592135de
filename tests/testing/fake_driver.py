"""The virtual memory management of CUDA's driver over memory of the host, which processes share as they do a GPU's.

What is reserved and not mapped kills the process that reads it, as CUDA ends a process that reads what it may not.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from typing import Any

GRANULARITY = 2 << 20
_INVALID_VALUE, _NO_MEMORY = 1, 2
_FIXED, _NO_ACCESS = 0x10, 0
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class FakeDriver:
    """What `shared_memory` calls, with the arguments that it gives: all are `ctypes` objects."""

    # ruff: noqa: N802  CUDA's names

    def __init__(self) -> None:
        self.handles: dict[int, int] = {}
        """Descriptors of memory, by handle."""
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        """Bytes, by address."""
        self.num_created = 0
        self.failing: int | None = None
        """After that many more calls that take something, all of them fail; None: none does."""
        self._numbers = itertools.count(1)

    def cuDeviceGetAttribute(self, out: Any, *_: object) -> int:
        out._obj.value = 1
        return 0

    def cuMemGetAllocationGranularity(self, out: Any, *_: object) -> int:
        out._obj.value = GRANULARITY
        return 0

    def cuMemCreate(self, out: Any, size: Any, properties: Any, _flags: Any) -> int:
        if self._fails():
            return _NO_MEMORY
        memory = os.memfd_create(f"gpu {properties._obj.location.id}", os.MFD_CLOEXEC)
        os.ftruncate(memory, size.value)
        self.num_created += 1
        return self._returned(out, memory)

    def cuMemExportToShareableHandle(self, out: Any, handle: Any, _kind: Any, _flags: Any) -> int:
        if self._fails():
            return _INVALID_VALUE
        out._obj.value = os.dup(self.handles[handle.value])
        return 0

    def cuMemImportFromShareableHandle(self, out: Any, descriptor: Any, _kind: Any) -> int:
        if self._fails():
            return _INVALID_VALUE
        return self._returned(out, os.dup(descriptor.value or 0))

    def cuMemRelease(self, handle: Any) -> int:
        os.close(self.handles.pop(handle.value))
        return 0

    def cuMemAddressReserve(self, out: Any, size: Any, *_: object) -> int:
        if self._fails():
            return _INVALID_VALUE
        out._obj.value = _libc.mmap(None, size.value, _NO_ACCESS, _RESERVED, -1, 0)
        self.reserved[out._obj.value] = size.value
        return 0

    def cuMemMap(self, address: Any, size: Any, _begin: Any, handle: Any, _flags: Any) -> int:
        memory = self.handles[handle.value]
        if self._fails() or self.reserved[address.value] != size.value or os.fstat(memory).st_size != size.value:
            return _INVALID_VALUE
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        _libc.mmap(address.value, size.value, rights, mmap.MAP_SHARED | _FIXED, memory, 0)
        self.mapped[address.value] = size.value
        return 0

    def cuMemSetAccess(self, *_: object) -> int:
        return _INVALID_VALUE if self._fails() else 0

    def cuMemUnmap(self, address: Any, size: Any) -> int:
        if self.mapped.pop(address.value) != size.value:
            return _INVALID_VALUE
        _libc.mmap(address.value, size.value, _NO_ACCESS, _RESERVED | _FIXED, -1, 0)
        return 0

    def cuMemAddressFree(self, address: Any, size: Any) -> int:
        if address.value in self.mapped or self.reserved.pop(address.value) != size.value:
            return _INVALID_VALUE
        _libc.munmap(address.value, size.value)
        return 0

    def _returned(self, out: Any, memory: int) -> int:
        out._obj.value = next(self._numbers)
        self.handles[out._obj.value] = memory
        return 0

    def _fails(self) -> bool:
        if self.failing is None:
            return False
        self.failing -= 1
        return self.failing < 0
