"""Arrays with pages on both sides that nothing may read or write: the process ends if compiled code does."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PAGE = mmap.PAGESIZE
_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def guarded(array: NDArray[Any], *, at_end: bool = True) -> NDArray[Any]:
    """A copy that ends where a page ends, or begins where one begins, which lives as long as the process."""
    num_pages = -(-array.nbytes // _PAGE)
    memory = mmap.mmap(-1, (num_pages + 2) * _PAGE)
    _keep.append(memory)
    all_bytes = np.frombuffer(memory, np.uint8)
    first, last = all_bytes.ctypes.data, all_bytes.ctypes.data + (num_pages + 1) * _PAGE
    end = (num_pages + 1) * _PAGE if at_end else _PAGE + array.nbytes
    copy: NDArray[Any] = all_bytes[end - array.nbytes : end].view(array.dtype).reshape(array.shape)
    copy[...] = array
    for page in (first, last):
        if _mprotect(page, _PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    return copy


_keep: list[mmap.mmap] = []
