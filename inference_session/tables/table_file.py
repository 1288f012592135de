"""Tables in files: `key`, `emb_vector` and `index` of one folder, memory-mapped and shared by all processes.

`key` and `emb_vector` are HugeCTR's sparse model files: int64 keys and the vectors of the same rows, little endian,
nothing else. Opening a table maps the files and compares sizes; nothing is done per row. Version directories are never
changed once they are in place: a mapped file that is cut short would kill its readers.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import ModelFormatError, SessionClosedError
from inference_session.kernels.cpu import lookup as cpu
from inference_session.kernels.records import TABLE, VectorCode, address_of, key_segments, table_record
from inference_session.model_spec import KEY_FILE, VECTOR_FILE, TableSpec, VectorType
from inference_session.platform.large_pages import LargePageWriter, open_for_writing
from inference_session.platform.progress import Progress
from inference_session.tables.base import SCAN_BYTES, RowBatch, check_fetch
from inference_session.tables.quantized_rows import quantize_rows
from inference_session.tables.table_index import TableIndex, build_index, ensure_index, open_index

_ROWS_PER_CHUNK = 1 << 16


class TableFile:
    """One table in its folder, open for look-ups from any thread."""

    def __init__(
        self,
        spec: TableSpec,
        vectors: NDArray[np.generic],
        keys: NDArray[np.int64] | None,
        index: TableIndex | None,
        *,
        stat: os.stat_result | None = None,
    ) -> None:
        """`vectors` as of the property; keys: int64 [num_rows], None where they are row numbers, as `index` is."""
        self.spec = spec
        self.stat = stat
        """What the system says of the file of vectors that is mapped; None: they are in no file."""
        self._vectors = vectors
        self._keys = keys
        self._index = index
        self._default = np.full(spec.embedding_dim, spec.default_vector, np.float32)
        self._record = self._describe()
        self._closed = False

    @classmethod
    def open(
        cls,
        folder: Path,
        spec: TableSpec,
        *,
        key_sha256: str | None = None,
        must_have_index: bool = False,
        verify_index: bool = False,
        progress: Progress | None = None,
    ) -> TableFile:
        """Map the files of a table; ModelFormatError names one that is absent or whose size is not the spec's.

        An index that is absent or stale, or with `verify_index`, which reads all of it, damaged, is built (`progress`
        gets the rows done), or, with `must_have_index`, a ModelFormatError. `key_sha256` is what a manifest says of
        the `key` file; without it the keys are read, to be sure that the index was built from them.
        """
        vectors, stat = _map_rows(folder / VECTOR_FILE, spec, spec.row_bytes)
        if spec.dtype != "int8":
            vectors = vectors.view(spec.dtype)
        if spec.keys == "row_number":
            return cls(spec, vectors, None, None, stat=stat)
        keys = _map_rows(folder / KEY_FILE, spec, 8)[0].view(np.int64).reshape(-1)
        if must_have_index:
            index = open_index(folder, keys, key_sha256=key_sha256, verify=verify_index)
        else:
            index = ensure_index(folder, keys, progress, key_sha256=key_sha256, verify=verify_index)
        return cls(spec, vectors, keys, index, stat=stat)

    @property
    def vectors(self) -> NDArray[np.generic]:
        """The mapped rows, read-only: float32 or float16 [num_rows, embedding_dim], or for int8 uint8
        [num_rows, embedding_dim + 8] (see `quantized_rows`). Lives on after `close`.
        """
        return self._vectors

    @property
    def num_duplicates(self) -> int:
        """Rows that no look-up reaches, because a later row has the same key."""
        return self._index.num_duplicates if self._index is not None else 0

    def keys(self) -> NDArray[np.int64]:
        """The key of every row, int64[num_rows]; mapped, or counted where keys are row numbers."""
        return self._keys if self._keys is not None else np.arange(self.spec.num_rows, dtype=np.int64)

    def arrays(self) -> list[NDArray[np.generic]]:
        """What a look-up reads: the index, bytes, and the keys, int64 [num_rows], if there are any; and the rows."""
        index = [] if self._index is None else [self._index.content]
        return [*index, *([] if self._keys is None else [self._keys]), self._vectors]

    def record(self) -> np.void:
        """A TABLE record for the look-up kernels; good as long as this object lives."""
        if self._closed:
            raise SessionClosedError(f"table {self.spec.name!r} has been closed")
        return self._record

    def fetch(self, keys: NDArray[np.int64], out: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Write the vectors of keys, int64[n], to the rows of `out`, float32[n, embedding_dim], as far as they are
        found; returns found[n]. `out` may have any stride between rows.
        """
        return _fetch(self.record(), keys, out)

    def scan(self) -> Iterator[RowBatch]:
        """All rows in batches; of rows with equal keys the last one, each time."""
        keys = self.keys()
        step = max(1, SCAN_BYTES // (4 * self.spec.embedding_dim))
        for begin in range(0, len(keys), step):
            part = np.ascontiguousarray(keys[begin : begin + step])
            vectors = np.empty((len(part), self.spec.embedding_dim), np.float32)
            if not self.fetch(part, vectors).all():
                raise ModelFormatError(f"table {self.spec.name!r}: the index is damaged: it does not find all keys")
            yield part, vectors

    def close(self) -> None:
        """Refuse further look-ups. The files are unmapped when the last array over them is freed."""
        self._closed = True

    def _describe(self) -> np.void:
        has_index = self._index is not None and self._keys is not None
        return table_record(
            self._vectors,
            self.spec.embedding_dim,
            code=VectorCode[self.spec.dtype.upper()],
            keys=self._keys if has_index else None,
            index_address=self._index.address if self._index is not None else 0,
            num_buckets=self._index.num_buckets if self._index is not None else 0,
            default_address=address_of(self._default),
        )


def write_table(
    folder: Path,
    vectors: Iterable[NDArray[np.floating]],
    *,
    keys: Iterable[NDArray[np.int64]] | None = None,
    dtype: VectorType = "float32",
    progress: Progress | None = None,
) -> None:
    """Write a table's files into a folder, which is created, and flush them to the disk.

    `vectors` come in chunks, [any number of rows, embedding_dim], one in memory at a time, and are stored as `dtype`;
    `keys`, in chunks of the same rows, are None for a table of row numbers. A finite element that float16 cannot hold,
    or one that is not finite or beyond LARGEST_INT8 for int8, is a ModelFormatError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    key_path = folder / KEY_FILE
    with open_for_writing(folder / VECTOR_FILE) as vector_file, _open_unless(keys is None, key_path) as key_file:
        for chunk, chunk_keys in _paired(vectors, keys):
            for begin in range(0, len(chunk), _ROWS_PER_CHUNK):
                vector_file.write(quantize_rows(chunk[begin : begin + _ROWS_PER_CHUNK], dtype).data)
            if key_file is not None and chunk_keys is not None:
                key_file.write(chunk_keys.data)
        for file in filter(None, (vector_file, key_file)):
            file.flush()
    if keys is not None:
        build_index(folder, _map_file(key_path)[0].view(np.int64), progress)


def _paired(
    vectors: Iterable[NDArray[np.floating]], keys: Iterable[NDArray[np.int64]] | None
) -> Iterator[tuple[NDArray[np.floating], NDArray[np.int64] | None]]:
    """Chunks of vectors with the keys of the same rows."""
    dims = set()
    for chunk, chunk_keys in zip_longest(vectors, () if keys is None else keys):
        num_vectors, num_keys = (0 if part is None else len(part) for part in (chunk, chunk_keys))
        if keys is not None and num_vectors != num_keys:
            raise ModelFormatError(f"a chunk has {num_vectors} vectors and {num_keys} keys")
        dims.add(chunk.shape[1:])
        if len(dims) > 1 or chunk.ndim != 2:
            raise ModelFormatError(
                f"vectors must be [rows, embedding_dim] with one embedding_dim, found {sorted(dims)}"
            )
        yield chunk, None if chunk_keys is None else _as_keys(chunk_keys)


def _as_keys(keys: NDArray[np.generic]) -> NDArray[np.int64]:
    if not np.can_cast(keys.dtype, np.int64):
        raise ModelFormatError(f"keys must be int64 or narrower integers, found {keys.dtype}")
    return np.ascontiguousarray(keys, "<i8")


def _open_unless(absent: bool, path: Path) -> AbstractContextManager[LargePageWriter | None]:
    return nullcontext() if absent else open_for_writing(path)


def _map_rows(path: Path, spec: TableSpec, row_bytes: int) -> tuple[NDArray[np.uint8], os.stat_result]:
    """Map a file of num_rows rows of row_bytes bytes; uint8 [num_rows, row_bytes], and what the file is."""
    content, stat = _map_file(path)
    expected = spec.num_rows * row_bytes
    if len(content) != expected:
        raise ModelFormatError(
            f"{path}: has {len(content)} bytes, expected {expected}"
            f" ({spec.num_rows} rows of {row_bytes} bytes for table {spec.name!r})"
        )
    return content.reshape(spec.num_rows, row_bytes), stat


def _map_file(path: Path) -> tuple[NDArray[np.uint8], os.stat_result]:
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_size == 0:  # which mmap refuses
                return np.zeros(0, np.uint8), stat
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8), stat
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read: {error.strerror}") from error


def _fetch(record: np.void, keys: NDArray[np.int64], out: NDArray[np.float32]) -> NDArray[np.bool_]:
    check_fetch(keys, out, int(record["embedding_dim"]))
    table = np.array([record], TABLE)
    table["default_address"] = 0
    segment = key_segments([keys], [out])
    missing = np.empty(len(keys), np.int64)
    num_missing = cpu.look_up(table, segment, np.zeros(1, np.int64), missing)
    found = np.ones(len(keys), np.bool_)
    found[missing[:num_missing]] = False
    return found
