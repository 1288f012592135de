"""Locks on files and folders, between processes. They end with the process, however that ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Lock a file or folder that exists, after all processes that have locked it before.

    `on_wait` is called first if one of them has the lock now. It may be a process that was stopped.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not try_lock(handle):
            on_wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)  # processes that were forked meanwhile have the handle as well
    finally:
        os.close(handle)


def try_lock(handle: int) -> bool:
    """Lock an open file or folder until it is closed, unless another process has locked it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
