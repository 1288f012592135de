"""Where hotrow keeps what it can rebuild: imports of HugeCTR's files, and state that helps the next process start."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inference_session.errors import ConfigurationError


def user_cache_folder() -> Path:
    """`hotrow` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotrow"


def cache_folder() -> Path:
    """`HOTROW_CACHE_DIR`, else `hotrow` in the user's cache folder."""
    chosen = os.environ.get("HOTROW_CACHE_DIR")
    return Path(chosen) if chosen else user_cache_folder()


def state_folder(repository: Path) -> Path:
    """What processes that serve a model repository leave for each other, below `cache_folder()`.

    RuntimeError where no variable names a folder, and the user has no home.
    """
    folder = repository.resolve()
    # As bytes: Triton's Python processes cannot decode other characters than ASCII.
    readable = os.fsencode(folder.name).decode("ascii", errors="ignore")
    name = f"{readable}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}"
    return cache_folder() / "state" / name


def hashed_name(text: str, length: int = 32) -> str:
    """A name in hexadecimal of an entry that is kept for a text."""
    encoded = text.encode(errors="surrogateescape")  # a path that Triton's Python process could not decode
    return hashlib.sha256(encoded).hexdigest()[:length]


def least_recent_first(folder: Path) -> list[Path]:
    """The folders in a folder, the most recently used one last: a user sets an entry's time."""
    return sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime_ns)


def make_private(folder: Path) -> Path:
    """Make a folder, and those above it that are missing, which no other user may enter, whatever the umask allows.

    A folder that exists stays as it is. Returns the folder; OSError where it cannot be made.
    """
    for path in reversed((folder, *folder.parents)):
        if not path.exists():
            path.mkdir(0o700, exist_ok=True)
    return folder


@contextmanager
def lock_file(folder: Path) -> Iterator[int]:
    """A file in the folder, which is made, for flock; never removed, so that all lock the same one.

    Raises:
        ConfigurationError: the folder cannot be written.
    """
    try:
        handle = os.open(make_private(folder) / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigurationError(
            f"{folder}: files cannot be written there ({error.strerror}); set HOTROW_CACHE_DIR to a writable folder"
        ) from error
    try:
        yield handle
    finally:
        os.close(handle)
