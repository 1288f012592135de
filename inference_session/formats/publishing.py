"""A version directory from anywhere becomes the next version of a model, sharing with earlier ones what is the same.

Files of a version are never written to once it is in place, so that versions may share them by hard links: a version
that changes one table costs the disk, and the page cache, that table.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from inference_session.dense_engine import OnnxEngine
from inference_session.errors import ModelFormatError, UnavailableError
from inference_session.formats import manifest
from inference_session.formats.manifest import MANIFEST_FILE, FileEntry, Progress
from inference_session.formats.native import (
    DENSE_FILE,
    INDEX_FILE,
    KEY_FILE,
    KEYS_FILE,
    SESSION_FILE,
    TABLES_FOLDER,
    VECTOR_FILE,
    ModelSpec,
    TableSpec,
)
from inference_session.formats.staging import stage_version

_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class PublishReport:
    """What has been published."""

    version_dir: Path
    spec: ModelSpec
    copied_bytes: int
    shared_bytes: int
    """Of files that other versions of the model have too."""


class PublishedFiles:
    """The files of a model's versions, by what their manifests say is in them."""

    def __init__(self, folder: Path) -> None:
        self._paths: dict[tuple[str, int], Path] = {}
        for version_dir in sorted(folder.glob("[1-9]*")):
            with suppress(ModelFormatError):  # one that is being removed, or not of our layout
                for entry in manifest.read_manifest(version_dir):
                    self._paths[entry.sha256, entry.num_bytes] = version_dir / entry.path

    def find(self, entry: FileEntry) -> Path | None:
        """A file of an earlier version with this content, by its manifest and its size."""
        path = self._paths.get((entry.sha256, entry.num_bytes))
        with suppress(OSError):
            if path is not None and path.stat().st_size == entry.num_bytes:
                return path
        return None


def publish_version(
    folder: Path,
    repository: Path,
    name: str,
    *,
    version: int | None = None,
    progress: Progress | None = None,
    complete: Callable[[Path, ModelSpec], None] | None = None,
) -> PublishReport:
    """Publish a version directory as `<repository>/<name>/<version>`: whole and verified, or not at all.

    Every byte of the folder is read once and compared with its manifest.

    Args:
        folder: in the native layout, anywhere; it stays as it is.
        version: one above the highest there is if None.
        progress: told the bytes that have been read.
        complete: called with the staged version before it appears, to add what a server needs (config.pbtxt); if it
            raises, nothing is published.

    Raises:
        ModelFormatError: names the first file that is missing, damaged or not what session.json says.
        ConfigurationError: the version exists already, or the name cannot be a folder's.
        UnavailableError: the disk has too little space; or another process writes this version now.
    """
    spec = ModelSpec.read(folder)
    manifest.verify(folder, checksums=False)
    for table in spec.tables:
        _check_table(folder / TABLES_FOLDER / table.folder, table)
    entries = manifest.read_manifest(folder)
    _check_listed(folder, entries, spec)
    with stage_version(repository, name, version) as (staging, version_dir):
        published = PublishedFiles(version_dir.parent)
        shared = {entry: path for entry in entries if (path := published.find(entry))}
        _check_space(repository, sum(entry.num_bytes for entry in entries if entry not in shared))
        linked_bytes = sum(_take(folder, staging, entry, shared.get(entry), progress) for entry in entries)
        shutil.copyfile(folder / MANIFEST_FILE, staging / MANIFEST_FILE)
        _take_indexes(folder, staging, spec, {entry.path.as_posix(): path for entry, path in shared.items()})
        _check_networks(staging)
        if complete:
            complete(staging, spec)
    copied_bytes = sum(entry.num_bytes for entry in entries) - linked_bytes
    return PublishReport(version_dir, spec, copied_bytes, linked_bytes)


def share_unchanged(staging: Path) -> int:
    """Let a staged version, its manifest written, share files with the versions beside it; returns the bytes saved."""
    published = PublishedFiles(staging.parent)
    shared_bytes = 0
    for entry in manifest.read_manifest(staging):
        path, spare = published.find(entry), staging / ".tmp-link"
        if path is not None and _link(path, spare):
            spare.replace(staging / entry.path)
            spare.unlink(missing_ok=True)  # replacing a file by itself does nothing
            shared_bytes += entry.num_bytes
    return shared_bytes


def _check_listed(folder: Path, entries: tuple[FileEntry, ...], spec: ModelSpec) -> None:
    """ModelFormatError where the manifest leaves out a file that is there and needed: it would be left behind."""
    tables = [f"{TABLES_FOLDER}/{table.folder}/{name}" for table in spec.tables for name in (KEY_FILE, VECTOR_FILE)]
    listed = {entry.path.as_posix() for entry in entries}
    for name in (SESSION_FILE, DENSE_FILE, KEYS_FILE, *tables):
        if (folder / name).exists() and name not in listed:
            raise ModelFormatError(f"{folder / MANIFEST_FILE}: does not list {name}, which is there")


def _check_table(folder: Path, table: TableSpec) -> None:
    """ModelFormatError unless the files have the sizes that session.json says; a table may be in a store alone."""
    sizes = {VECTOR_FILE: table.num_rows * table.row_bytes}
    if table.keys == "stored":
        sizes[KEY_FILE] = table.num_rows * 8
    for name, num_bytes in sizes.items():
        path = folder / name
        if path.exists() and path.stat().st_size != num_bytes:
            raise ModelFormatError(
                f"{path}: {path.stat().st_size} bytes, but session.json says {table.num_rows} rows of "
                f"{table.embedding_dim} x {table.dtype}, {num_bytes} bytes"
            )


def _check_space(repository: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(repository).free
    if num_bytes > free:
        raise UnavailableError(f"{repository}: the version takes {num_bytes} bytes more, but {free} are free")


def _check_networks(staging: Path) -> None:
    """ModelFormatError where ONNX Runtime does not take a network."""
    for name in (DENSE_FILE, KEYS_FILE):
        if (staging / name).exists():
            OnnxEngine(staging / name, num_threads=1).close()


def _take(folder: Path, staging: Path, entry: FileEntry, same: Path | None, progress: Progress | None) -> int:
    """Bring one file into the staged version; returns the bytes that are shared with another version."""
    source, target = folder / entry.path, staging / entry.path
    target.parent.mkdir(parents=True, exist_ok=True)
    if same is not None and _link(same, target):
        checksum, linked_bytes = manifest.sha256_of(source, progress), entry.num_bytes
    else:
        checksum, linked_bytes = _copy(source, target, progress), 0
    if checksum != entry.sha256:
        raise ModelFormatError(f"{source}: damaged, its checksum is not the one in {MANIFEST_FILE}")
    return linked_bytes


def _copy(source: Path, target: Path, progress: Progress | None) -> str:
    """Copy a file; returns its checksum."""
    digest = hashlib.sha256()
    with target.open("xb") as copy:
        for chunk in _chunks(source):
            digest.update(chunk)
            copy.write(chunk)
            if progress:
                progress(len(chunk))
    return digest.hexdigest()


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _link(path: Path, target: Path) -> bool:
    """Whether the file system could do it; some have no hard links, and a file only so many."""
    with suppress(OSError):
        os.link(path, target)
        return True
    return False


def _take_indexes(folder: Path, staging: Path, spec: ModelSpec, shared: dict[str, Path]) -> None:
    """Share the index of a table whose keys are shared, copy others: it is rebuilt where it does not fit its keys."""
    for table in spec.tables:
        place = Path(TABLES_FOLDER, table.folder)
        keys, target = shared.get((place / KEY_FILE).as_posix()), staging / place / INDEX_FILE
        if keys is not None and _link(keys.with_name(INDEX_FILE), target):
            continue
        if target.parent.exists() and (folder / place / INDEX_FILE).exists():
            shutil.copyfile(folder / place / INDEX_FILE, target)
