"""Whether the kernel maps files in pages of 2 MiB (large_pages.py writes them so that it can)."""

from __future__ import annotations

import mmap
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from inference_session.platform.large_pages import LARGE_PAGE_BYTES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MAX_SAMPLES = 256
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def large_page_fraction(path: Path) -> float | None:
    """How much of a file the kernel maps in large pages, judged by up to 256 of them; None: it is smaller than one.

    Those that are not in memory are read.
    """
    num_pages = path.stat().st_size // LARGE_PAGE_BYTES
    if not num_pages:
        return None
    import numpy as np  # here, because `hotrow inspect` of small tables needs it for nothing else

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        with suppress(OSError):  # a kernel without large pages
            mapped.madvise(mmap.MADV_HUGEPAGE)  # else what is read here would be in small ones
        content = np.frombuffer(mapped, np.uint8)
        pages = np.unique(np.linspace(0, num_pages - 1, min(num_pages, _MAX_SAMPLES)).astype(np.int64))
        content[pages * LARGE_PAGE_BYTES].sum()  # maps them
        fraction = mapped_large_bytes(content) / (len(pages) * LARGE_PAGE_BYTES)
        del content  # else the mapping could not be closed
    return min(fraction, 1.0)


def large_page_setting() -> str:
    """The value of `transparent_hugepage`; empty: the kernel lacks it."""
    try:
        text = _SETTING.read_text(encoding="ascii")
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]


def mapped_large_bytes(array: NDArray[np.uint8]) -> int:
    """How many bytes are in large pages, of the mapping of a file that begins where the array, uint8 [n], does."""
    begins, is_it = f"{array.ctypes.data:x}-", False
    with Path("/proc/self/smaps").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if " " in name:  # the head of a mapping: its range and rights
                is_it = line.startswith(begins)
            elif is_it and name == "FilePmdMapped":
                return int(value.split()[0]) << 10
    return 0
