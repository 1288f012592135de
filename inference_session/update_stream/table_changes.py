"""What `hotrow publish` sends: all rows of a table, or those in which two versions differ. Bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import ConfigurationError, ModelFormatError
from inference_session.model_spec import KEY_FILE, SESSION_FILE, TABLES_FOLDER, VECTOR_FILE, TableSpec, folder_names
from inference_session.tables.quantized_rows import dequantize_rows
from inference_session.tables.table_file import TableFile
from inference_session.version_directory import manifest
from inference_session.version_directory.session_file import read_spec
from inference_session.version_directory.version import VersionDirectory

_CHUNK_BYTES = 8 << 20


class Changes(NamedTuple):
    """Some rows of a table, to be inserted (`vectors`) or to be deleted (None)."""

    keys: NDArray[np.int64]
    vectors: NDArray[np.float32] | None
    num_done: int
    """Rows of the source that have been looked at for these."""


class Table(NamedTuple):
    """A table's rows in files."""

    spec: TableSpec
    file: TableFile

    @property
    def rows_per_chunk(self) -> int:
        """Rows that are worked on at a time."""
        return max(1, _CHUNK_BYTES // (4 * self.spec.embedding_dim))

    def all_rows(self) -> Iterator[Changes]:
        """Every row, in the order of the files."""
        keys, vectors = self.file.keys(), self.file.vectors
        for begin in range(0, len(keys), self.rows_per_chunk):
            part = slice(begin, begin + self.rows_per_chunk)
            yield Changes(keys[part], dequantize_rows(vectors[part], self.spec.dtype), len(keys[part]))

    def changes_since(self, old: Table) -> Iterator[Changes]:
        """The rows that `old` lacks or that differ in any bit; then as deletions those that only `old` has."""
        if old.spec.embedding_dim != self.spec.embedding_dim:
            raise ModelFormatError(
                f"table {self.spec.name!r} has embedding_dim {self.spec.embedding_dim},"
                f" in the old version {old.spec.embedding_dim}: its rows cannot be updated, load the new version"
            )
        for keys in self._chunks():
            vectors, before = self._vectors(keys)[0], old._vectors(keys)
            same = before[1] & (vectors.view(np.uint32) == before[0].view(np.uint32)).all(axis=1)
            yield Changes(keys[~same], vectors[~same], len(keys))
        for keys in old._chunks():
            yield Changes(keys[~self._vectors(keys)[1]], None, len(keys))

    def _chunks(self) -> Iterator[NDArray[np.int64]]:
        keys = self.file.keys()
        for begin in range(0, len(keys), self.rows_per_chunk):
            yield np.ascontiguousarray(keys[begin : begin + self.rows_per_chunk])

    def _vectors(self, keys: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        vectors = np.zeros((len(keys), self.spec.embedding_dim), np.float32)
        return vectors, self.file.fetch(keys, vectors)


def open_tables(version_dir: Path) -> list[Table]:
    """The tables of a version directory, whose files must have the checksums that its manifest says: they are read."""
    version = VersionDirectory.read(version_dir)
    manifest.verify(version_dir, checksums=True)
    return [Table(file.spec, file) for file in version.open_tables()]


def open_folder(folder: Path, table: str) -> Table:
    """The table in a folder of files `key` and `emb_vector` as HugeCTR writes them, or of a version directory, as the
    table of that name.

    Without a session.json two levels up, vectors are float32, and there must be a `key` file. With one, that says by
    which folder name the table goes.
    """
    version_dir = folder.resolve().parent.parent
    if folder.resolve().parent.name == TABLES_FOLDER and (version_dir / SESSION_FILE).exists():
        model = read_spec(version_dir)
        spec = next((one for one in model.tables if one.folder == folder.resolve().name), None)
        if spec is None:
            raise ModelFormatError(f"{folder}: {version_dir / SESSION_FILE} names no table in this folder")
        known = next((one.folder for one in model.tables if one.name == table), folder_names([table])[0])
        return Table(replace(spec, folder=known), TableFile.open(folder, spec))
    key_bytes, vector_bytes = _size(folder / KEY_FILE), _size(folder / VECTOR_FILE)
    num_rows = key_bytes // 8
    row_bytes = vector_bytes // num_rows if num_rows else 4
    if key_bytes % 8 or row_bytes % 4 or not row_bytes or row_bytes * num_rows != vector_bytes:
        raise ModelFormatError(
            f"{folder}: {KEY_FILE} has {key_bytes} bytes and {VECTOR_FILE} {vector_bytes},"
            " which do not match: expected int64 keys and one float32 vector per key"
        )
    spec = TableSpec(table, folder_names([table])[0], num_rows, row_bytes // 4)
    vectors = np.memmap(folder / VECTOR_FILE, "<f4", "r", shape=(num_rows, row_bytes // 4)) if num_rows else _NO_VECTORS
    keys = np.memmap(folder / KEY_FILE, "<i8", "r") if num_rows else _NO_KEYS
    return Table(spec, TableFile(spec, vectors, keys, None))


_NO_KEYS, _NO_VECTORS = np.empty(0, np.int64), np.empty((0, 1), np.float32)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise ConfigurationError(
            f"{path}: {error.strerror}; publish a version directory, or a folder with the files"
            f" {KEY_FILE} and {VECTOR_FILE}"
        ) from error
