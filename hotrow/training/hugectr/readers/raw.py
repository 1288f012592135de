"""The Raw format: one file of records of equal length, labels, dense features and keys of 4 bytes each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.training.hugectr.readers.block import Block, RecordShape, bags_of_counts
from inference_session.errors import ModelFormatError

_RECORDS_PER_BLOCK = 1 << 16


def read_raw(path: Path, shape: RecordShape, num_samples: int, *, float_label_dense: bool) -> Iterator[Block]:
    """The records of a file, of which there must be `num_samples` at least; 0: all.

    Where labels and dense features are integers, dense features become log(feature + 1).

    Raises:
        ModelFormatError: the file ends early, or is no whole number of records.
        OSError: the file cannot be read.
    """
    num_bytes = path.stat().st_size
    counts = _counts(shape, num_samples, num_bytes)
    width = shape.label_dim + shape.dense_dim + int(counts.sum())
    num_records, rest = divmod(num_bytes, 4 * width)
    if num_samples > num_records or (rest and not num_samples):
        expected = f"{num_samples} records" if num_samples else "a whole number of records"
        raise ModelFormatError(f"{path}: {num_bytes} bytes; expected {expected} of {4 * width} bytes")
    records = np.memmap(path, "<i4", "r", shape=(num_records, width)) if num_records else np.empty((0, width), "<i4")
    for begin in range(0, num_samples or num_records, _RECORDS_PER_BLOCK):
        part = records[begin : min(begin + _RECORDS_PER_BLOCK, num_samples or num_records)]
        yield _block(part, shape, counts, is_float=float_label_dense)


def _counts(shape: RecordShape, num_samples: int, num_bytes: int) -> NDArray[np.int64]:
    """Keys of each slot: one, as HugeCTR reads this format, unless the file's size says nnz_per_slot."""
    most = np.array([count for item in shape.sparse for count in item.nnz_per_slot], np.int64)
    head = shape.label_dim + shape.dense_dim
    if num_samples and num_bytes == 4 * num_samples * (head + int(most.sum())):
        return most
    return np.ones(shape.slot_num, np.int64)


def _block(part: NDArray[np.int32], shape: RecordShape, counts: NDArray[np.int64], *, is_float: bool) -> Block:
    head = np.ascontiguousarray(part[:, : shape.label_dim + shape.dense_dim])
    numbers: NDArray[Any] = head.view("<f4") if is_float else head.astype(np.float32)
    dense = np.ascontiguousarray(numbers[:, shape.label_dim :])
    keys = np.ascontiguousarray(part[:, shape.label_dim + shape.dense_dim :]).view("<u4").astype(np.int64)
    return Block(
        np.ascontiguousarray(numbers[:, : shape.label_dim]),
        dense if is_float else np.log1p(dense),
        bags_of_counts(keys.ravel(), np.tile(counts, (len(part), 1)), shape.sparse),
    )
