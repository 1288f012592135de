"""A file that is brought up to date at the moment when a process opens it.

It uses Linux's file leases: while we hold a write lease, a process that opens the file waits until we release it. Apart
from a file system of our own, nothing else gives a reader the state at the time of its read.

Each reader gets a separate file. While the reader waits, we update its file, and put another one in its place under the
same name, leased from the start. So the file can never be opened unnoticed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path


class LeasedFile:
    """Its readers get what `content` returns at the time they open it.

    `serve` has to be called every few milliseconds. On a file system that has no leases, or is full, the content is
    that of the last call.

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
        """Let a waiting reader continue."""
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
        except OSError:  # a full disk: this reader need not wait; each later call tries again
            fcntl.fcntl(waited_for, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            raise
        os.close(waited_for)  # which ends the lease

    def close(self) -> None:
        """Stop updating the file."""
        os.close(self._handle)

    def _put_in_place(self) -> tuple[int, bool]:
        """A new file under our name: its handle, and whether it could be leased."""
        draft = self._path.with_name(f".tmp-{self._path.name}")
        handle = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            _write(handle, self._text)
            is_leased = _take_lease(handle)
        except OSError:
            os.close(handle)
            raise
        with contextlib.suppress(OSError):  # the source may have been removed
            _copy_time(self._source, draft)
        draft.replace(self._path)
        with contextlib.suppress(OSError):
            _copy_time(self._source.parent, self._path.parent)
        return handle, is_leased


def _take_lease(handle: int) -> bool:
    # Linux signals a reader: its default, SIGIO, would end our process; this signal is ignored.
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
    """Keep the times: readers that compare them must not mistake our renewals for changes."""
    modified = source.stat().st_mtime_ns
    os.utime(target, ns=(modified, modified))
