"""Traces of keys in files: the keys that were looked up in a table, in order.

| format     | what it is |
| ---------- | ---------- |
| `npy`      | NumPy's, whole numbers of any shape |
| `int64`    | nothing but keys, 8 bytes each, little endian; `int64-be`: big endian |
| `text`     | whole numbers, with white space or commas between |
| `csv`      | a header and rows, with a column `key` and, where several tables are traced, a column `table` |

Any of them may be compressed (`.gz`, `.xz`, `.bz2`). A folder is a recording, made by the setting `record_keys`
(key_recorder.py). Files are read piece by piece, so that they may be larger than memory. Nothing is ever unpickled.
"""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import lzma
import tokenize
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import TraceFormatError

TRACE_FORMATS = ("auto", "npy", "int64", "int64-be", "text", "csv")
_SUFFIXES = {".npy": "npy", ".npz": "npy", ".txt": "text", ".csv": "csv"}
_COMPRESSED = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
CHUNK_KEYS = 1 << 20
CHUNK_BYTES = 1 << 22
_LONGEST_NUMBER = 64
_LONGEST_LINE = 1 << 16
_BROKEN = (EOFError, OSError, lzma.LZMAError, zlib.error, tokenize.TokenError)


class TracePart(NamedTuple):
    """The next keys of a trace."""

    table: str | None
    """None: the file does not say."""
    keys: NDArray[np.int64]
    num_keys: int | None = None
    """How many there were before these were sampled at 2**-halvings; None: these are all."""
    halvings: int = 0


def read_trace(path: Path, trace_format: str = "auto") -> Iterator[TracePart]:
    """The keys of a file, piece by piece, in their order.

    Args:
        path: the file.
        trace_format: one of TRACE_FORMATS; `auto` goes by the name's suffix, and takes `int64` for an unknown one
            (.npz, an archive of arrays, is refused as no .npy).

    Raises:
        TraceFormatError: the file is not of that format, or damaged; names it.
        OSError: it cannot be opened.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    opener = _COMPRESSED.get(suffixes[-1]) if suffixes else None
    if opener is not None:
        suffixes.pop()
    if trace_format == "auto":
        trace_format = _SUFFIXES.get(suffixes[-1], "int64") if suffixes else "int64"
    with path.open("rb") as file, _decompressed(file, opener) as stream:
        try:
            yield from _READERS[trace_format](stream)
        except (*_BROKEN, ValueError, OverflowError, csv.Error) as error:
            reason = "a number is larger than 64 bits" if isinstance(error, OverflowError) else error
            raise TraceFormatError(f"{path}: not a trace of format {trace_format!r}: {reason}") from error


@contextlib.contextmanager
def _decompressed(file: IO[bytes], opener: object) -> Iterator[IO[bytes]]:
    if opener is None:
        yield file
        return
    with opener(file) as stream:  # type: ignore[operator]
        yield stream


def _read_npy(stream: IO[bytes]) -> Iterator[TracePart]:
    version = np.lib.format.read_magic(stream)
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in read_header:
        raise ValueError(f"version {version} of NumPy's format is not (1, 0) or (2, 0)")
    shape, _, dtype = read_header[version](stream)
    if dtype.kind not in "iu" or not np.can_cast(dtype, np.int64, "safe"):
        raise ValueError(f"its elements are {dtype}, expected int64 or narrower integers")
    num_keys = 0
    for part in _read_binary(stream, dtype):
        num_keys += len(part.keys)
        yield part
    if num_keys != int(np.prod(shape, dtype=object)):
        raise ValueError(f"it holds {num_keys} elements, but its header says {list(shape)}")


def _read_binary(stream: IO[bytes], dtype: np.dtype[np.integer]) -> Iterator[TracePart]:
    while data := _read_fully(stream, dtype.itemsize * CHUNK_KEYS):
        if rest := len(data) % dtype.itemsize:
            raise ValueError(f"{rest} bytes are left over; a key has {dtype.itemsize}")
        yield TracePart(None, np.frombuffer(data, dtype).astype(np.int64))


def _read_fully(stream: IO[bytes], num_bytes: int) -> bytes:
    """Read this many bytes, fewer only at the end: a decompressor may return less per call."""
    data = stream.read(num_bytes)
    while 0 < len(data) < num_bytes and (more := stream.read(num_bytes - len(data))):
        data += more
    return data


def _read_text(stream: IO[bytes]) -> Iterator[TracePart]:
    rest = b""
    while data := stream.read(CHUNK_BYTES):
        words = (rest + data.replace(b",", b" ")).split()
        # The last word may continue in the next piece.
        rest = words.pop() if words and not data[-1:].isspace() and data[-1:] != b"," else b""
        if len(rest) > _LONGEST_NUMBER:
            raise ValueError(f"{rest[:16]!r}... is not a number")
        yield TracePart(None, _parsed(words))
    if rest:
        yield TracePart(None, _parsed([rest]))


def _parsed(words: list[bytes]) -> NDArray[np.int64]:
    return np.array([_whole(word) for word in words], np.int64)


def _whole(word: bytes | str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{word!r} is not a whole number") from None


def _read_csv(stream: IO[bytes]) -> Iterator[TracePart]:
    rows = csv.reader(_lines(stream))
    header = [name.strip().lower() for name in next(rows, [])]
    if "key" not in header:
        raise ValueError(f"its first line has no column 'key'; columns: {', '.join(map(repr, header)) or 'nothing'}")
    key_column = header.index("key")
    table_column = header.index("table") if "table" in header else None
    keys: dict[str | None, list[int]] = {}
    for number, row in enumerate(rows, start=1):
        if row:
            if len(row) != len(header):
                raise ValueError(f"row {number} has {len(row)} columns, the header {len(header)}")
            table = None if table_column is None else row[table_column]
            keys.setdefault(table, []).append(_whole(row[key_column]))
        if number % CHUNK_KEYS == 0:
            yield from _drained(keys)
    yield from _drained(keys)


def _lines(stream: IO[bytes]) -> Iterator[str]:
    while line := stream.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE:
            raise ValueError(f"a line is longer than {_LONGEST_LINE} bytes")
        yield line.decode("utf-8-sig")


def _drained(keys: dict[str | None, list[int]]) -> Iterator[TracePart]:
    for table, values in keys.items():
        yield TracePart(table, np.array(values, np.int64))
    keys.clear()


_READERS = {
    "npy": _read_npy,
    "int64": lambda stream: _read_binary(stream, np.dtype("<i8")),
    "int64-be": lambda stream: _read_binary(stream, np.dtype(">i8")),
    "text": _read_text,
    "csv": _read_csv,
}
