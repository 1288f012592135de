"""A version directory from anywhere becomes the next version of a model, and shares equal files with earlier ones.

Files of a version are never written to once it is in place, so that versions may share them by hard links: a version
that changes one table takes only that table's size of disk and page cache.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from inference_session.dense_engine.trial import try_to_open
from inference_session.errors import ModelFormatError
from inference_session.model_spec import (
    INDEX_FILE,
    KEY_FILE,
    NETWORK_FILES,
    TABLES_FOLDER,
    VECTOR_FILE,
    ModelSpec,
    TableSpec,
)
from inference_session.platform.drafts import check_space, draft_version
from inference_session.platform.large_pages import copy_file, open_for_writing
from inference_session.platform.progress import Progress
from inference_session.platform.user_cache import state_folder
from inference_session.tables.table_file import TableFile
from inference_session.version_directory import manifest
from inference_session.version_directory.manifest import MANIFEST_FILE, FileEntry
from inference_session.version_directory.names import state_file
from inference_session.version_directory.session_file import read_spec, write_spec
from inference_session.version_directory.verified_files import FileState, VerifiedFiles, verified_state

_CHUNK_BYTES = 4 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PublishReport:
    """The result of a publication."""

    version_dir: Path
    spec: ModelSpec
    copied_bytes: int
    shared_bytes: int
    """Bytes of files that other versions of the model have too."""


class PublishedFiles:
    """The files of a model's versions, by the checksums in their manifests."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the model's, in its repository."""
        self._folder = folder
        self._linked: dict[Path, tuple[FileState, str]] = {}
        """Links that were made and read: the state in which each was read, and its checksum."""
        self._paths: dict[tuple[str, int], list[Path]] = {}
        for version_dir in sorted(folder.glob("[1-9]*")):
            with suppress(ModelFormatError):  # a version that is being removed, or has another layout
                for entry in manifest.read_manifest(version_dir):
                    self._paths.setdefault((entry.sha256, entry.num_bytes), []).append(version_dir / entry.path)

    def find(self, entry: FileEntry) -> list[Path]:
        """The files of earlier versions that should have this content, by manifest and size; each inode once."""
        found: dict[tuple[int, int], Path] = {}
        for path in self._paths.get((entry.sha256, entry.num_bytes), ()):
            with suppress(OSError):
                state = path.lstat()
                if stat.S_ISREG(state.st_mode) and state.st_size == entry.num_bytes:
                    found.setdefault((state.st_dev, state.st_ino), path)
        return list(found.values())

    def link(self, entry: FileEntry, target: Path) -> Path | None:
        """Link an earlier version's file of this content to `target`; returns it, or None where there is none.

        Every byte of the linked file is read: it may have been damaged since its version was published. One that is
        damaged, or cannot be read, is logged and not used.
        """
        for path in self.find(entry):
            if not link_file(path, target):
                continue
            state = verified_state(target)
            try:
                checksum = manifest.sha256_of(target)
            except OSError as error:
                _log.warning("%s: not shared, because it cannot be read: %s", path, error.strerror)
            else:
                if checksum == entry.sha256:
                    self._linked[target] = state, checksum
                    return path
                _log.warning("%s: not shared, because its checksum is not the one in %s", path, MANIFEST_FILE)
            target.unlink()
        return None

    def remember_linked(self) -> None:
        """Tell the processes of this machine that serve the model which linked files are verified.

        A link changes the file's ctime, so without this the next load would read every shared file again. Where no
        process has verified files of the model before, nothing is kept.
        """
        with suppress(RuntimeError):  # no state is kept for a user without a home
            known = VerifiedFiles(state_file(state_folder(self._folder.parent), self._folder.name, "verified"))
            if known.exists:
                for path, (state, checksum) in self._linked.items():
                    if verified_state(path) == state:
                        known.add(state, checksum)
                known.save()


def publish_version(
    folder: Path,
    repository: Path,
    name: str,
    *,
    version: int | None = None,
    progress: Progress | None = None,
    complete: Callable[[Path, ModelSpec], object] | None = None,
) -> PublishReport:
    """Publish a version directory as `<repository>/<name>/<version>`: whole and verified, or not at all.

    Every byte of the folder is read once and compared with its manifest.

    Args:
        folder: in the native layout, anywhere; it is not changed.
        version: None: one above the highest that exists.
        progress: called with the bytes that have been read.
        complete: called with the draft before it appears, to add what a server needs (config.pbtxt); if it
            raises, nothing is published.

    Raises:
        ModelFormatError: names the first file that is missing, damaged or not what session.json says.
        UnsupportedModelError: a network ends the process that opens it.
        ConfigurationError: the version exists already, or the name cannot be a folder's.
        UnavailableError: the disk has too little space; or another process writes this version now.
    """
    spec = read_spec(folder)
    manifest.verify(folder, checksums=False)
    for table in spec.tables:
        _check_table(folder / TABLES_FOLDER / table.folder, table)
    entries = manifest.read_manifest(folder)
    with draft_version(repository, name, version) as (draft, version_dir):
        published = PublishedFiles(version_dir.parent)
        needed = sum(entry.num_bytes for entry in entries if not published.find(entry))
        check_space(repository, needed, "the version needs")
        linked = {entry: _take(folder, draft, entry, published, progress) for entry in entries}
        (draft / MANIFEST_FILE).write_bytes((folder / MANIFEST_FILE).read_bytes())
        _take_indexes(folder, draft, spec, linked)
        check_networks(draft, str(folder))
        if complete:
            complete(draft, spec)
        published.remember_linked()
    linked_bytes = sum(entry.num_bytes for entry, path in linked.items() if path)
    copied_bytes = sum(entry.num_bytes for entry in entries) - linked_bytes
    return PublishReport(version_dir, spec, copied_bytes, linked_bytes)


def finish_version(
    draft: Path, spec: ModelSpec, progress: Progress | None, complete: Callable[[Path, ModelSpec], object] | None
) -> None:
    """Write session.json and the manifest of a draft, and share its files with the model's other versions.

    `complete` is called between the two, to add what a server needs. Raises what `check_networks` does.
    """
    write_spec(spec, draft)
    check_networks(draft, spec.source)
    if complete:
        complete(draft, spec)
    manifest.write_manifest(draft, progress)
    share_unchanged(draft)


def share_unchanged(draft: Path) -> int:
    """Let a draft with a manifest share files with the model's other versions; returns the bytes saved."""
    published = PublishedFiles(draft.parent)
    shared_bytes = 0
    for entry in manifest.read_manifest(draft):
        path, spare = draft / entry.path, draft / ".tmp-own"
        path.rename(spare)
        if published.link(entry, path):
            spare.unlink()
            shared_bytes += entry.num_bytes
        else:
            spare.rename(path)
    published.remember_linked()
    return shared_bytes


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


def check_networks(draft: Path, source: str) -> None:
    """Refuse networks that cannot be opened, or that end the process that opens them: see `try_to_open`."""
    try_to_open([draft / name for name in NETWORK_FILES if (draft / name).exists()], source)


def _take(
    folder: Path, draft: Path, entry: FileEntry, published: PublishedFiles, progress: Progress | None
) -> Path | None:
    """Link or copy one file into the draft; returns the file of another version if it is a link to one."""
    source, target = folder / entry.path, draft / entry.path
    target.parent.mkdir(parents=True, exist_ok=True)
    shared = published.link(entry, target)
    checksum = manifest.sha256_of(source, progress) if shared else _copy(source, target, progress)
    if checksum != entry.sha256:
        raise ModelFormatError(f"{source}: damaged, its checksum is not the one in {MANIFEST_FILE}")
    return shared


def _copy(source: Path, target: Path, progress: Progress | None) -> str:
    """Copy a file; returns its checksum."""
    digest = hashlib.sha256()
    with open_for_writing(target, "xb") as copy:
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


def link_file(path: Path, target: Path) -> bool:
    """Whether the file system made the link; some lack hard links, and the links of one file are limited."""
    with suppress(OSError):
        os.link(path, target)
        return True
    return False


def _take_indexes(folder: Path, draft: Path, spec: ModelSpec, linked: Mapping[FileEntry, Path | None]) -> None:
    """Share the index of a table whose keys are shared, copy others. A damaged index is left out, and built again when
    the version is opened.
    """
    origins = {entry.path.as_posix(): path for entry, path in linked.items()}
    for table in spec.tables:
        place = Path(TABLES_FOLDER, table.folder)
        keys, target = origins.get((place / KEY_FILE).as_posix()), draft / place / INDEX_FILE
        is_linked = keys is not None and link_file(keys.with_name(INDEX_FILE), target)
        if not is_linked and target.parent.exists() and (folder / place / INDEX_FILE).exists():
            copy_file(folder / place / INDEX_FILE, target)
        if target.exists() and not _is_good_index(target, table):
            target.unlink()


def _is_good_index(path: Path, table: TableSpec) -> bool:
    """Whether the file is an undamaged index of the `key` file next to it."""
    try:
        TableFile.open(path.parent, table, must_have_index=True, verify_index=True).close()
    except ModelFormatError as error:
        _log.warning("the index is not published; it will be built when the version is opened: %s", error)
        return False
    return True
