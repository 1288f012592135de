"""Memory of the machine: how much processes may still allocate, and pages of mapped files."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import time
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference_session.platform.large_pages import LARGE_PAGE_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

_POPULATE_READ = 22
"""MADV_POPULATE_READ, from Linux 5.14; older ones refuse it, and pages are mapped as they are read."""
_CHUNK_BYTES = 64 << 20

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def available_bytes(root: Path = Path("/")) -> int:
    """Memory available without swapping, cached files included: the machine's, or the rest of the container's limit.

    0 where Linux does not report it. `root`: of the file system that reports it.
    """
    machine = _fields(root / "proc/meminfo").get("MemAvailable", 0) << 10
    container = _left_in_container(root / "sys/fs/cgroup")
    return machine if container is None else min(machine, container)


def prefer_large_pages(array: NDArray[Any]) -> None:
    """Let the kernel read a file that is mapped as an array in large pages (large_pages.py), where it has them.

    Pages that are in memory stay as they are. A read of any place then reads 2 MiB.
    """
    begin = _page_of(array)
    _madvise(begin, array.ctypes.data + array.nbytes - begin, mmap.MADV_HUGEPAGE)


def map_pages(array: NDArray[Any], deadline: float) -> None:
    """Map the pages of a file that is mapped as an array, reading what is not in memory: otherwise the first look-up of
    every page waits for the kernel to map it.

    Ends at `deadline`, a value of time.monotonic(), at the latest, and where a page cannot be read.
    """
    end = array.ctypes.data + array.nbytes
    for address in range(_page_of(array), end, _CHUNK_BYTES):
        size = min(_CHUNK_BYTES, end - address)
        if time.monotonic() > deadline or _madvise(address, size, _POPULATE_READ):
            return


def read_ahead(file: FileIO, num_bytes: int) -> None:
    """Have the kernel read what comes next in a file, in large pages where it has them: `read` leaves small ones.

    What is in memory stays as it is. What fails here is left to `read`.
    """
    begin = file.tell() // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
    size = min(file.tell() + num_bytes, os.fstat(file.fileno()).st_size) - begin
    if size < LARGE_PAGE_BYTES:
        return
    import numpy as np  # here, because small files need it for nothing

    with suppress(OSError, ValueError):
        content = np.frombuffer(mmap.mmap(file.fileno(), size, offset=begin, access=mmap.ACCESS_READ), np.uint8)
        # Not by `madvise` of mmap, which holds the interpreter while the disk reads.
        prefer_large_pages(content)
        map_pages(content, math.inf)


def _page_of(array: NDArray[Any]) -> int:
    """The address of the page in which an array begins."""
    return array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE


def _left_in_container(group: Path) -> int | None:
    """The rest of the limit of the control group (version 2); None: no limit."""
    limit, used = group / "memory.max", group / "memory.current"
    if not (limit.exists() and used.exists()):
        return None
    text = limit.read_text(encoding="ascii").strip()
    if not text.isdecimal():
        return None
    fields = _fields(group / "memory.stat")
    files = fields.get("active_file", 0) + fields.get("inactive_file", 0)
    return max(int(text) - int(used.read_text(encoding="ascii")) + files, 0)


def _fields(path: Path) -> dict[str, int]:
    """Names and numbers, one pair to a line."""
    lines = path.read_text(encoding="ascii").splitlines() if path.exists() else ()
    words = [line.replace(":", " ").split() for line in lines]
    return {name: int(number) for name, number, *_ in words}
