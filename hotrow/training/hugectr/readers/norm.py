"""The Norm format: binary files of records with a header of eight int64, with or without checksums."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotrow.training.hugectr.readers import norm_kernel as kernel
from hotrow.training.hugectr.readers.block import Block, RecordShape, bags_of_counts, check_counts
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
_RECORDS_PER_BLOCK = 1 << 16

_FAULTS = {
    kernel.ENDS_EARLY: "the file ends within it",
    kernel.BAD_LENGTH: "its length does not fit its labels, dense features and keys; does the type of keys "
    "(i64_input_key) fit the file?",
    kernel.BAD_CHECKSUM: "its checksum is not the sum of its bytes; the file is damaged",
    kernel.BAD_COUNT: "a slot has a negative number of keys; does the type of keys (i64_input_key) fit the file?",
}


def read_norm(path: Path, shape: RecordShape, *, is_checked: bool) -> Iterator[Block]:
    """The records of one file.

    Raises:
        ModelFormatError: names the file, what was expected and found, and the record.
        OSError: the file cannot be read.
    """
    data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    num_records = _check_header(path, data, shape, is_checked=is_checked)
    at, num_read = HEADER.itemsize, 0
    while num_read < num_records:
        count = min(_RECORDS_PER_BLOCK, num_records - num_read)
        block, at = _read_block(path, data, at, num_read, count, shape, is_checked=is_checked)
        num_read += count
        yield block
    if at != len(data):
        raise ModelFormatError(
            f"{path}: {len(data) - at} bytes after its last record; the header says {num_records} records. "
            "Does the type of keys (i64_input_key) fit the file?"
        )


def _check_header(path: Path, data: NDArray[np.uint8], shape: RecordShape, *, is_checked: bool) -> int:
    if len(data) < HEADER.itemsize:
        raise ModelFormatError(f"{path}: {len(data)} bytes; a file in Norm format begins with {HEADER.itemsize}")
    header = data[: HEADER.itemsize].view(HEADER)[0]
    if int(header["error_check"]) != int(is_checked):
        found, wanted = ("Sum", "Non") if header["error_check"] else ("Non", "Sum")
        raise ModelFormatError(f"{path}: the header says check_type {found}, DataReaderParams says {wanted}")
    for name, expected in (
        ("label_dim", shape.label_dim),
        ("dense_dim", shape.dense_dim),
        ("slot_num", shape.slot_num),
    ):
        if int(header[name]) != expected:
            raise ModelFormatError(f"{path}: the header says {name} {header[name]}, the model's Input {expected}")
    if header["number_of_records"] < 0:
        raise ModelFormatError(f"{path}: the header says {header['number_of_records']} records")
    return int(header["number_of_records"])


def _read_block(
    path: Path, data: NDArray[np.uint8], at: int, first: int, count: int, shape: RecordShape, *, is_checked: bool
) -> tuple[Block, int]:
    """`count` records from byte `at` on, the first of which is number `first`, and where the next begins."""
    label_bytes, head_bytes = 4 * shape.label_dim, 4 * (shape.label_dim + shape.dense_dim)
    heads, counts = np.empty(count, np.int64), np.zeros((count, shape.slot_num), np.int64)
    layout = head_bytes, shape.key_bytes, is_checked
    state, num_whole, next_at = kernel.find_records(data, at, count, *layout, heads, counts)
    if state != kernel.WHOLE:
        raise ModelFormatError(f"{path}: record {first + num_whole} (byte {next_at}): {_FAULTS[state]}")
    check_counts(str(path), first, counts, shape)
    labels = np.empty(label_bytes * count, np.uint8)
    dense = np.empty((head_bytes - label_bytes) * count, np.uint8)
    keys = np.zeros(8 * int(counts.sum()), np.uint8)
    kernel.copy_records(data, count, label_bytes, *layout[:2], heads, counts, labels, dense, keys)
    block = Block(
        labels.view("<f4").reshape(count, shape.label_dim),
        dense.view("<f4").reshape(count, shape.dense_dim),
        bags_of_counts(keys.view("<i8"), counts, shape.sparse),
    )
    return block, int(next_at)
