"""Reads small files whole. What lies in the place of one may be a pipe or a device, whose reader would never end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_regular_file(path: Path, *, max_bytes: int | None = None) -> bytes:
    """The content of a file.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger than `max_bytes`.
    """
    with open(path, "rb", opener=open_at_once) as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if max_bytes is not None and state.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"{state.st_size} bytes, more than the {max_bytes} that are allowed", str(path))
        return file.read()


def open_at_once(path: str, flags: int) -> int:
    """An opener for `open` that does not wait for the writer of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
