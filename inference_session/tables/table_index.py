"""The index file of a table: the hash index of kernels/cpu/hash_index.py behind a header of one cache line.

    <table>/index    HEADER, then num_buckets x 64 bytes

The header says which `key` file the index was built from: its number of rows, a few sampled keys, and its SHA-256 (the
first 8 bytes). They are compared whenever a table is opened. The SHA-256 is that of the manifest, which takes constant
time; where no manifest lists the file, the keys are read. `verify` reads everything. An index that is absent or was
built from other keys is rebuilt. It is written under another name and renamed when complete, so that the old index
or none is in place until the new one is complete. What was written is kept when the process is killed: after every
ROWS_PER_CHECKPOINT rows the buckets are flushed to the disk, then a header that says how many rows they hold, and the
next build goes on from there. The same keys give the same file, byte for byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import ModelFormatError
from inference_session.kernels.cpu.hash_index import BUCKET_BYTES, MAX_ROWS, count_keys, insert_rows
from inference_session.model_spec import INDEX_FILE
from inference_session.platform.drafts import flush
from inference_session.platform.file_locks import locked
from inference_session.platform.large_pages import write_zeros
from inference_session.platform.progress import Progress

PARTIAL_FILE = "index.partial"
ROWS_PER_STEP = 1 << 20
"""Rows between two calls of `progress`."""
ROWS_PER_CHECKPOINT = 1 << 25
"""Rows that a killed build loses at most: about a second's work."""


HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("header_checksum", "<u4"),  # of the header with this field 0
        ("num_rows", "<i8"),
        ("num_buckets", "<i8"),
        ("num_duplicates", "<i8"),
        ("key_digest", "<u8"),
        ("bucket_checksum", "<u4"),
        ("num_indexed", "<i8"),  # while unfinished: rows that the buckets hold, and key_digest is of; else 0
        ("key_sample", "<u4"),
    ]
)
_MAGIC = b"hotrowIX"
_UNFINISHED = b"hotrowI."
_VERSION = 2
_DIGEST_BYTES = 8
_NUM_SAMPLES = 16

_log = logging.getLogger(__name__)


class TableIndex:
    """A table's index in memory, mapped from its file or built there."""

    def __init__(self, content: NDArray[np.uint8]) -> None:
        """`content`: the bytes of the whole file, [n], at a cache line."""
        self._content = content
        self._header = content[: HEADER.itemsize].view(HEADER)[0]

    @property
    def content(self) -> NDArray[np.uint8]:
        """The bytes of the whole file, as given."""
        return self._content

    @property
    def address(self) -> int:
        """Address of the first bucket."""
        return int(self._content.ctypes.data) + HEADER.itemsize

    @property
    def num_buckets(self) -> int:
        """Number of buckets."""
        return int(self._header["num_buckets"])

    @property
    def num_duplicates(self) -> int:
        """Rows whose key a later row has too."""
        return int(self._header["num_duplicates"])

    def check(self, keys: NDArray[np.int64], path: Path, key_sha256: str | None = None) -> None:
        """Raise ModelFormatError unless this index was built from these keys, int64 [num_rows].

        With `key_sha256`, the manifest's SHA-256 of the `key` file, this takes constant time; else the keys are read.
        """
        header = self._header
        expected: dict[str, Any] = {"magic": _MAGIC, "version": _VERSION, "header_checksum": _header_checksum(header)}
        expected |= {"num_rows": len(keys), "key_sample": _sample(keys)}
        for name, value in expected.items():
            if header[name] != value:
                raise ModelFormatError(f"{path}: {name} is {header[name]!r}, expected {value!r} for the `key` file")
        size = HEADER.itemsize + self.num_buckets * BUCKET_BYTES
        if self.num_buckets < 1 or len(self._content) != size:
            raise ModelFormatError(f"{path}: has {len(self._content)} bytes, expected {size}")
        built_from = int(header["key_digest"]).to_bytes(_DIGEST_BYTES, "little").hex()
        if built_from != (key_sha256 or hashlib.sha256(keys.data).hexdigest())[: 2 * _DIGEST_BYTES]:
            raise ModelFormatError(f"{path}: it was built from keys other than those of the `key` file")

    def verify(self, keys: NDArray[np.int64], path: Path) -> None:
        """Raise ModelFormatError unless every byte is what was built from these keys [num_rows]. Reads all of both."""
        self.check(keys, path)
        if zlib.crc32(self._content[HEADER.itemsize :].data) != self._header["bucket_checksum"]:
            raise ModelFormatError(f"{path}: bucket_checksum does not match; the index is damaged")


def index_bytes(num_rows: int) -> int:
    """Size of the index file of a table with this many stored keys."""
    return _file_size(_bucket_count(num_rows))


def open_index(
    folder: Path, keys: NDArray[np.int64], *, key_sha256: str | None = None, verify: bool = False
) -> TableIndex:
    """Map the index file of a table with keys [num_rows]; ModelFormatError where it is absent, was built from other
    keys (see `TableIndex.check`) or is damaged, which only `verify` finds by reading all of it.
    """
    path = folder / INDEX_FILE
    try:
        index = TableIndex(_map_file(path))
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read: {error.strerror or error}") from error
    if verify:
        index.verify(keys, path)
    else:
        index.check(keys, path, key_sha256)
    return index


def build_index(folder: Path, keys: NDArray[np.int64], progress: Progress | None = None) -> int:
    """Build and write the index file of a table with keys [num_rows]; returns how many rows a later one with the same
    key hides.

    The file's space is reserved beforehand: on a full disk this is an OSError, and the old index stays.
    """
    with locked(folder):
        return _write_index(folder, keys, progress).num_duplicates


def ensure_index(
    folder: Path,
    keys: NDArray[np.int64],
    progress: Progress | None = None,
    *,
    key_sha256: str | None = None,
    verify: bool = False,
) -> TableIndex:
    """The index of keys [num_rows]: from its file where that is good (see `open_index`), else built now, in memory if
    the folder takes no file.
    """
    try:
        return open_index(folder, keys, key_sha256=key_sha256, verify=verify)
    except ModelFormatError as error:
        _log.log(
            logging.WARNING if (folder / INDEX_FILE).exists() else logging.INFO, "building an index, because %s", error
        )
    try:
        with locked(folder):
            # Another process may have built it meanwhile, or the manifest be that of other keys. The keys decide.
            with contextlib.suppress(ModelFormatError):
                return open_index(folder, keys, verify=verify)
            return _write_index(folder, keys, progress)
    except OSError as error:
        _log.warning(
            "%s: cannot write the index, so every process builds its own in memory (%d bytes): %s",
            folder / INDEX_FILE,
            _file_size(_bucket_count(len(keys))),
            error,
        )
    return index_in_memory(keys, progress)


def index_in_memory(keys: NDArray[np.int64], progress: Progress | None) -> TableIndex:
    """An index of keys, int64 [num_rows], that is in no file. Of rows with equal keys the last wins."""
    content = np.frombuffer(mmap.mmap(-1, _file_size(_bucket_count(len(keys)))), np.uint8)
    _fill(content, keys, progress)
    return TableIndex(content)


def _write_index(folder: Path, keys: NDArray[np.int64], progress: Progress | None) -> TableIndex:
    """Must be called while holding the folder's lock, because the name of the unfinished file is always the same."""
    unfinished = folder / PARTIAL_FILE
    try:
        digest = _fill(_resume(unfinished, keys), keys, progress, checkpoint=unfinished)
        flush(unfinished)
        unfinished.replace(folder / INDEX_FILE)
        flush(folder)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    return open_index(folder, keys, key_sha256=digest)


def _resume(unfinished: Path, keys: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The file that a build of these keys' index left behind when it was killed, else a new one; mapped for writing."""
    size = _file_size(_bucket_count(len(keys)))
    with contextlib.suppress(OSError), unfinished.open("r+b") as file:
        if os.fstat(file.fileno()).st_size == size:
            content = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
            header = content[: HEADER.itemsize].view(HEADER)[0]
            done = keys[: max(int(header["num_indexed"]), 0)]
            whole = header["header_checksum"] == _header_checksum(header)
            if whole and header["magic"] == _UNFINISHED and _digest(hashlib.sha256(done.data)) == header["key_digest"]:
                return content
    return _create_file(unfinished, size)


def _fill(
    content: NDArray[np.uint8], keys: NDArray[np.int64], progress: Progress | None, *, checkpoint: Path | None = None
) -> str:
    """Build the index of the keys in `content`: zeros, or what an unfinished build had when it wrote its header.

    `checkpoint`: the file behind `content`, to be flushed when what it holds is worth keeping. Returns the SHA-256 of
    the keys.
    """
    if len(keys) > MAX_ROWS:
        raise ModelFormatError(f"{len(keys)} rows; a table with a `key` file may have at most {MAX_ROWS}")
    header, buckets = content[: HEADER.itemsize].view(HEADER)[0], content[HEADER.itemsize :]
    num_buckets = len(buckets) // BUCKET_BYTES
    progress = progress or (lambda _: None)
    done = int(header["num_indexed"])
    sha256 = hashlib.sha256(keys[:done].data)
    if done:
        progress(done)
    for begin in range(done, len(keys), ROWS_PER_STEP):
        end = min(begin + ROWS_PER_STEP, len(keys))
        insert_rows(buckets.ctypes.data, num_buckets, keys.ctypes.data, len(keys), begin, end)
        sha256.update(keys[begin:end].data)
        if checkpoint is not None and end % ROWS_PER_CHECKPOINT == 0:
            flush(checkpoint)  # the buckets, before a header that counts on them
            _seal(header, magic=_UNFINISHED, version=_VERSION, num_indexed=end, key_digest=_digest(sha256))
        progress(end - begin)
    _seal(
        header,
        magic=_MAGIC,
        version=_VERSION,
        num_rows=len(keys),
        num_buckets=num_buckets,
        num_duplicates=len(keys) - count_keys(buckets.ctypes.data, num_buckets),
        num_indexed=0,
        key_sample=_sample(keys),
        key_digest=_digest(sha256),
        bucket_checksum=zlib.crc32(buckets.data),
    )
    return sha256.hexdigest()


def _seal(header: np.void, **fields: int | bytes) -> None:
    for name, value in fields.items():
        header[name] = value
    header["header_checksum"] = _header_checksum(header)


def _bucket_count(num_rows: int) -> int:
    """8.5 rows a bucket of 12: 7.5 bytes a row, so that `key` and `index` together stay within 16."""
    return num_rows * 2 // 17 + 1


def _file_size(num_buckets: int) -> int:
    return HEADER.itemsize + num_buckets * BUCKET_BYTES


def _sample(keys: NDArray[np.int64]) -> int:
    """Checksum of a few keys spread over all."""
    positions = np.linspace(0, max(len(keys) - 1, 0), num=min(_NUM_SAMPLES, len(keys)), dtype=np.int64)
    return zlib.crc32(keys[positions].data)


def _digest(sha256: hashlib._Hash) -> int:
    """The first bytes of a SHA-256, as the header has them."""
    return int.from_bytes(sha256.digest()[:_DIGEST_BYTES], "little")


def _header_checksum(header: np.void) -> int:
    copy = header.copy()
    copy["header_checksum"] = 0
    return zlib.crc32(copy.tobytes())


def _map_file(path: Path) -> NDArray[np.uint8]:
    if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
        raise OSError("not a regular file")
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < HEADER.itemsize:
            raise OSError("the file is shorter than its header")
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def _create_file(path: Path, size: int) -> NDArray[np.uint8]:
    # Without room set aside, a full disk would kill the process when it writes to the mapping.
    write_zeros(path, size)
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
