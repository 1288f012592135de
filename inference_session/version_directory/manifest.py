"""MANIFEST.json: size and SHA-256 of every file of a version directory, so that damage is found before it is served.

`tables/*/index` is left out: it can be rebuilt from `key` at any time and carries its own checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from inference_session.errors import ModelFormatError
from inference_session.model_spec import (
    INDEX_FILE,
    KEY_FILE,
    NETWORK_FILES,
    SESSION_FILE,
    TABLES_FOLDER,
    VECTOR_FILE,
    ModelSpec,
)
from inference_session.platform.daemon_threads import DaemonThreads
from inference_session.platform.json_records import MAX_JSON_BYTES, parse_json
from inference_session.platform.memory import read_ahead
from inference_session.platform.pacing import yield_to_others
from inference_session.platform.progress import Progress
from inference_session.platform.small_files import read_regular_file, why_unreadable
from inference_session.version_directory.external_data import external_files
from inference_session.version_directory.session_file import write_spec
from inference_session.version_directory.verified_files import FileState, VerifiedFiles, file_state, verified_state

MANIFEST_FILE = "MANIFEST.json"
FORMAT = 1
_CHUNK_BYTES = 4 << 20
_MAX_READERS = min(32, (os.cpu_count() or 1) + 4)
"""Files that are read at a time."""


@dataclass(frozen=True)
class FileEntry:
    """The manifest's entry for one file."""

    path: PurePosixPath
    """Relative to the version directory."""
    num_bytes: int
    sha256: str


def write_manifest(
    directory: Path, progress: Progress | None = None, *, known: Mapping[str, str] | None = None
) -> None:
    """Write MANIFEST.json for the files of a draft.

    Args:
        progress: called with the bytes that are read for their checksums.
        known: SHA-256 of files, by path relative to the directory, where its writer computed it: these are not read.
    """
    files = [path for path in sorted(directory.rglob("*")) if path.is_file() and _is_listed(path, directory)]
    names = {path.relative_to(directory).as_posix(): path for path in files}
    checksums = dict(known or {})
    unread = [name for name in names if name not in checksums]
    with _readers(len(unread)) as threads:
        read = threads.map(lambda name: sha256_of(names[name], progress), unread)
        checksums.update(zip(unread, read, strict=True))
    entries = {name: {"bytes": path.stat().st_size, "sha256": checksums[name]} for name, path in names.items()}
    text = json.dumps({"format": FORMAT, "files": entries}, indent=1, ensure_ascii=False)
    (directory / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")


def describe_version(
    spec: ModelSpec, directory: Path, progress: Progress | None = None, *, known: Mapping[str, str] | None = None
) -> None:
    """Write session.json and MANIFEST.json when all other files are there; arguments as of `write_manifest`."""
    write_spec(spec, directory)
    write_manifest(directory, progress, known=known)


def read_manifest(directory: Path) -> tuple[FileEntry, ...]:
    """The entries of MANIFEST.json; ModelFormatError where it is missing or not a manifest."""
    path = directory / MANIFEST_FILE
    try:
        content = read_regular_file(path, max_bytes=MAX_JSON_BYTES)
    except FileNotFoundError as error:
        raise ModelFormatError(f"{path}: no such file; the version is incomplete or not in hotrow's layout") from error
    except OSError as error:
        raise ModelFormatError(f"{path}: not readable: {why_unreadable(error)}") from error
    return parse_manifest(str(path), content)


def parse_manifest(name: str, content: bytes) -> tuple[FileEntry, ...]:
    """The entries of a manifest that has been read; `name` is for messages."""
    try:
        document = parse_json(content)
    except ValueError as error:
        raise ModelFormatError(f"{name}: not readable as JSON: {error}") from error
    try:
        found = document["format"]
        entries = tuple(_entry(path, value) for path, value in document["files"].items()) if found == FORMAT else ()
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ModelFormatError(f"{name}: not a manifest ({error!r})") from error
    if found != FORMAT:
        raise ModelFormatError(f"{name}: format {found!r}, but this version of hotrow reads format {FORMAT}")
    return entries


def verify(
    directory: Path,
    *,
    checksums: bool,
    absent: frozenset[str] = frozenset(),
    known: VerifiedFiles | None = None,
    progress: Progress | None = None,
) -> None:
    """Check the files of a version directory against its manifest, which must list all files of a version.

    No file may lead out of the directory, by a symbolic link or as external data of a network.

    Args:
        checksums: read every byte, rather than look at sizes alone.
        known: files that need not be read again; those that are read now are added.
        absent: first path components that may be missing as a whole (`tables`, where a store holds the rows).

    Raises:
        ModelFormatError: names the first file that is missing, not listed, elsewhere, of the wrong size or damaged.
    """
    entries = read_manifest(directory)
    present = [entry for entry in entries if _check_size(directory, entry, absent)]
    if checksums:
        with _readers(len(present), yield_to_others) as threads:
            for _ in threads.map(partial(_check_sum, directory, known=known, progress=progress), present):
                pass
    _check_listed(directory, {entry.path for entry in entries})


def _readers(num_files: int, initializer: Callable[[], object] | None = None) -> DaemonThreads:
    """Threads that read files, of which one may take minutes."""
    return DaemonThreads(min(num_files, _MAX_READERS), initializer)


def file_states(directory: Path) -> tuple[FileState, ...]:
    """The identity of the present file of each entry, the manifest itself first: unequal if any file was replaced."""
    paths = [directory / MANIFEST_FILE, *(directory / entry.path for entry in read_manifest(directory))]
    return tuple(file_state(path) for path in paths)


def _check_size(directory: Path, entry: FileEntry, absent: frozenset[str]) -> bool:
    """Whether the file can be read; raises where it should exist and does not."""
    path = directory / entry.path
    try:
        state = path.stat()
        is_inside = path.resolve().is_relative_to(directory.resolve())
    except FileNotFoundError as error:
        top = entry.path.parts[0]
        if top in absent and not (directory / top).exists():
            return False
        raise ModelFormatError(f"{path}: no such file, although {MANIFEST_FILE} lists it") from error
    except (OSError, ValueError) as error:  # a ValueError where the name holds a zero byte
        raise ModelFormatError(f"{str(path)!r}, which {MANIFEST_FILE} lists, cannot be read: {error}") from error
    if not is_inside or not stat.S_ISREG(state.st_mode):
        found = "a link to a file outside its version" if not is_inside else "not a regular file"
        raise ModelFormatError(f"{path}: {found}; replace it with a copy of the file")
    if state.st_size != entry.num_bytes:
        raise ModelFormatError(f"{path}: {state.st_size} bytes, {MANIFEST_FILE} says {entry.num_bytes}")
    return True


def _check_listed(directory: Path, listed: set[PurePosixPath]) -> None:
    """ModelFormatError where the manifest omits a file that is read: its damage would not be noticed."""
    if not listed:
        raise ModelFormatError(
            f"{directory / MANIFEST_FILE}: it lists no files, so it is not the manifest of a version"
        )
    networks = [name for name in NETWORK_FILES if (directory / name).exists()]
    external = [path for name in networks for path in external_files(directory / name)]
    tables = [path for name in (KEY_FILE, VECTOR_FILE) for path in directory.glob(f"{TABLES_FOLDER}/*/{name}")]
    session = [SESSION_FILE] if (directory / SESSION_FILE).exists() else []
    needed = [*map(PurePosixPath, (*session, *networks)), *external]
    for path in (*needed, *(PurePosixPath(path.relative_to(directory)) for path in tables)):
        if path not in listed:
            raise ModelFormatError(f"{directory / MANIFEST_FILE}: does not list {path}, which hotrow also reads")


def _check_sum(directory: Path, entry: FileEntry, known: VerifiedFiles | None, progress: Progress | None) -> None:
    path = directory / entry.path
    state = verified_state(path)
    if known is not None and known.holds(state, entry.sha256):
        return
    if sha256_of(path, progress) != entry.sha256:
        raise ModelFormatError(f"{path}: damaged, its checksum is not the one in {MANIFEST_FILE}")
    if known is not None and state == verified_state(path):
        known.add(state, entry.sha256)


def _is_listed(path: Path, directory: Path) -> bool:
    parts = path.relative_to(directory).parts
    return parts != (MANIFEST_FILE,) and not (parts[0] == TABLES_FOLDER and parts[-1].startswith(INDEX_FILE))


def _entry(name: str, value: dict[str, Any]) -> FileEntry:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{name!r} is not a path inside the version directory")
    return FileEntry(path, int(value["bytes"]), str(value["sha256"]))


def sha256_of(path: Path, progress: Progress | None = None) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        read_ahead(file, _CHUNK_BYTES)
        while num_bytes := file.readinto(buffer):
            digest.update(buffer[:num_bytes])
            if progress:
                progress(num_bytes)
            read_ahead(file, _CHUNK_BYTES)
    return digest.hexdigest()
