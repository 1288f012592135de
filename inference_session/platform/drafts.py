"""Version directories appear whole or not at all: written as `.tmp-<version>`, flushed, renamed when complete."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from inference_session.errors import ConfigurationError, UnavailableError
from inference_session.platform.file_locks import try_lock

MAX_VERSION = 2**63 - 1
"""The highest version number that Triton can read."""
_SERVER_FILE = "config.pbtxt"
"""What importers add to a new model's folder before the version appears."""
ABANDONED_S = 60.0
"""Seconds without a change after which a folder that no process holds counts as abandoned, where several make them."""
ABANDONED_VERSION_S = 3600.0
"""The same for a draft. On network file systems the locks of other machines may be invisible."""

_MODEL_NAME = re.compile(r"(?!\.)[A-Za-z0-9.+@%,=_-]+")
"""Triton starts the process of a model through a shell, which would misread other characters."""


@contextmanager
def draft_version(repository: Path, model: str, version: int | None = None) -> Iterator[tuple[Path, Path]]:
    """Yield an empty folder to write a version into, and what it becomes: `<repository>/<model>/<version>`.

    Without `version` it is the one after the highest, 1 in an empty folder. After an error nothing is left. What
    killed writers left of this version is replaced, and what they left of others an hour ago is removed; a writer that
    is still at work is not disturbed.

    Raises:
        ConfigurationError: the version exists already, or the names cannot be folders.
        UnavailableError: another process is writing this version.
        OSError: the file system does not take it; `filename` is set.
    """
    folder = repository / model
    if not _MODEL_NAME.fullmatch(model):
        raise ConfigurationError(
            f"{model!r} cannot be the name of a model, which is also that of its folder; allowed: ASCII letters, "
            "digits and any of .+@%,=_-, but no '.' in front"
        )
    if version is not None:
        _check_number(folder, version)
    made = [path for path in (folder, repository) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    if version is None:
        version = next_version(folder)
    target = folder / str(version)
    _refuse_existing(target)
    try:
        with draft_folder(target) as draft:
            remove_abandoned(folder, r"\.tmp-[0-9]+", abandoned_s=ABANDONED_VERSION_S)
            yield draft, target
    except BaseException:
        _discard(folder, made)
        raise


def _discard(folder: Path, made: Sequence[Path]) -> None:
    """Remove those folders that this process made, unless others have put something there."""
    with suppress(OSError):
        if folder in made and {path.name for path in folder.iterdir()} == {_SERVER_FILE}:
            (folder / _SERVER_FILE).unlink()
        for path in made:
            path.rmdir()


@contextmanager
def draft_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `target` when all went well; after an error nothing is left.

    Raises:
        ConfigurationError: the target exists.
        UnavailableError: another process is writing it.
        OSError: the file system does not take it; `filename` is set.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.parent / f".tmp-{target.name}"
    with _locked_folder(draft):
        try:
            yield draft
            flush_tree(draft)
            _refuse_existing(target)
            draft.rename(target)
            flush(target.parent)
        except BaseException as error:
            shutil.rmtree(draft, ignore_errors=True)
            if isinstance(error, OSError) and error.errno and not error.filename:
                error.filename = str(target)  # the error of a full disk does not name the folder
            raise


@contextmanager
def working_folder(parent: Path, prefix: str, *, abandoned_s: float = 0.0) -> Iterator[Path]:
    """Yield a new folder below `parent`, named by a prefix; it is removed at the end.

    Folders of that prefix that killed processes left are removed first, if they have not changed for `abandoned_s`.
    """
    remove_abandoned(parent, rf"{re.escape(prefix)}\w+", abandoned_s=abandoned_s)
    folder, handle = _new_folder(parent, prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _new_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """A folder, and the handle that locks it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another process took it for an abandoned one before it was opened
            continue
        with suppress(OSError):  # a file system without locks: no process can mistake the folder for an abandoned one
            fcntl.flock(handle, fcntl.LOCK_EX)
        if folder.exists():
            return folder, handle
        os.close(handle)  # … before it was locked


def remove_abandoned(parent: Path, pattern: str, *, abandoned_s: float = 0.0) -> None:
    """Remove the folders that killed writers left: no process holds them.

    Args:
        parent: the folder where they are.
        pattern: a regular expression of their whole names.
        abandoned_s: how long a folder, and all in it, must not have changed, in seconds.
    """
    for folder in [path for path in parent.iterdir() if re.fullmatch(pattern, path.name)]:
        with suppress(OSError):  # of another user, not a folder, or gone
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if time.time() - _last_change(folder) >= abandoned_s and try_lock(handle):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def _last_change(folder: Path) -> float:
    """When a folder or anything in it was last written, in seconds as `time.time()`."""
    return max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))


def next_version(folder: Path) -> int:
    """The version after the highest one in a model's folder; ConfigurationError where that one is the last."""
    version = max(numbers_in(folder), default=0) + 1
    _check_number(folder, version)
    return version


def numbers_in(folder: Path) -> list[int]:
    """The numbers that versions have in a model's folder, also those that Triton does not read, in any order."""
    return [int(path.name) for path in folder.iterdir() if re.fullmatch("[0-9]+", path.name)]


def _check_number(folder: Path, version: int) -> None:
    if not 0 < version <= MAX_VERSION:
        raise ConfigurationError(
            f"{folder}: version {version} is not allowed; versions are whole numbers from 1 to {MAX_VERSION}"
        )


def _refuse_existing(target: Path) -> None:
    if target.exists():
        raise ConfigurationError(f"{target}: already exists; choose another version")


@contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Hold an empty folder that no other process writes into."""
    with hold_folder(folder):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        yield


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Make a folder if needed, and keep out others that hold it. The lock ends with the process, however it ends.

    Raises:
        UnavailableError: another process holds it, or another thread.
        OSError: the file system does not take it, or has no locks. An empty folder is removed then.
    """
    with ExitStack() as opened:
        try:
            handle = _opened_folder(folder)
            opened.callback(os.close, handle)
            is_ours = try_lock(handle) and _is_same(folder, handle)
        except OSError:
            with suppress(OSError):  # it may hold what an earlier writer left
                folder.rmdir()
            raise
        if not is_ours:
            raise _written_by_another(folder)
        yield


def _opened_folder(folder: Path) -> int:
    """A handle on a folder, which is made if needed; UnavailableError where its holder renames it meanwhile."""
    try:
        folder.mkdir(exist_ok=True)
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileExistsError, FileNotFoundError) as error:
        if folder.is_dir() or not os.path.lexists(folder):
            raise _written_by_another(folder) from error
        raise


def _written_by_another(folder: Path) -> UnavailableError:
    return UnavailableError(f"{folder}: another process is writing this version now")


def _is_same(folder: Path, handle: int) -> bool:
    """Whether the name still refers to the opened folder: its holder may have renamed it before we got the lock."""
    with suppress(FileNotFoundError):
        return folder.stat().st_ino == os.fstat(handle).st_ino
    return False


def flush_tree(path: Path) -> None:
    """Flush a file, or a folder and all below it, to the disk: after a crash of the machine, a renamed folder must hold
    its files.
    """
    for item in (*(path.rglob("*") if path.is_dir() else ()), path):
        flush(item)


def flush(path: Path) -> None:
    """Flush a file, or a folder's own entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def exchange(one: Path, other: Path) -> bool:
    """Swap two files or folders atomically; False: this file system or kernel does not support it."""
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(ctypes.CDLL(None).renameat2(here, os.fsencode(one), here, os.fsencode(other), swap) == 0)


def check_space(folder: Path, num_bytes: int, what: str) -> None:
    """Raise UnavailableError where a folder's disk has no room for `what`, such as `the tables need`, which so many
    bytes follow. Others may take the room later.
    """
    usage = shutil.disk_usage(folder)
    if usage.total and num_bytes > usage.free:  # some file systems do not tell
        raise UnavailableError(f"{folder}: {what} {num_bytes} bytes, but only {usage.free} are free")
