"""The content of a source at one moment, and what its manifests promise."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

from inference_session.errors import ModelFormatError
from inference_session.model_source.base import Entry, ModelSource
from inference_session.version_directory.manifest import MANIFEST_FILE, FileEntry, parse_manifest

_MAX_MANIFEST_BYTES = 64 << 20


@dataclass(frozen=True)
class Inventory:
    """All files and folders below the root of a source, or its single file."""

    entries: tuple[Entry, ...]
    """Sorted by path; a single file has an empty one."""
    checksums: dict[str, str]
    """SHA-256 by path, of the files that a manifest lists."""

    @classmethod
    def of(cls, source: ModelSource) -> Inventory:
        """Record the state of a source.

        Raises:
            ModelFormatError: it does not match a manifest in it.
            OSError, UnavailableError: it cannot be read.
        """
        entries = tuple(source.entries())
        sizes = {entry.path: entry.num_bytes for entry in entries}
        checksums: dict[str, str] = {}
        for entry in entries:
            if posixpath.basename(entry.path) == MANIFEST_FILE and not entry.is_folder:
                checksums.update(_promised(source, entry, sizes))
        return cls(entries, checksums)

    @property
    def files(self) -> list[Entry]:
        """The files."""
        return [entry for entry in self.entries if not entry.is_folder]

    @property
    def folders(self) -> list[str]:
        """Paths of the folders, the root included; none for a single file."""
        if any(not entry.path for entry in self.entries):
            return []
        return ["", *(entry.path for entry in self.entries if entry.is_folder)]

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(entry.num_bytes for entry in self.entries)

    def states(self) -> dict[str, list[int | str]]:
        """By path, values that distinguish two states of a file, as JSON returns them."""
        return {entry.path: [entry.num_bytes, entry.stamp] for entry in self.files}


def _promised(source: ModelSource, manifest: Entry, sizes: dict[str, int]) -> dict[str, str]:
    name = source.name_of(manifest.path)
    if manifest.num_bytes > _MAX_MANIFEST_BYTES:
        raise ModelFormatError(f"{name}: {manifest.num_bytes} bytes; the manifest is too large")
    folder = posixpath.dirname(manifest.path)
    listed = parse_manifest(name, source.read(manifest.path, 0, manifest.num_bytes))
    return {path: item.sha256 for item in listed if (path := _present(source, folder, item, sizes)) is not None}


def _present(source: ModelSource, folder: str, item: FileEntry, sizes: dict[str, int]) -> str | None:
    """The file's path; None where its top-level folder is missing, as `tables` is where a store has the rows."""
    path = posixpath.join(folder, str(item.path))
    if path in sizes:
        if sizes[path] != item.num_bytes:
            found = f"{sizes[path]} bytes, {MANIFEST_FILE} says {item.num_bytes}"
            raise ModelFormatError(f"{source.name_of(path)}: {found}")
        return path
    if len(item.path.parts) == 1 or posixpath.join(folder, item.path.parts[0]) in sizes:
        raise ModelFormatError(f"{source.name_of(path)}: no such file, though {MANIFEST_FILE} lists it")
    return None
