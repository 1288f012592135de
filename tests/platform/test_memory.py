"""The available memory of a machine, and of a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference_session.platform.memory import available_bytes


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


@pytest.mark.parametrize(("most", "left"), [("500000", 300_000), ("100000", 0), (str(1 << 40), 1000 << 10)])
def test_a_container_has_less(root: Path, most: str, left: int) -> None:
    """A limit counts where it leaves less; files that are only cached are no loss."""
    limit(root, most)

    assert available_bytes(root) == left


def test_a_system_that_does_not_tell_has_none(tmp_path: Path) -> None:
    """It is 0, as documented."""
    assert available_bytes(tmp_path) == 0


def test_this_machine_has_some() -> None:
    """The real files can be read."""
    assert available_bytes() > 0
