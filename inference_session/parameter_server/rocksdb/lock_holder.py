"""Which process holds the lock of a RocksDB, as Linux tells it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_LOCKS = Path("/proc/locks")
_LOCK_FILE = "LOCK"


def lock_holder(path: Path) -> str:
    """Such as `process 4711 (tritonserver, stopped)`.

    The file itself is not opened: closing it would end a lock that this process holds.
    """
    with suppress(OSError, ValueError, IndexError):
        stat = (path / _LOCK_FILE).stat()
        place = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
        for line in _LOCKS.read_text(encoding="ascii").splitlines():
            fields = line.split()
            if place in fields and fields[1] == "POSIX":
                return _describe(int(fields[4]))
    return "another process, or twice by this one"


def _describe(pid: int) -> str:
    if pid == os.getpid():
        return "another store of this process"
    with suppress(OSError, ValueError):
        begin, _, end = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
        state = ", stopped" if end.split()[0] == "T" else ""
        return f"process {pid} ({begin.partition('(')[2]}{state})"
    return f"process {pid}"
