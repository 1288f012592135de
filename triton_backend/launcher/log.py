"""A tritonserver's output: shown to the user, and searched for the reason why the server ended."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import threading
from collections import deque
from typing import IO

from triton_backend.client.server import plain_reason

_SIGNAL = re.compile(r"Signal \((\d+)\) received")
_CRASH_SIGNALS = {str(int(s)) for s in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)}
_LOAD_FAILURE = re.compile(r"\"failed to load '(.+?)' version (\d+): (.*)\"$")
_CHOICE = re.compile(r"version (0|-\d+) is specified for model")
"""Numbers of no version, which mark a version as chosen at run time (repository/chosen_versions.py)."""
_NO_STREAM = re.compile(r"unable to create stream for .*: CUDA driver version is insufficient")
"""Logged for each ensemble on a machine without a GPU."""
_ALL_FLAGS, _BEHIND_ALL_FLAGS = "Usage: tritonserver [options]", ("Bad option", "Error: ")
"""Between these lines, or to the end, the server prints some 400 lines about all its flags where it refuses one."""
_LOST_LOCK = "boost::interprocess::lock_exception"
_NOISE = (
    # Logged on every machine without a GPU; not an error there.
    "CudaDriverHelper has not been initialized",
    "Failed to initialize NVML",
    "DCGM unable to start",
    "no pinned memory pool, falling back to non-pinned system memory",
    # Logged for the weights that HugeCTR's users keep in a model's folder.
    "ignore version directory",
    # Logged for a HugeCTR version that was removed: its link is removed a moment later (repository/view.py).
    "Failed to determine modification time for",
    # The shutdown that we requested.
    "Signal (15) received",
)


def say(message: str) -> None:
    """Tell the user of `hotrow serve`, between the server's own lines."""
    with contextlib.suppress(OSError, ValueError):  # our stderr may be closed
        print(f"hotrow: {message}", file=sys.stderr, flush=True)


class ServerLog:
    """The server's output, shown on our stderr as it comes; a thread reads it to its end."""

    def __init__(self, stream: IO[bytes], *, verbose: bool) -> None:
        self.crashed = threading.Event()
        """Set when the server logs a fatal signal; its process may linger afterwards."""
        self.lost_lock = False
        """Whether the server logs that a lock shared with a backend process was lost with that process."""
        self._verbose = verbose
        self._last_lines: deque[str] = deque(maxlen=20)
        self._starting = True
        self._load_failures: list[str] = []
        self._errors: list[str] = []
        self._lists_flags = False
        self._thread = threading.Thread(target=self._read, args=(stream,), name="hotrow-server-log", daemon=True)
        self._thread.start()

    def server_is_ready(self) -> None:
        """Show failed loads from now on; during the start they become the reason of its failure."""
        self._starting = False
        self._load_failures.clear()

    def finish(self) -> None:
        """Wait for the last lines of a server that has ended, with a time limit: its stubs may live on."""
        self._thread.join(timeout=5)

    def reason(self) -> str:
        """Why the server ended, quoted from its log."""
        self.finish()
        failures = self._load_failures or self._errors
        return "\n".join(dict.fromkeys(failures)) or "its last lines:\n" + "\n".join(self._last_lines)

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip("\n")
                if self._is_of_flags(line) and not self._verbose:
                    continue
                self._last_lines.append(line)
                self._note(line)
                if self._verbose or not self._is_noise(line):
                    # If our stderr is closed, the server's pipe still has to be emptied.
                    with contextlib.suppress(OSError, ValueError):
                        print(line, file=sys.stderr, flush=True)

    def _is_of_flags(self, line: str) -> bool:
        """Whether a line is about the flags that the server has."""
        self._lists_flags = line == _ALL_FLAGS or (self._lists_flags and not line.startswith(_BEHIND_ALL_FLAGS))
        return self._lists_flags

    def _is_noise(self, line: str) -> bool:
        if self._starting and (_LOAD_FAILURE.search(line) or "Failed to create instance" in line or self._errors):
            return True
        return any(noise in line for noise in _NOISE) or any(pattern.search(line) for pattern in (_CHOICE, _NO_STREAM))

    def _note(self, line: str) -> None:
        if self._starting and (match := _LOAD_FAILURE.search(line)):
            name, version, reason = match.groups()
            self._load_failures.append(f"model {name!r} version {version} failed to load: {_plain(reason)}")
        elif _LOST_LOCK in line:
            self.lost_lock = True
        elif line.startswith("error:"):
            self._errors.append(line.removeprefix("error: "))
        elif (signalled := _SIGNAL.match(line)) and signalled.group(1) in _CRASH_SIGNALS:
            self.crashed.set()


def _plain(reason: str) -> str:
    """A reason as the log escapes it."""
    return plain_reason(reason.replace('\\"', '"').replace("\\n", "\n"))
