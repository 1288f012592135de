"""Files of keys: each format reads back what was written, and names the fault of other files."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_session.errors import TraceFormatError
from inference_session.sizing import trace_file
from inference_session.sizing.trace_file import read_trace

_KEYS = np.array([3, -1, 2**63 - 1, -(2**63), 0, 3], np.int64)


def _read(path: Path, trace_format: str = "auto") -> list[tuple[str | None, int]]:
    return [(part.table, key) for part in read_trace(path, trace_format) for key in part.keys.tolist()]


def _keys(path: Path, trace_format: str = "auto") -> list[int]:
    return [key for _, key in _read(path, trace_format)]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files, too, are read in several pieces."""
    monkeypatch.setattr(trace_file, "CHUNK_KEYS", 4)
    monkeypatch.setattr(trace_file, "CHUNK_BYTES", 7)


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)]
)
@pytest.mark.parametrize("name", ["t.npy", "t.bin", "t.txt"])
def test_formats_and_compression(tmp_path: Path, name: str, suffix: str, compress: Callable[[bytes], bytes]) -> None:
    """The ending says both."""
    plain = tmp_path / name
    if name == "t.npy":
        np.save(plain, _KEYS)
    elif name == "t.bin":
        _KEYS.astype("<i8").tofile(plain)
    else:
        plain.write_text("3 -1,9223372036854775807\n-9223372036854775808\n\n0, 3")
    packed = tmp_path / (name + suffix)
    packed.write_bytes(compress(plain.read_bytes()))

    assert _keys(plain) == _keys(packed) == _KEYS.tolist()


def test_byte_order_is_an_option(tmp_path: Path) -> None:
    """Raw keys are little endian unless said otherwise."""
    path = tmp_path / "keys.trace"
    _KEYS.astype(">i8").tofile(path)

    assert _keys(path, "int64-be") == _KEYS.tolist()
    assert _keys(path) == _KEYS.byteswap().tolist()


def test_csv_names_its_tables(tmp_path: Path) -> None:
    """Columns may be in any order, and others are passed over."""
    path = tmp_path / "t.csv"
    path.write_text("time,Key,table\n1,5,user\n2,-6,item\n3,7,user\n4,8,user\n5,9,item\n")

    read = _read(path)

    assert [key for table, key in read if table == "user"] == [5, 7, 8]
    assert [key for table, key in read if table == "item"] == [-6, 9]


def test_csv_without_tables(tmp_path: Path) -> None:
    """One column will do."""
    path = tmp_path / "t.csv"
    path.write_text("key\n5\n6\n")

    assert _read(path) == [(None, 5), (None, 6)]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("t.bin", b"1234567", "7 bytes are left over; a key has 8"),
        ("t.txt", b"1 2 x 3", "b'x' is not a whole number"),
        ("t.txt", b"9" * 30, "is larger than 64 bits"),
        ("t.txt", b"9" * 3000, "is not a number"),
        ("t.txt", b"1.5", "b'1.5' is not a whole number"),
        ("t.csv", b"user,item\n1,2\n", "no column 'key'; columns: 'user', 'item'"),
        ("t.csv", b"", "no column 'key'; columns: nothing"),
        ("t.csv", b"table,key\na,1\n2\n", "row 2 has 1 columns, the header 2"),
        ("t.csv", b"key\n1\ntwo\n", "'two' is not a whole number"),
        ("t.csv", b"key\n1\n\xff\n", "codec can't decode"),
        ("t.npy", b"\x93NUMPY", "EOF"),
        ("t.npy", b"PK\x03\x04 not numpy's", "magic"),
        ("t.npz", b"PK\x03\x04 an archive, whole keys", "magic"),
        ("t.npy.gz", b"not gzip", "Not a gzipped file"),
        ("t.xz", b"not xz", "not supported|corrupt"),
        ("t.bin.xz", lzma.compress(_KEYS.tobytes())[:-20], "end-of-stream|Compressed file ended"),
        ("t.bin.gz", gzip.compress(_KEYS.tobytes(), mtime=0)[:-9], "end-of-stream|Compressed file ended"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    """The error names the file and the fault."""
    path = tmp_path / name
    path.write_bytes(content)

    with pytest.raises(TraceFormatError, match=rf"{name}: not a trace of format '\w+': .*({complaint})"):
        _keys(path)


@pytest.mark.parametrize("array", [np.array([1.5]), np.array([1], np.uint64), np.array([{"a": 1}], object)])
def test_only_whole_numbers_are_keys(tmp_path: Path, array: np.ndarray) -> None:
    """Floats, unsigned 64 bits and pickled objects are refused by their type, unread."""
    path = tmp_path / "t.npy"
    np.save(path, array, allow_pickle=True)

    with pytest.raises(TraceFormatError, match="expected int64 or narrower integers"):
        _keys(path)


def test_narrow_types_and_shapes(tmp_path: Path) -> None:
    """A matrix is read row by row."""
    path = tmp_path / "t.npy"
    np.save(path, np.arange(6, dtype=np.int32).reshape(2, 3))

    assert _keys(path) == list(range(6))


def test_an_npy_file_cut_short(tmp_path: Path) -> None:
    """The header's shape is compared with the size of the data."""
    path = tmp_path / "t.npy"
    np.save(path, _KEYS)
    path.write_bytes(path.read_bytes()[:-8])

    with pytest.raises(TraceFormatError, match="holds 5 elements, but its header says"):
        _keys(path)


@given(content=st.binary(max_size=300), name=st.sampled_from(["t.npy", "t.txt", "t.csv", "t.gz", "t.npy.xz", "t"]))
def test_any_bytes_are_keys_or_an_error(tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str) -> None:
    """A foreign file raises only TraceFormatError."""
    path = tmp_path_factory.mktemp("t") / name
    path.write_bytes(content if name != "t.npy" else b"\x93NUMPY\x01\x00" + content)

    try:
        keys = _keys(path)
    except TraceFormatError:
        return
    assert all(-(2**63) <= key < 2**63 for key in keys)
