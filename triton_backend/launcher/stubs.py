"""The backend processes of a server, as /proc shows them.

Each instance of a Python model is a process, a *stub*. Triton reaps a stub that it has ended itself; one that died
otherwise stays a zombie as long as the server runs, which is how it is told that it was not meant to end.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from triton_backend.launcher.reaper import SHARED_MEMORY

STUB_NAME = "triton_python_b"
"""Of the program triton_python_backend_stub, as far as the kernel keeps names."""


@dataclass(frozen=True)
class Stub:
    """A backend process: which model's, and which of its versions."""

    pid: int
    model: str
    version: int
    memory: str
    """The name of its region in /dev/shm."""

    def __str__(self) -> str:
        return f"backend process {self.pid} of model {self.model!r} version {self.version}"


def children(server: int) -> list[int]:
    """Processes that a server has started, whichever of its threads did."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{server}/task").iterdir():
            with suppress(OSError):  # threads end
                found += map(int, (task / "children").read_text(encoding="ascii").split())
    return found


def state(pid: int) -> str:
    """`Z` for a zombie, `T` for one that was stopped, other letters as in ps; empty: it is gone, or no stub."""
    with suppress(OSError):
        name, _, rest = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
        return rest.split()[0] if name.endswith(f"({STUB_NAME}") else ""
    return ""


def identify(pid: int) -> Stub | None:
    """Whose a stub is, by its arguments: <repository>/<model>/<version>/model.py, the name of its memory, …"""
    with suppress(OSError, ValueError, IndexError):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        code = Path(arguments[1])
        return Stub(pid, code.parent.parent.name, int(code.parent.name), arguments[2])
    return None


def remove_memory(stub: Stub) -> None:
    """Remove the region of a stub that was killed."""
    (SHARED_MEMORY / stub.memory).unlink(missing_ok=True)
