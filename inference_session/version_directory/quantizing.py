"""Tables of a version in a smaller type: float16 or int8 rows in place of float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import ConfigurationError, ModelFormatError
from inference_session.model_spec import (
    INDEX_FILE,
    SESSION_FILE,
    TABLES_FOLDER,
    VECTOR_FILE,
    ModelSpec,
    TableSpec,
    VectorType,
    bytes_per_row,
)
from inference_session.platform.drafts import check_space, draft_folder
from inference_session.platform.large_pages import copy_file, open_for_writing
from inference_session.platform.progress import Progress
from inference_session.tables.quantized_rows import dequantize_rows, quantize_rows
from inference_session.version_directory import manifest
from inference_session.version_directory.publishing import link_file
from inference_session.version_directory.session_file import read_spec

_CHUNK_BYTES = 512 << 10
"""Bytes of float32 vectors that are in memory at a time: what is read again stays in a processor's cache."""


class QuantizedVersion(NamedTuple):
    """The result of `quantize_version`."""

    before: ModelSpec
    after: ModelSpec


def narrowed(spec: ModelSpec, dtype: VectorType) -> ModelSpec:
    """The same model with tables of that type. A table that would not become smaller is not changed: an int8 row has
    8 bytes more than elements, so a row of 2 elements takes more than float32, and one of 8 as much as float16.
    """
    tables = (
        replace(table, dtype=dtype) if bytes_per_row(table.embedding_dim, dtype) < table.row_bytes else table
        for table in spec.tables
    )
    return replace(spec, tables=tuple(tables))


def quantize_tables(draft: Path, spec: ModelSpec, dtype: VectorType, progress: Progress | None = None) -> ModelSpec:
    """Rewrite the tables of a draft as `narrowed` says; returns the new spec. Tables are streamed.

    Files are replaced, not written to, so that other hard links to them do not change. The caller writes
    session.json and the manifest. `progress` is called with the bytes read.

    Raises:
        ModelFormatError: the type cannot hold a row; names the table and the row.
    """
    after = narrowed(spec, dtype)
    for old, new in _changed_tables(spec, after):
        folder = draft / TABLES_FOLDER / old.folder
        written = folder / f".tmp-{VECTOR_FILE}"
        _rewrite(folder / VECTOR_FILE, written, old, new.dtype, progress)
        written.replace(folder / VECTOR_FILE)
    return after


def quantize_version(
    version_dir: Path,
    target: Path,
    dtype: VectorType,
    *,
    progress: Progress | None = None,
    accept: Callable[[Path], None] | None = None,
) -> QuantizedVersion:
    """Write a version again with tables of a smaller type, whole or not at all. Other files are shared by hard links.

    Args:
        version_dir: in the native layout; every byte is compared with its manifest; it is not changed.
        target: the new version directory, which must not exist.
        dtype: see `narrowed`.
        progress: called with the bytes verified, the bytes of tables read, and the bytes of the new version.
        accept: called with the draft; if it raises, nothing is written.

    Raises:
        ConfigurationError: no table would become smaller, or the target exists.
        ModelFormatError: a file is missing or damaged, or the type cannot hold a row; names the file, or table and row.
        UnavailableError: the disk has too little space, or another process writes the target now.
    """
    before = read_spec(version_dir)
    after = narrowed(before, dtype)
    if after == before:
        kinds = ", ".join(sorted({f"{table.embedding_dim} x {table.dtype}" for table in before.tables})) or "none"
        raise ConfigurationError(f"{version_dir}: no table would be smaller as {dtype}; tables: {kinds}")
    if target.exists():
        raise ConfigurationError(f"{target}: already exists; choose another --output")
    manifest.verify(version_dir, checksums=True, progress=progress)
    with draft_folder(target) as draft:
        needed = sum(new.num_rows * new.row_bytes for _, new in _changed_tables(before, after))
        check_space(target.parent, needed, "the quantized tables need")
        _share_other_files(version_dir, draft, before, after)
        for old, new in _changed_tables(before, after):
            place = Path(TABLES_FOLDER, old.folder, VECTOR_FILE)
            _rewrite(version_dir / place, draft / place, old, new.dtype, progress)
        manifest.describe_version(after, draft, progress)
        if accept:
            accept(draft)
    return QuantizedVersion(before, after)


def _changed_tables(before: ModelSpec, after: ModelSpec) -> Iterator[tuple[TableSpec, TableSpec]]:
    return ((old, new) for old, new in zip(before.tables, after.tables, strict=True) if old != new)


def _share_other_files(version_dir: Path, draft: Path, before: ModelSpec, after: ModelSpec) -> None:
    """Link, or else copy, all files that quantizing does not change, including indexes, as the keys stay the same."""
    rewritten = {PurePosixPath(TABLES_FOLDER, old.folder, VECTOR_FILE) for old, _ in _changed_tables(before, after)}
    rewritten.add(PurePosixPath(SESSION_FILE))
    listed = [entry.path for entry in manifest.read_manifest(version_dir)]
    indexes = [PurePosixPath(TABLES_FOLDER, table.folder, INDEX_FILE) for table in before.tables]
    for path in (*listed, *(path for path in indexes if (version_dir / path).is_file())):
        (draft / path).parent.mkdir(parents=True, exist_ok=True)
        if path not in rewritten and not link_file((version_dir / path).resolve(), draft / path):
            copy_file(version_dir / path, draft / path)


def _rewrite(source: Path, target: Path, table: TableSpec, dtype: VectorType, progress: Progress | None) -> None:
    """Write the rows of one table's file as another type."""
    begin = 0
    with open_for_writing(target, "xb") as file:
        for rows in _chunks(source, table):
            vectors = dequantize_rows(rows, table.dtype)
            try:
                file.write(quantize_rows(vectors, dtype).data)
            except ModelFormatError as error:
                raise _refused(table, begin, vectors, error) from error
            begin += len(rows)
            if progress:
                progress(rows.nbytes)


def _chunks(path: Path, table: TableSpec) -> Iterator[NDArray[np.generic]]:
    """The rows of a table's file, in parts; read, not mapped, so that they do not count as memory of the process."""
    rows_per_chunk = max(1, _CHUNK_BYTES // (4 * table.embedding_dim))
    num_bytes = path.stat().st_size
    if num_bytes != table.num_rows * table.row_bytes:
        raise ModelFormatError(f"{path}: has {num_bytes} bytes, expected {table.num_rows} rows of {table.row_bytes}")
    with path.open("rb", buffering=0) as file:
        for begin in range(0, table.num_rows, rows_per_chunk):
            count = min(rows_per_chunk, table.num_rows - begin)
            rows = np.fromfile(file, np.uint8, count * table.row_bytes).reshape(count, table.row_bytes)
            yield rows if table.dtype == "int8" else rows.view(table.dtype)


def _refused(table: TableSpec, begin: int, vectors: NDArray[np.float32], error: ModelFormatError) -> ModelFormatError:
    """The error, with the row that causes it: one with NaN, else the one with the largest magnitude."""
    with np.errstate(invalid="ignore"):
        row = begin + int(np.argmax(np.abs(vectors).max(axis=1)))
    return ModelFormatError(f"table {table.name!r}, row {row}: {error}")
