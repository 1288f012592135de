"""Refuses what a disk has no room for before anything is written: a large copy would fail at its end."""

from __future__ import annotations

import shutil
from pathlib import Path

from inference_session.errors import UnavailableError


def check_space(folder: Path, num_bytes: int, what: str) -> None:
    """Raise UnavailableError where a folder's disk has no room for `what`, such as `the tables need`, which so many
    bytes follow. Others may take the room later.
    """
    usage = shutil.disk_usage(folder)
    if usage.total and num_bytes > usage.free:  # some file systems do not tell
        raise UnavailableError(f"{folder}: {what} {num_bytes} bytes, but only {usage.free} are free")
