"""Ends a backend process whose server is gone. It is a separate program, which the process starts.

The process cannot do that itself in every state. A call into Triton's metrics that the server's end interrupts never
returns, and holds the interpreter lock. Linux's PR_SET_PDEATHSIG does not help: it signals the end of the thread that
started the process, and the server starts processes from threads that end after a load.

Arguments: the process, its server, and the name of its shared memory region, which no other process removes. The
standard input is a pipe from the process: the word `done` says that it ends normally. Standard library only: it runs as
a plain script.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

POLL_S = 1.0
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where the Python backend keeps its tensors


def main() -> None:
    """Guard until the process or its server has ended; if the process was killed, until its memory is gone too."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the server
    process, server, memory = int(sys.argv[1]), int(sys.argv[2]), SHARED_MEMORY / sys.argv[3]
    # A process that was forked from ours may hold the pipe open, so waiting for the pipe's end is not enough.
    while not (readable := select.select([sys.stdin], [], [], POLL_S)[0]) and os.getppid() == process:
        if _parent(process) not in (server, None):
            os.kill(process, signal.SIGKILL)  # it is our parent, so that no other process can have its number
            memory.unlink(missing_ok=True)
            return
    if not readable or os.read(sys.stdin.fileno(), 16).strip() != b"done":
        remove_left(memory, server)


def remove_left(memory: Path, server: int) -> None:
    """Remove the memory of a process that was killed, once its server is gone, unless the server does that."""
    while memory.exists():
        if _parent(server) is None:
            memory.unlink(missing_ok=True)
        else:
            time.sleep(POLL_S)


def _parent(process: int) -> int | None:
    """The parent of a process; None: it is gone, or a zombie."""
    with suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if fields[0] == "Z" else int(fields[1])
    return None


if __name__ == "__main__":
    main()
