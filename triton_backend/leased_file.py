"""A file that is brought up to date at the moment when somebody opens it.

Linux lends files: while we hold a write lease, whoever opens the file is made to wait until we give it up. Nothing else
makes a reader see what is true at the time of his reading, other than being the file system.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path


class LeasedFile:
    """Its readers get what `content` gives when they open it.

    `serve` has to be called every few milliseconds. On a file system that lends no files the content is what it was at
    the last call. A reader who comes before the lease could be taken again after the last one, the same.
    """

    def __init__(self, path: Path, content: Callable[[], str]) -> None:
        self._content = content
        self._written = ""
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._write()
        self._is_leased = self._take_lease()
        self._can_be_leased = self._is_leased

    def serve(self) -> None:
        """Let a reader in who waits."""
        if not self._is_leased:
            self._is_leased = self._can_be_leased and self._take_lease()
            if not self._can_be_leased:
                self._write()
        elif fcntl.fcntl(self._handle, fcntl.F_GETLEASE) != fcntl.F_WRLCK:
            self._write()
            self._give_up_lease()

    def close(self) -> None:
        """Leave the file as it is."""
        os.close(self._handle)

    def _take_lease(self) -> bool:
        # The signal by which Linux tells of a reader: SIGIO would end us, this one is ignored. To be said every time.
        fcntl.fcntl(self._handle, fcntl.F_SETSIG, signal.SIGURG)
        with contextlib.suppress(OSError):  # somebody reads it just now, or the file system lends no files
            fcntl.fcntl(self._handle, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            return True
        return False

    def _give_up_lease(self) -> None:
        fcntl.fcntl(self._handle, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        self._is_leased = False

    def _write(self) -> None:
        text = self._content()
        if text != self._written:
            content = text.encode()
            os.pwrite(self._handle, content, 0)
            os.ftruncate(self._handle, len(content))
            self._written = text
