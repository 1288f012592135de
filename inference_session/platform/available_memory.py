"""How much memory processes on this machine may still allocate."""

from __future__ import annotations

from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int:
    """Memory available without swapping, cached files included: the machine's, or the rest of the container's limit.

    0 where Linux does not report it. `root`: of the file system that reports it.
    """
    machine = _fields(root / "proc/meminfo").get("MemAvailable", 0) << 10
    container = _left_in_container(root / "sys/fs/cgroup")
    return machine if container is None else min(machine, container)


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
