"""What a backend process does to be watched: it beats, and it does not outlive its server.

A thread writes the time into a file of its own, where `hotrow serve` names a folder for such files. A process that is
stopped, or whose interpreter hangs, stops beating; a session that computes does not, as computing releases the
interpreter. A server that is killed leaves its backend processes waiting for ever, so they look for their parent.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path

from triton_backend.launcher.reaper import SHARED_MEMORY

FOLDER_VARIABLE = "HOTROW_HEARTBEAT_DIR"
INTERVAL_S = 1.0
_SERVER = os.getppid()
_TIME = struct.Struct("d")


def start() -> None:
    """Start beating, once per process."""
    if not any(thread.name == "hotrow-heartbeat" for thread in threading.enumerate()):
        threading.Thread(target=_beat, name="hotrow-heartbeat", daemon=True).start()


def last_beat(folder: Path, pid: int) -> float | None:
    """When a process last beat, by `time.monotonic()`, which all processes of a machine share; None: not yet."""
    with suppress(OSError, struct.error):
        return float(_TIME.unpack((folder / str(pid)).read_bytes())[0])
    return None


def is_orphan() -> bool:
    """Whether the server is gone. Then Triton's calls never return, and some hold the interpreter all the while."""
    return os.getppid() != _SERVER


def _beat() -> None:
    handle = _open_file()
    while not is_orphan():
        if handle is not None:
            with suppress(OSError):  # a full disk is no reason to stop looking for the server
                os.pwrite(handle, _TIME.pack(time.monotonic()), 0)
        time.sleep(INTERVAL_S)
    _leave()


def _open_file() -> int | None:
    if folder := os.environ.get(FOLDER_VARIABLE):
        with suppress(OSError):  # whoever named the folder may be gone
            return os.open(Path(folder, str(os.getpid())), os.O_WRONLY | os.O_CREAT, 0o644)
    return None


def _leave() -> None:
    """End this process, and the memory it shared with a server that is no more: argument 2 names it."""
    for name in Path("/proc/self/cmdline").read_bytes().split(b"\0")[2:3]:
        (SHARED_MEMORY / name.decode()).unlink(missing_ok=True)
    os._exit(1)
