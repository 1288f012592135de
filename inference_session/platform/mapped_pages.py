"""Maps the pages of files in advance: otherwise the first look-up of every page waits for the kernel to map it."""

from __future__ import annotations

import ctypes
import mmap
import time
from typing import Any

from numpy.typing import NDArray

_POPULATE_READ = 22
"""MADV_POPULATE_READ, from Linux 5.14; older ones refuse it, and pages are mapped as they are read."""
_CHUNK_BYTES = 64 << 20

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_pages(array: NDArray[Any], deadline: float) -> None:
    """Map the pages of a file that is mapped as an array, reading what is not in memory.

    Ends at `deadline`, a value of time.monotonic(), at the latest, and where a page cannot be read.
    """
    begin = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    end = array.ctypes.data + array.nbytes
    for address in range(begin, end, _CHUNK_BYTES):
        size = min(_CHUNK_BYTES, end - address)
        if time.monotonic() > deadline or _madvise(address, size, _POPULATE_READ):
            return
