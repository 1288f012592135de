"""The folder in which RocksDB keeps a reader's own log, below the machine's temporary folder.

A process that is killed leaves its folder behind. The next reader removes it. It recognises it by the lock that each
process holds on its folder; the lock ends with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "hotrow-rocksdb-reader-"


class ReaderFolder:
    """An empty folder of this process; a context manager."""

    def __init__(self) -> None:
        """Make and lock it, and remove those of processes that have ended."""
        _remove_abandoned()
        self.path, self._handle = _make()

    def close(self) -> None:
        """Remove it. May be called more than once."""
        if self._handle is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> ReaderFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _make() -> tuple[Path, int | None]:
    """A new folder, and the handle that locks it."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # removed by another reader before it was opened
            continue
        with suppress(OSError):  # a file system without locks: no reader can mistake the folder for an abandoned one
            fcntl.flock(handle, fcntl.LOCK_EX)
        if path.exists():
            return path, handle
        os.close(handle)  # removed by another reader before it was locked


def _remove_abandoned() -> None:
    """Folders of other users, or that are just being removed by another process, are left to them."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(handle)
