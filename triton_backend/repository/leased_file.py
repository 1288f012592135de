"""A file that is brought up to date at the moment when somebody opens it.

Linux lends files: while we hold a write lease, whoever opens the file is made to wait until we give it up. Nothing else
makes a reader see what is true at the time of his reading, other than being the file system.

Each reader gets a file of his own. While he waits, his is brought up to date, and another one takes its place under the
same name, leased from the start: so there is no moment at which one could be opened unnoticed.
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

    `serve` has to be called every few milliseconds. On a file system that lends no files, or is full, the content is
    what it was at the last call.

    Args:
        source: what the content is made from; its times of modification, and its folder's, are shown as the file's.
    """

    def __init__(self, path: Path, source: Path, content: Callable[[], str]) -> None:
        self._path = path
        self._source = source
        self._content = content
        self._text = content()
        self._handle, self._is_leased = self._put_in_place()

    def serve(self) -> None:
        """Let a reader in who waits."""
        if self._is_leased and fcntl.fcntl(self._handle, fcntl.F_GETLEASE) == fcntl.F_WRLCK:
            return
        text = self._content()
        if not self._is_leased and text == self._text:
            return
        self._text = text
        waited_for = self._handle
        _write(waited_for, text)
        try:
            self._handle, self._is_leased = self._put_in_place()
        except OSError:  # a full disk: he need not wait for that, and for those after him it is tried at each call
            fcntl.fcntl(waited_for, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            raise
        os.close(waited_for)  # which ends the lease

    def close(self) -> None:
        """Leave the file as it is."""
        os.close(self._handle)

    def _put_in_place(self) -> tuple[int, bool]:
        """A new file under our name: its handle, and whether it could be leased."""
        staged = self._path.with_name(f".tmp-{self._path.name}")
        handle = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            _write(handle, self._text)
            is_leased = _take_lease(handle)
        except OSError:
            os.close(handle)
            raise
        with contextlib.suppress(OSError):  # the source may be gone
            _copy_time(self._source, staged)
        staged.replace(self._path)
        with contextlib.suppress(OSError):
            _copy_time(self._source.parent, self._path.parent)
        return handle, is_leased


def _take_lease(handle: int) -> bool:
    # The signal by which Linux tells of a reader: SIGIO would end us, this one is ignored.
    fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)
    with contextlib.suppress(OSError):
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        return True
    return False


def _write(handle: int, text: str) -> None:
    content = text.encode()
    os.pwrite(handle, content, 0)
    os.ftruncate(handle, len(content))


def _copy_time(source: Path, target: Path) -> None:
    """Readers that compare times must not take our renewals for changes."""
    modified = source.stat().st_mtime_ns
    os.utime(target, ns=(modified, modified))
