"""HugeCTR's sparse folders into the tables of a version: linked or copied. Rows of earlier versions may be added."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import ModelFormatError
from inference_session.importers.hugectr.kept_rows import KeptTable
from inference_session.importers.hugectr.ps_fields import KeyType
from inference_session.kernels.records import FLOAT_BYTES, KEY_BYTES
from inference_session.model_spec import KEY_FILE, VECTOR_FILE, VectorType, bytes_per_row
from inference_session.platform.large_pages import copy_file, open_for_writing
from inference_session.platform.progress import Progress
from inference_session.tables.base import contains
from inference_session.tables.quantized_rows import dequantize_rows
from inference_session.tables.table_index import build_index

_KEYS_PER_CHUNK = 1 << 20
_COPY_BYTES = 16 << 20


@dataclass(frozen=True)
class SparseFolder:
    """The files `key` and `emb_vector` of one table, as HugeCTR writes them."""

    path: Path
    embedding_dim: int
    key_type: KeyType
    """What the model takes the keys for; the file holds int64 in any case."""
    dtype: VectorType = "float32"
    """How vectors are stored; HugeCTR knows float32 alone, tables of a version may be smaller."""

    @property
    def num_rows(self) -> int:
        """The number of rows, by the sizes of both files; ModelFormatError where they do not fit each other."""
        key_bytes, vector_bytes = _size(self.path / KEY_FILE), _size(self.path / VECTOR_FILE)
        num_rows, rest = divmod(key_bytes, KEY_BYTES)
        if rest:
            raise ModelFormatError(f"{self.path / KEY_FILE}: {key_bytes} bytes are not a whole number of int64 keys")
        expected = num_rows * bytes_per_row(self.embedding_dim, self.dtype)
        if vector_bytes != expected:
            raise ModelFormatError(
                f"{self.path / VECTOR_FILE}: {vector_bytes} bytes, expected {expected} "
                f"({num_rows} keys, embedding_dim {self.embedding_dim}, {self.dtype})"
            )
        return num_rows

    def chunks(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Keys as the model takes them, int64 [n], and their vectors, float32 [n, embedding_dim], in parts."""
        element = np.dtype("u1") if self.dtype == "int8" else np.dtype(self.dtype).newbyteorder("<")
        width = bytes_per_row(self.embedding_dim, self.dtype) // element.itemsize
        rows = _mapped(self.path / VECTOR_FILE, element).reshape(self.num_rows, width)
        begin = 0
        for keys in self.key_chunks():
            yield keys, dequantize_rows(rows[begin : begin + len(keys)], self.dtype)
            begin += len(keys)

    def key_chunks(self) -> Iterator[NDArray[np.int64]]:
        """Keys as the model takes them, int64 [n], in parts."""
        return (chunk if self.key_type == "int64" else chunk & 0xFFFFFFFF for chunk in _chunks(self.path / KEY_FILE))


def stored_embedding_dim(folder: Path) -> int | None:
    """The layout that the sizes of a sparse folder's files imply; None where it has no row."""
    num_rows = _size(folder / KEY_FILE) // KEY_BYTES
    return max(1, _size(folder / VECTOR_FILE) // FLOAT_BYTES // num_rows) if num_rows else None


def write_table(
    source: SparseFolder,
    target: Path,
    earlier: Sequence[KeptTable] = (),
    *,
    may_link: bool = True,
    progress: Progress | None = None,
) -> int:
    """Make a folder into a table of a version; returns its rows.

    Args:
        source: where the rows are.
        target: the table's folder, which is made.
        earlier: tables of earlier versions, the oldest first, whose rows are kept if no later version has them.
        may_link: False: files are copied, so that writes to the originals do not change the version.
        progress: called with the bytes of keys indexed.

    Raises:
        ModelFormatError: a file is missing, or has an impossible size.
    """
    num_rows = source.num_rows
    target.mkdir(parents=True)
    may_link = may_link and not earlier
    if source.key_type == "int64" or _all_uint32(source.path / KEY_FILE):
        _take(source.path / KEY_FILE, target / KEY_FILE, may_link=may_link)
    else:
        _write_uint32(source, target / KEY_FILE)
    _take(source.path / VECTOR_FILE, target / VECTOR_FILE, may_link=may_link)
    for kept in reversed(earlier):
        num_rows += _keep_rows(replace(source, path=kept.path, dtype=kept.dtype), target)
    build_index(target, _mapped(target / KEY_FILE), progress and partial(_count_keys, progress))
    return num_rows


def _keep_rows(source: SparseFolder, target: Path) -> int:
    """Append the rows whose keys the table lacks; returns how many."""
    known = np.sort(_mapped(target / KEY_FILE))
    num_kept = 0
    with (
        open_for_writing(target / KEY_FILE, "ab") as key_file,
        open_for_writing(target / VECTOR_FILE, "ab") as vector_file,
    ):
        for keys, vectors in source.chunks():
            is_gone = ~contains(known, keys)
            key_file.write(keys[is_gone].tobytes())
            vector_file.write(vectors[is_gone].tobytes())
            num_kept += int(is_gone.sum())
    return num_kept


def _count_keys(progress: Progress, num_keys: int) -> None:
    progress(num_keys * KEY_BYTES)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read: {error.strerror}") from error


def _take(source: Path, target: Path, *, may_link: bool) -> None:
    """Share the file; where that is not wanted or not possible (another file system, say), copy it."""
    if may_link:
        with suppress(OSError):
            os.link(source.resolve(), target)
            return
    copy_file(source, target)


def _all_uint32(path: Path) -> bool:
    """Whether all keys of a file fit into uint32."""
    return all(((chunk >= 0) & (chunk < 1 << 32)).all() for chunk in _chunks(path))


def _write_uint32(source: SparseFolder, target: Path) -> None:
    """HugeCTR casts the keys of a uint32 model when it loads them, so that -1 is found as 4294967295."""
    with open_for_writing(target) as file:
        for keys in source.key_chunks():
            file.write(keys.tobytes())


def _chunks(path: Path) -> Iterator[NDArray[np.int64]]:
    """The stored keys of a file, in parts."""
    keys: NDArray[np.int64] = _mapped(path)
    return (keys[begin : begin + _KEYS_PER_CHUNK] for begin in range(0, keys.size, _KEYS_PER_CHUNK))


def _mapped(path: Path, dtype: str | np.dtype[Any] = "<i8") -> NDArray[Any]:
    return np.memmap(path, dtype, "r") if _size(path) else np.empty(0, dtype)
