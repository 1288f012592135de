"""Files that the kernel can map in pages of 2 MiB: look-ups at random places then miss the address cache less often.

File systems with large folios (XFS; ext4 from Linux 6.16 on) keep in one page what one write fills of 2 MiB that begin
at a multiple of 2 MiB. Smaller or shifted writes leave pages of 4 KiB as long as the file stays in memory.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, Literal

LARGE_PAGE_BYTES = 2 << 20
_COPY_BYTES = 8 * LARGE_PAGE_BYTES
_FICLONE = 0x40049409
"""Lets a file share the blocks of another, on file systems that can do that."""


class LargePageWriter:
    """A file that is written in whole large pages, whatever the size of single writes; use `open_for_writing`."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._buffer = bytearray(LARGE_PAGE_BYTES)
        self._num_held = 0
        self._page_offset = file.tell() % LARGE_PAGE_BYTES
        """The offset of the first held byte in its page."""

    def write(self, data: Any) -> None:
        """Append anything that is contiguous in memory."""
        view = memoryview(data)
        rest = view.cast("B") if view.nbytes else memoryview(b"")
        while rest:
            room = LARGE_PAGE_BYTES - self._page_offset - self._num_held
            if not self._num_held and not self._page_offset and len(rest) >= LARGE_PAGE_BYTES:
                whole = len(rest) - len(rest) % LARGE_PAGE_BYTES
                self._write(rest[:whole])
                rest = rest[whole:]
                continue
            part = rest[:room]
            self._buffer[self._num_held : self._num_held + len(part)] = part
            self._num_held += len(part)
            if len(part) == room:
                self._write_held()
            rest = rest[len(part) :]

    def flush(self) -> None:
        """Write what is held, and flush the file to the disk."""
        self._write_held()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write what is held."""
        self._write_held()

    def _write_held(self) -> None:
        self._write(memoryview(self._buffer)[: self._num_held])
        self._page_offset = (self._page_offset + self._num_held) % LARGE_PAGE_BYTES
        self._num_held = 0

    def _write(self, data: memoryview) -> None:
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            error.filename = self._file.name  # the error of a full disk does not name the file
            raise


@contextmanager
def open_for_writing(path: Path, mode: Literal["wb", "xb", "ab"] = "wb") -> Iterator[LargePageWriter]:
    """A file to be written from begin to end, or with `ab` to be appended to; see Path.open for the modes."""
    with path.open(mode, buffering=0) as file:
        writer = LargePageWriter(file)
        yield writer
        writer.close()


def copy_file(source: Path, target: Path) -> None:
    """Copy a file to one that does not exist, or share its blocks where the file system can."""
    with source.open("rb", buffering=0) as original, target.open("xb", buffering=0) as file:
        try:
            fcntl.ioctl(file.fileno(), _FICLONE, original.fileno())
        except OSError:
            writer, buffer = LargePageWriter(file), memoryview(bytearray(_COPY_BYTES))
            while num_bytes := original.readinto(buffer):
                writer.write(buffer[:num_bytes])
            writer.close()


def write_zeros(path: Path, num_bytes: int) -> None:
    """A new file of zeros, which replaces an existing one."""
    zeros = bytes(LARGE_PAGE_BYTES)
    with open_for_writing(path) as file:
        for begin in range(0, num_bytes, LARGE_PAGE_BYTES):
            file.write(memoryview(zeros)[: num_bytes - begin])
