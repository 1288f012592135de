"""The backend processes of a server, as /proc shows them.

Each instance of a Python model is a process, a *stub*. Triton reaps a stub that it has ended itself; one that died
otherwise stays a zombie as long as the server runs: that shows that its end was not intended.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from inference_session.platform.signal_names import signal_name
from triton_backend.backend.heartbeat import arguments_of
from triton_backend.launcher.reaper import SHARED_MEMORY

STUB_NAME = "triton_python_b"
"""The name of triton_python_backend_stub, truncated as the kernel does."""
_EXIT_CODE = 49
"""Its place among the fields of /proc/<pid>/stat that follow the name."""
_STARTED_AT = 19
"""The same of when a process began, in ticks of the machine's clock."""
_WAIT4 = {"x86_64": "61", "aarch64": "260"}.get(platform.machine())
"""The number of the system call that waits for the end of a child."""


@dataclass(frozen=True)
class Stub:
    """A backend process, with its model and version."""

    pid: int
    model: str
    version: int
    memory: str
    """The name of its region in /dev/shm."""

    def __str__(self) -> str:
        return f"backend process {self.pid} of model {self.model!r} version {self.version}"


def children(server: int, known: Iterable[int] = ()) -> list[int]:
    """Processes that any thread of a server has started, and those of `known` that still are its children.

    When a thread ends, its children become those of another one, which may have been looked at already. So a child that
    is known is looked for itself, before it counts as gone.
    """
    found = _listed_children(server)
    return found + [pid for pid in known if pid not in found and _parent(str(pid)) == str(server)]


def _listed_children(server: int) -> list[int]:
    """A server has 36 threads for each model: with many models there are fewer processes to look at."""
    threads = _names_in(f"/proc/{server}/task")
    processes = [name for name in _names_in("/proc") if name.isdigit()]
    if len(threads) <= len(processes):
        return [pid for thread in threads for pid in _children_of_thread(server, thread)]
    return [int(process) for process in processes if _parent(process) == str(server)]


def _names_in(folder: str) -> list[str]:
    with suppress(OSError), os.scandir(folder) as entries:
        return [entry.name for entry in entries]
    return []


def _children_of_thread(server: int, thread: str) -> list[int]:
    with suppress(OSError):  # threads end
        return list(map(int, _read(f"/proc/{server}/task/{thread}/children").split()))
    return []


def _parent(process: str) -> str | None:
    """The parent of a process, also of a zombie; None: the process is gone."""
    with suppress(OSError):
        return _stat(process)[1][1]
    return None


def _stat(process: int | str) -> tuple[str, list[str]]:
    """The name of a process, and the fields that follow it in /proc/<pid>/stat; OSError: the process is gone."""
    name, _, rest = _read(f"/proc/{process}/stat").rpartition(")")
    return name.partition("(")[2], rest.split()


def _read(path: str) -> str:
    """Several hundred files are read each second, so without what makes reading text files convenient."""
    with FileIO(path) as file:
        return file.readall().decode(errors="replace")


def state(pid: int) -> str:
    """`Z` for a zombie, `T` for one that was stopped, other letters as in ps; empty: it is gone, or no stub."""
    with suppress(OSError):
        name, fields = _stat(pid)
        return fields[0] if name == STUB_NAME else ""
    return ""


def began(pid: int) -> int:
    """When a process began, to compare with others; 0: it is gone."""
    with suppress(OSError):
        return int(_stat(pid)[1][_STARTED_AT])
    return 0


def is_zombie(pid: int) -> bool:
    """Whether a process has ended, and its parent has not waited for it."""
    with suppress(OSError):
        return _stat(pid)[1][0] == "Z"
    return False


def awaited(server: int) -> set[int]:
    """Children for whose end a thread of a server waits: it has done with them, or given them up.

    Empty where the kernel does not show system calls.
    """
    found = set()
    for thread in _names_in(f"/proc/{server}/task"):
        with suppress(OSError, ValueError):  # threads end; those that run show no call
            call, child, *_ = _read(f"/proc/{server}/task/{thread}/syscall").split()
            if call == _WAIT4:
                found.add(int(child, 16))
    return found


def end_of(pid: int) -> str:
    """How a zombie ended: `died of SIGKILL`, `died with exit status 1`; `died` where that is hidden or gone."""
    with suppress(OSError, ValueError, IndexError):
        status = int(_stat(pid)[1][_EXIT_CODE])
        if os.WIFSIGNALED(status):
            return f"died of {signal_name(os.WTERMSIG(status))}"
        return f"died with exit status {os.WEXITSTATUS(status)}"
    return "died"


def identify(pid: int, heartbeats: Path) -> Stub | None:
    """A stub's model and version, by its arguments: <repository>/<model>/<version>/model.py, its memory's name, …

    /proc shows none of a zombie. One that died before it was seen alive is known by its heartbeat.
    """
    with suppress(OSError, ValueError, IndexError):
        shown = Path(f"/proc/{pid}/cmdline").read_bytes() or arguments_of(heartbeats, pid)
        arguments = shown.decode(errors="replace").split("\0")
        code = Path(arguments[1])
        return Stub(pid, code.parent.parent.name, int(code.parent.name), arguments[2])
    return None


def remove_memory(stub: Stub) -> None:
    """Remove the region of a stub that was killed."""
    (SHARED_MEMORY / stub.memory).unlink(missing_ok=True)
