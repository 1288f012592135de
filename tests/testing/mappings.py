"""How the kernel maps the memory of this process."""

from __future__ import annotations

from pathlib import Path

HAS_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage").exists()


def wants_large_pages(address: int) -> bool:
    """Whether the mapping that an address is in was asked to have large pages."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, *words = line.split()
        if not name.endswith(":"):
            begin, end = (int(number, 16) for number in name.split("-"))
            is_inside = begin <= address < end
        elif is_inside and name == "VmFlags:":
            return "hg" in words
    raise ValueError(f"{address:#x} is not mapped")
