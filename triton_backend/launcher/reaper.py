"""Cleans up after a launcher that was killed. It is a separate program, as no other process is left to do it.

Reads a line of JSON, then waits. When its input ends without the word `done`, the launcher was killed or interrupted.
The reaper then kills the processes whose command line contains the prefix of the shared memory (the server, its backend
processes and their guards) and those that work in the folder of nginx, and removes the shared memory and the folder.
Standard library only: it runs as a plain script, `python reaper.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where the Python backend keeps its tensors
FRONT_FOLDER = "front"
"""Where nginx works, in the launcher's folder."""
_TIMEOUT_S = 10.0


def main() -> None:
    """Wait for the end of the launcher."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the launcher, which ends us by `done`
    left = json.loads(sys.stdin.readline())
    if sys.stdin.read().strip() != "done":
        end_processes(left["memory_prefix"], Path(left["folder"], FRONT_FOLDER))
        remove_shared_memory(left["memory_prefix"])
        shutil.rmtree(left["folder"], ignore_errors=True)


def end_processes(memory_prefix: str, front: Path) -> None:
    """Kill the processes of one server, and wait until they are gone."""
    deadline = time.monotonic() + _TIMEOUT_S
    while (found := _processes(memory_prefix, front)) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def remove_shared_memory(memory_prefix: str) -> None:
    """Remove the regions that killed processes leave behind."""
    for leftover in SHARED_MEMORY.glob(f"{memory_prefix}*"):
        leftover.unlink(missing_ok=True)


def _processes(memory_prefix: str, front: Path) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if memory_prefix.encode() in (folder / "cmdline").read_bytes() or (folder / "cwd").readlink() == front:
                found.append(int(folder.name))
    return found


if __name__ == "__main__":
    main()
