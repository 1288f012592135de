"""The available memory of a machine, and of a container; large pages for memory."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest

from inference_session.platform.large_pages import LARGE_PAGE_BYTES
from inference_session.platform.memory import available_bytes, take_large_pages, total_bytes
from tests.testing.mappings import HAS_LARGE_PAGES, wants_large_pages


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file system of a machine with 1000 KiB available."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4000 kB\nMemAvailable:    1000 kB\nHugePages_Total:  0\n")
    return tmp_path


def limit(root: Path, most: str) -> None:
    """Put all into a container that uses 300,000 bytes, 100,000 of them for files."""
    group = root / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text("300000\n")
    (group / "memory.stat").write_text("anon 200000\ninactive_file 60000\nactive_file 40000\n")


def test_a_machine_tells(root: Path) -> None:
    """Without a container's limit it is what the machine has."""
    assert available_bytes(root) == 1000 << 10

    limit(root, "max")
    assert available_bytes(root) == 1000 << 10
    assert total_bytes(root) == 4000 << 10


@pytest.mark.parametrize(("most", "left"), [("500000", 300_000), ("100000", 0), (str(1 << 40), 1000 << 10)])
def test_a_container_has_less(root: Path, most: str, left: int) -> None:
    """A limit counts where it leaves less; files that are only cached are no loss."""
    limit(root, most)

    assert available_bytes(root) == left
    assert total_bytes(root) == min(int(most), 4000 << 10)


def test_a_system_that_does_not_tell_has_none(tmp_path: Path) -> None:
    """It is 0, as documented."""
    assert available_bytes(tmp_path) == 0
    assert total_bytes(tmp_path) == 0


def test_this_machine_has_some() -> None:
    """The real files can be read."""
    assert 0 < available_bytes() <= total_bytes()


def test_whole_large_pages_are_asked_for() -> None:
    """Not for what is in front of the first of them, or behind the last: others use the rest of these pages."""
    with mmap.mmap(-1, 5 * LARGE_PAGE_BYTES) as mapped:
        buffer = ctypes.c_byte.from_buffer(mapped)
        begin = -(-ctypes.addressof(buffer) // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
        take_large_pages(begin + 4096, 2 * LARGE_PAGE_BYTES - 8192)
        assert not wants_large_pages(begin + LARGE_PAGE_BYTES)

        take_large_pages(begin + 4096, 3 * LARGE_PAGE_BYTES - 8192)
        asked = [wants_large_pages(begin + i * LARGE_PAGE_BYTES) for i in range(3)]
        del buffer

    assert asked == [False, HAS_LARGE_PAGES, False]
