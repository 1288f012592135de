"""Reads and writes small files whole.

What lies in the place of a file to be read may be a pipe or a device, whose reader would never end.
"""

from __future__ import annotations

import errno
import os
import secrets
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


def write_whole(path: Path, *parts: bytes, mode: int = 0o666, draft_in: Path | None = None) -> None:
    """Write a file and flush it to the disk, then rename it into place; a file that was there stays where that fails.

    Args:
        parts: the content, one after the other.
        mode: permissions of the file, less those that the process withholds.
        draft_in: a folder of the same file system, where a process that is killed leaves the half; None: the file's.

    Raises:
        OSError: with the name of the file.
    """
    # Several threads may write the same file, and processes of one number in several containers: each renames its own.
    draft = (draft_in or path.parent) / f".tmp-{secrets.token_hex(8)}-{path.name}"
    try:
        draft.unlink(missing_ok=True)
        # Where others may write to the folder, a link of theirs must not be followed.
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        draft.unlink(missing_ok=True)


def write_chosen(path: Path, content: bytes) -> None:
    """Write a file that a user has named, as `write_whole` does; a link is followed, and a pipe written into."""
    target = path.resolve()
    if target.exists() and not target.is_file():
        target.write_bytes(content)
    else:
        write_whole(target, content)


def why_unreadable(error: Exception) -> str:
    """The reason in an error of reading or parsing a file, without the file's name: the caller says that."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
