"""Memory of the machine: how much processes may still allocate, and the pages of it and of mapped files."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
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


def total_bytes(root: Path = Path("/")) -> int:
    """Memory of the machine, or the limit of the container; 0 where Linux does not report it. `root`: as above."""
    machine = _fields(root / "proc/meminfo").get("MemTotal", 0) << 10
    container = _limit_of_container(root / "sys/fs/cgroup")
    return machine if container is None else min(machine, container)


def map_pages(array: NDArray[Any], deadline: float) -> None:
    """Map the pages of a file that is mapped as an array: otherwise the first look-up of each page waits for it.

    What is not in memory is read, in large pages (large_pages.py) where the kernel has them; the rest stays as it is.

    Ends at `deadline`, a value of time.monotonic(), at the latest, and where a page cannot be read.
    """
    begin = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    end = array.ctypes.data + array.nbytes
    for address in range(begin, end, _CHUNK_BYTES):
        if time.monotonic() > deadline:
            return
        # Not for the whole array: later reads of single rows would read 2 MiB each where the time has been too short.
        _madvise(address, min(_CHUNK_BYTES + LARGE_PAGE_BYTES, end - address), mmap.MADV_HUGEPAGE)
        if _madvise(address, min(_CHUNK_BYTES, end - address), _POPULATE_READ):
            return


def take_large_pages(address: int, num_bytes: int) -> None:
    """Have the kernel give large pages to memory that is not written yet, as far as it has them to give.

    The first write to a page makes it. Pages of 4 KiB take three times as long as those of 2 MiB with the same bytes.
    """
    begin = -(-address // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
    end = (address + num_bytes) // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
    if begin < end and sys.platform == "linux":
        _madvise(begin, end - begin, mmap.MADV_HUGEPAGE)


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
        map_pages(content, math.inf)


def _left_in_container(group: Path) -> int | None:
    """The rest of the limit of the control group; None: no limit."""
    limit, used = _limit_of_container(group), group / "memory.current"
    if limit is None or not used.exists():
        return None
    fields = _fields(group / "memory.stat")
    files = fields.get("active_file", 0) + fields.get("inactive_file", 0)
    return max(limit - int(used.read_text(encoding="ascii")) + files, 0)


def _limit_of_container(group: Path) -> int | None:
    """The limit of the control group (version 2); None: no limit."""
    limit = group / "memory.max"
    text = limit.read_text(encoding="ascii").strip() if limit.exists() else ""
    return int(text) if text.isdecimal() else None


def _fields(path: Path) -> dict[str, int]:
    """Names and numbers, one pair to a line."""
    lines = path.read_text(encoding="ascii").splitlines() if path.exists() else ()
    words = [line.replace(":", " ").split() for line in lines]
    return {name: int(number) for name, number, *_ in words}
