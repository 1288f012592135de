"""Writes a file whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, *parts: bytes, mode: int = 0o666) -> None:
    """Write a file and flush it to the disk, then rename it into place; a file that was there stays where that fails.

    Args:
        parts: the content, one after the other.
        mode: permissions of the file, less those that the process withholds.

    Raises:
        OSError: with the name of the file.
    """
    # Several threads may write the same file, and processes of one number in several containers: each renames its own.
    staged = path.with_name(f".tmp-{secrets.token_hex(8)}-{path.name}")
    try:
        staged.unlink(missing_ok=True)
        # Where others may write to the folder, a link of theirs must not be followed.
        with os.fdopen(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        staged.unlink(missing_ok=True)
