"""The Norm format: binary files of a header of eight int64, and records.

In files with checksums, the length precedes the header and each record, and the sum of its bytes follows it. HugeCTR's
manual shows the header without them, so such files are read too.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotrow.training.hugectr.readers import norm_kernel as kernel
from hotrow.training.hugectr.readers.block import Bags, Block, RecordShape, even_bags
from inference_session.errors import ModelFormatError

HEADER = np.dtype(
    [
        ("error_check", "<i8"),
        ("number_of_records", "<i8"),
        ("label_dim", "<i8"),
        ("dense_dim", "<i8"),
        ("slot_num", "<i8"),
        ("reserved", "<i8", 3),
    ]
)
_LENGTH = HEADER.itemsize.to_bytes(4, "little")
CHECKED_HEADER_BYTES = len(_LENGTH) + HEADER.itemsize + 1
_KEY_TYPE = "does the type of keys (i64_input_key) fit the file?"
_FAULTS = {
    kernel.ENDS_EARLY: "the file ends within it",
    kernel.BAD_LENGTH: f"its length does not fit its labels, dense features and keys; {_KEY_TYPE}",
    kernel.BAD_CHECKSUM: "its checksum is not the sum of its bytes; the file is damaged",
    kernel.BAD_COUNT: f"a slot has a negative number of keys; {_KEY_TYPE}",
}


def read_norm(path: Path, shape: RecordShape, *, is_checked: bool, num_wanted: Callable[[], int]) -> Iterator[Block]:
    """The records of one file, in blocks of as many as `num_wanted` says, or fewer at the end.

    Raises:
        ModelFormatError: names the file, what was expected and found, and the record.
        OSError: the file cannot be read.
    """
    data = _mapped(path)
    num_records, begin = _check_header(path, data, shape, is_checked=is_checked)
    reader = _Reader(path, data, shape, is_checked, begin)
    while reader.num_read < num_records:
        yield reader.read(min(num_wanted(), num_records - reader.num_read))
    if reader.at != len(data):
        raise ModelFormatError(
            f"{path}: {len(data) - reader.at} bytes after its last record; the header says {num_records} records. "
            "Does the type of keys (i64_input_key) fit the file?"
        )


def _mapped(path: Path) -> NDArray[np.uint8]:
    with path.open("rb") as file:
        if not path.stat().st_size:
            return np.empty(0, np.uint8)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    mapped.madvise(mmap.MADV_SEQUENTIAL)
    return np.frombuffer(mapped, np.uint8)


def _check_header(path: Path, data: NDArray[np.uint8], shape: RecordShape, *, is_checked: bool) -> tuple[int, int]:
    """The number of records, and the byte where the first one begins."""
    header, end = _header(path, data, is_checked=is_checked)
    for name, expected in (
        ("label_dim", shape.label_dim),
        ("dense_dim", shape.dense_dim),
        ("slot_num", shape.slot_num),
    ):
        if int(header[name]) != expected:
            raise ModelFormatError(f"{path}: the header says {name} {header[name]}, the model's Input {expected}")
    if header["number_of_records"] < 0:
        raise ModelFormatError(f"{path}: the header says {header['number_of_records']} records; expected 0 or more")
    return int(header["number_of_records"]), end


def _header(path: Path, data: NDArray[np.uint8], *, is_checked: bool) -> tuple[np.void, int]:
    """The header, and the byte behind it, or behind its checksum."""
    has_length = data[: len(_LENGTH)].tobytes() == _LENGTH
    begin, num_bytes = (len(_LENGTH), CHECKED_HEADER_BYTES) if has_length else (0, HEADER.itemsize)
    if len(data) < num_bytes:
        expected = CHECKED_HEADER_BYTES if is_checked else HEADER.itemsize
        raise ModelFormatError(f"{path}: {len(data)} bytes; a file in Norm format has a header of {expected}")
    header: np.void = data[begin : begin + HEADER.itemsize].view(HEADER)[0]
    found, wanted = ("Sum" if checked else "Non" for checked in (header["error_check"], is_checked))
    if found != wanted:
        raise ModelFormatError(f"{path}: the header says check_type {found}, DataReaderParams says {wanted}")
    if has_length and data[begin : num_bytes - 1].sum(dtype=np.uint8) != data[num_bytes - 1]:
        raise ModelFormatError(f"{path}: the header's checksum is not the sum of its bytes; the file is damaged")
    return header, num_bytes


@dataclass
class _Reader:
    """Where the next record of a file begins."""

    path: Path
    data: NDArray[np.uint8]
    shape: RecordShape
    is_checked: bool
    at: int
    num_read: int = 0
    is_even: bool = True
    """Whether all slots so far had as many keys as they may have, so that offsets need not be written."""

    def read(self, count: int) -> Block:
        """The next records; ModelFormatError names the one that is damaged."""
        block, result = self._read(count)
        if result[kernel.STATE] == kernel.UNEVEN:
            self.is_even = False
            block, result = self._read(count)
        if result[kernel.STATE] != kernel.WHOLE:
            self._fail(result)
        self.at = int(result[kernel.NEXT])
        self.num_read += count
        return block

    def _read(self, count: int) -> tuple[Block, NDArray[np.int64]]:
        shape = self.shape
        labels, dense = np.empty((count, shape.label_dim), "<f4"), np.empty((count, shape.dense_dim), "<f4")
        keys = [self._room_for_keys(count * sum(item.nnz_per_slot)) for item in shape.sparse]
        sizes = [0 if self.is_even else count * item.slot_num for item in shape.sparse]
        offsets = [np.zeros(size + 1, np.int64) for size in sizes]
        begins, result = _addresses(keys), np.zeros(5, np.int64)
        form = kernel.RecordFormat(
            4 * shape.label_dim,
            4 * (shape.label_dim + shape.dense_dim),
            shape.key_bytes,
            self.is_checked,
            self.is_even,
            shape.most_keys,
            shape.slot_ends,
        )
        to = kernel.Target(
            labels.ctypes.data, dense.ctypes.data, begins.copy(), keys_begin=begins, offsets=_addresses(offsets) + 8
        )
        kernel.read_records(self.data.ctypes.data, len(self.data), self.at, count, form, to, result)
        found = [array[:end] for array, end in zip(keys, (to.keys - begins) // 8, strict=True)]
        bags = map(even_bags, shape.sparse, found) if self.is_even else map(Bags, found, offsets)
        return Block(labels, dense, tuple(bags)), result

    def _room_for_keys(self, most: int) -> NDArray[np.int64]:
        """Keys cannot be more than the rest of the file has bytes for."""
        return np.empty(min(most, (len(self.data) - self.at) // self.shape.key_bytes), np.int64)

    def _fail(self, result: NDArray[np.int64]) -> None:
        state, number, at, slot, count = result.tolist()
        fault = _FAULTS.get(state) or (
            f"slot {slot} has {count} keys; nnz_per_slot of the model's Input allows {self.shape.most_keys[slot]}; "
            f"{_KEY_TYPE}"
        )
        raise ModelFormatError(f"{self.path}: record {self.num_read + number} (byte {at}): {fault}")


def _addresses(arrays: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.array([array.ctypes.data for array in arrays], np.int64)
