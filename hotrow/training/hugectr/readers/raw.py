"""The Raw format: one file of records of equal length, labels, dense features and keys of 4 bytes each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotrow.training.hugectr.readers.block import Block, RecordShape, SparseInput, even_bags
from inference_session.errors import ModelFormatError


def read_raw(
    path: Path, shape: RecordShape, num_samples: int, *, float_label_dense: bool, num_wanted: Callable[[], int]
) -> Iterator[Block]:
    """The records of a file, of which there must be `num_samples` at least; 0: all. Blocks are as `num_wanted` says.

    Where labels and dense features are integers, dense features become log(feature + 1).

    Raises:
        ModelFormatError: the file ends early, or is no whole number of records.
        OSError: the file cannot be read.
    """
    num_bytes = path.stat().st_size
    shape = _of_file(shape, num_samples, num_bytes)
    width = shape.label_dim + shape.dense_dim + int(shape.most_keys.sum())
    num_records, rest = divmod(num_bytes, 4 * width)
    if num_samples > num_records or (rest and not num_samples):
        expected = f"{num_samples} records" if num_samples else "a whole number of records"
        raise ModelFormatError(f"{path}: {num_bytes} bytes; expected {expected} of {4 * width} bytes")
    records = np.memmap(path, "<i4", "r", shape=(num_records, width)) if num_records else np.empty((0, width), "<i4")
    records, begin = records[: num_samples or num_records], 0
    while begin < len(records):
        part = np.asarray(records[begin : begin + num_wanted()])
        yield _block(_Records(path, begin, part), shape, is_float=float_label_dense)
        begin += len(part)


def _of_file(shape: RecordShape, num_samples: int, num_bytes: int) -> RecordShape:
    """Each slot has one key, as HugeCTR reads this format, unless the file's size says nnz_per_slot."""
    head = shape.label_dim + shape.dense_dim
    if num_samples and num_bytes == 4 * num_samples * (head + int(shape.most_keys.sum())):
        return shape
    return replace(shape, sparse=tuple(replace(item, nnz_per_slot=(1,) * item.slot_num) for item in shape.sparse))


class _Records(NamedTuple):
    """Some records of a file."""

    path: Path
    first: int
    values: NDArray[np.int32]


def _block(records: _Records, shape: RecordShape, *, is_float: bool) -> Block:
    part = records.values
    numbers, keys = part.view("<f4") if is_float else part, part.view("<u4")
    head = shape.label_dim + shape.dense_dim
    dense = _copied(numbers[:, shape.label_dim : head])
    if not is_float:
        dense = np.log(np.add(dense, 1.0, out=dense), out=dense)  # NumPy's log1p takes three times as long
    ends = np.cumsum([head, *(sum(item.nnz_per_slot) for item in shape.sparse)])
    own = [
        _unique_over_slots(records, item, keys[:, ends[i] : ends[i + 1]].astype(np.int64, order="C")).ravel()
        for i, item in enumerate(shape.sparse)
    ]
    return Block(_copied(numbers[:, : shape.label_dim]), dense, tuple(map(even_bags, shape.sparse, own)))


def _unique_over_slots(records: _Records, item: SparseInput, keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Keys that count per slot, each behind those of the slots before it; ModelFormatError names one out of range."""
    if not item.slot_sizes:
        return keys
    sizes = np.repeat(item.slot_sizes, item.nnz_per_slot)
    wrong = keys >= sizes
    if wrong.any():
        record, column = np.argwhere(wrong)[0]
        raise ModelFormatError(
            f"{records.path}: record {records.first + record}: key {keys[record, column]} in column {column} of "
            f"{item.name!r}; slot_size_array allows less than {sizes[column]}"
        )
    return keys + np.repeat(np.cumsum([0, *item.slot_sizes[:-1]]), item.nnz_per_slot)


def _copied(numbers: NDArray[np.generic]) -> NDArray[np.float32]:
    return numbers.astype(np.float32, order="C")
