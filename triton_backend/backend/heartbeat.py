"""Protects a backend process: shows that it runs, ends it when its server is gone, and hides its memory from others.

If `hotrow serve` names a folder for it, a thread writes the time into a file of its process, before the process's
arguments, which the kernel shows of no process that has died. A process that is stopped, or whose interpreter hangs,
stops beating; a session that computes does not, as computing releases the interpreter. guard.py runs as a separate
process.
"""

from __future__ import annotations

import logging
import os
import shutil
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from inference_session.platform.repeated_call import RepeatedCall
from triton_backend.backend import guard

_log = logging.getLogger(__name__)

FOLDER_VARIABLE = "HOTROW_HEARTBEAT_DIR"
RESTARTS_PARAMETER = "HOTROW_RESTARTS"
"""A parameter of a model's configuration: how often backend processes of the model were lost. The next one reads it."""
INTERVAL_S = 1.0
_SERVER = os.getppid()
_TIME = struct.Struct("d")


class Heartbeat:
    """Writes the time at intervals, and has a guard, until stopped."""

    def __init__(self) -> None:
        hide_memory()
        self._guard = start_guard()
        self._handle, self._arguments = _open_file(), _arguments()
        self._beat()
        self._beats = RepeatedCall("hotrow-heartbeat", self._beat, INTERVAL_S, failure="the heartbeat is not written")

    def stop(self) -> None:
        """End the thread and the guard: the process is about to end normally."""
        self._beats.close()
        if self._handle is not None:
            os.close(self._handle)
            forget(Path(os.environ[FOLDER_VARIABLE]), os.getpid())
        if self._guard is not None:
            with suppress(BrokenPipeError):  # it has been killed
                self._guard.communicate(b"done")

    def _beat(self) -> None:
        if self._handle is not None:
            with suppress(OSError):  # a full disk
                os.pwrite(self._handle, _TIME.pack(time.monotonic()) + self._arguments, 0)


def last_beat(folder: Path, pid: int) -> float | None:
    """When a process last beat, by `time.monotonic()`, which all processes of a machine share; None: not yet."""
    with suppress(OSError, struct.error):
        return float(_TIME.unpack_from((folder / str(pid)).read_bytes())[0])
    return None


def arguments_of(folder: Path, pid: int) -> bytes:
    """The arguments of a process that has beaten, as in its /proc/<pid>/cmdline; it may have died since."""
    with suppress(OSError):
        return (folder / str(pid)).read_bytes()[_TIME.size :]
    return b""


def forget(folder: Path, pid: int) -> None:
    """Remove the file of a process that is gone: one that was killed has not removed it."""
    (folder / str(pid)).unlink(missing_ok=True)


def _open_file() -> int | None:
    if folder := os.environ.get(FOLDER_VARIABLE):
        with suppress(OSError):  # the launcher that named the folder may be gone
            return os.open(Path(folder, str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    return None


def hide_memory() -> None:
    """Let no other user open the shared memory through which requests and answers pass.

    Triton lets all users read it, whatever the umask. No request has come yet.
    """
    if memory := _memory_name():
        with suppress(OSError):  # some servers keep it elsewhere
            (guard.SHARED_MEMORY / memory).chmod(0o600)


def _memory_name() -> str | None:
    """The name of this process's shared memory, its argument 2; None if this is no backend process."""
    names = _arguments().split(b"\0")[2:3]
    return names[0].decode() if names and b"/" not in names[0] else None


def _arguments() -> bytes:
    return Path("/proc/self/cmdline").read_bytes()


def start_guard() -> subprocess.Popen[bytes] | None:
    """A guard for this process; None if this is no backend process."""
    memory = _memory_name()
    if memory is None:
        return None
    python = sys.executable or shutil.which("python3") or "python3"
    try:
        return subprocess.Popen(
            [python, "-I", "-S", guard.__file__, str(os.getpid()), str(_SERVER), memory],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
        )
    except OSError as error:
        _log.warning("this process has no guard process and may outlive a server that is killed: %s", error)
        return None
