"""Files in whole large pages: the same bytes for any pieces, and whether the kernel uses large pages."""

from __future__ import annotations

import hashlib
import math
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from inference_session.platform.large_pages import (
    LARGE_PAGE_BYTES,
    LargePageWriter,
    copy_file,
    open_for_writing,
    write_zeros,
)
from inference_session.platform.mapped_large_pages import large_page_fraction, mapped_large_bytes
from inference_session.platform.memory import map_pages, read_ahead
from inference_session.version_directory.manifest import sha256_of

SIZES = st.lists(
    st.one_of(
        st.integers(0, 9), st.sampled_from([-1, 0, 1]).map(lambda d: LARGE_PAGE_BYTES + d), st.integers(0, 5 << 20)
    ),
    max_size=8,
)


class RecordingFile:
    """A file that remembers where each write began, and takes only a part of some."""

    def __init__(self, begin: int) -> None:
        self.content, self.begin, self.writes = bytearray(begin), begin, list[tuple[int, int]]()

    def tell(self) -> int:
        return len(self.content)

    def write(self, data: memoryview) -> int:
        self.writes.append((len(self.content), len(data)))
        self.content += data
        return len(data)


@given(sizes=SIZES, begin=st.sampled_from([0, 1, LARGE_PAGE_BYTES - 1, LARGE_PAGE_BYTES, 3 * LARGE_PAGE_BYTES + 5]))
def test_pieces(sizes: list[int], begin: int) -> None:
    """All bytes come, in order, and each write but the first and the last is of whole pages."""
    data = np.random.default_rng(sum(sizes)).integers(0, 256, sum(sizes), np.uint8)
    file = RecordingFile(begin)
    writer, offset = LargePageWriter(file), 0  # type: ignore[arg-type]
    for size in sizes:
        writer.write(data[offset : offset + size].data)
        offset += size
    writer.close()

    assert bytes(file.content[begin:]) == data.tobytes()
    first = LARGE_PAGE_BYTES - begin % LARGE_PAGE_BYTES
    for i, (place, size) in enumerate(file.writes):
        assert place % LARGE_PAGE_BYTES == 0 or i == 0
        assert size % LARGE_PAGE_BYTES == 0 or i + 1 == len(file.writes) or (i == 0 and size == first)


def keeps_large_pages(path: Path) -> bool:
    """Whether this kernel and file system use large pages for the file under ideal conditions, now."""
    path.write_bytes(bytes(4 * LARGE_PAGE_BYTES))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        content = np.frombuffer(mapped, np.uint8)
        content[::4096].sum()
        found = mapped_large_bytes(content)
        del content
    return found == 4 * LARGE_PAGE_BYTES


def test_how_a_file_is_mapped(tmp_path: Path) -> None:
    """A file that was written in pieces, copied or filled is in large pages, one in small pieces is not."""
    data = np.random.default_rng(0).integers(0, 256, 5 * LARGE_PAGE_BYTES + 7, np.uint8)
    keeps_before = keeps_large_pages(tmp_path / "probe before")
    written, copied, zeros, small = (tmp_path / name for name in ("written", "copied", "zeros", "small"))
    with open_for_writing(written, "xb") as file:
        for begin in range(0, len(data), 100_000):
            file.write(data[begin : begin + 100_000])
    copy_file(written, copied)
    write_zeros(zeros, 3 * LARGE_PAGE_BYTES)
    with small.open("wb", buffering=0) as plain:
        for begin in range(0, len(data), 65536):
            plain.write(data[begin : begin + 65536].data)

    assert written.read_bytes() == copied.read_bytes() == small.read_bytes() == data.tobytes()
    assert zeros.read_bytes() == bytes(3 * LARGE_PAGE_BYTES)
    assert large_page_fraction(small) == 0.0
    # The kernel has large pages while memory is not in small pieces: other processes change that at any time.
    at_least = 1.0 if keeps_before and keeps_large_pages(tmp_path / "probe after") else 0.0
    assert all(at_least <= (large_page_fraction(path) or 0.0) <= 1.0 for path in (written, copied, zeros))


def write_and_drop(path: Path, data: NDArray[np.uint8]) -> None:
    """A file in small pieces, as programs copy files, that is not in memory any more."""
    with path.open("wb", buffering=0) as file:
        for begin in range(0, len(data), 65536):
            file.write(data[begin : begin + 65536].data)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def share_read_in_large_pages(path: Path, data: NDArray[np.uint8]) -> float:
    """How much of a dropped file the kernel reads in large pages to map it."""
    write_and_drop(path, data)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        content = np.frombuffer(mapped, np.uint8)
        map_pages(content[1:], math.inf)
        assert np.array_equal(content[::-1], data[::-1])
        found = mapped_large_bytes(content)
        del content
    return found / len(data)


def test_how_a_file_is_read(tmp_path: Path) -> None:
    """Reading for a checksum leaves a file in large pages where a mapping does, and gives the same bytes."""
    data = np.random.default_rng(1).integers(0, 256, 4 * LARGE_PAGE_BYTES, np.uint8)
    before = share_read_in_large_pages(tmp_path / "probe before", data)
    write_and_drop(tmp_path / "read", data)

    assert sha256_of(tmp_path / "read") == hashlib.sha256(data).hexdigest()
    found = large_page_fraction(tmp_path / "read")
    # As above: on a machine whose memory is in small pieces there may be no large pages.
    after = share_read_in_large_pages(tmp_path / "probe after", data)
    assert found == 1.0 or min(before, after) < 1.0


@pytest.mark.parametrize("num_bytes", [0, 1, LARGE_PAGE_BYTES, (4 << 20) - 1, 4 << 20, (8 << 20) + 5])
def test_checksums_of_any_size(tmp_path: Path, num_bytes: int) -> None:
    """Also at the end of a piece that is read, and of no bytes."""
    data = np.random.default_rng(num_bytes).bytes(num_bytes)
    (tmp_path / "file").write_bytes(data)
    assert sha256_of(tmp_path / "file") == hashlib.sha256(data).hexdigest()


def test_reading_ahead_in_a_file_that_is_cut_meanwhile(tmp_path: Path) -> None:
    """Reading on tells that."""
    path = tmp_path / "file"
    path.write_bytes(bytes(2 * LARGE_PAGE_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(2 * LARGE_PAGE_BYTES)
        os.truncate(path, 1)
        read_ahead(file, LARGE_PAGE_BYTES)
        assert file.read(1) == b""


def test_appending(tmp_path: Path) -> None:
    """Rows may be added to a file that exists."""
    path = tmp_path / "rows"
    path.write_bytes(b"one")
    with open_for_writing(path, "ab") as file:
        file.write(np.arange(3, dtype=np.int64))
        file.write(b"")
    assert path.read_bytes() == b"one" + np.arange(3, dtype=np.int64).tobytes()


def test_small_files(tmp_path: Path) -> None:
    """A file smaller than a large page has none to report."""
    write_zeros(tmp_path / "small", LARGE_PAGE_BYTES - 1)
    write_zeros(tmp_path / "empty", 0)
    assert large_page_fraction(tmp_path / "small") is None
    assert large_page_fraction(tmp_path / "empty") is None


def test_a_full_disk_is_named() -> None:
    """The error says which file could not be written."""
    with pytest.raises(OSError, match="/dev/full"), open_for_writing(Path("/dev/full")) as file:
        file.write(bytes(LARGE_PAGE_BYTES))
