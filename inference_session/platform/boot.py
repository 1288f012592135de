"""Which machine this is, since its last start: a file system may be shared with others."""

from __future__ import annotations

import platform
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Differs on all machines, and after each start of one; the machine's name where the system gives no such id."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else platform.node()
