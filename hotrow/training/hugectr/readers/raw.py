"""The formats Raw and RawAsync: one file of records of equal length, of labels, dense features and keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotrow.training.hugectr.readers.block import Block, RecordShape, SparseInput, even_bags
from inference_session.errors import ModelFormatError


@dataclass(frozen=True)
class RawFormat:
    """How a file's records are written."""

    has_float_labels: bool
    has_float_dense: bool
    """Else dense features are integers, and are read as log(feature + 1)."""
    is_multi_hot: bool = False
    """Each slot has as many keys as nnz_per_slot says, of 4 bytes or 8; else keys have 4 bytes."""

    def key_words(self, shape: RecordShape) -> int:
        """Words of 4 bytes in a key."""
        return shape.key_bytes // 4 if self.is_multi_hot else 1


def read_raw(
    path: Path, shape: RecordShape, form: RawFormat, num_samples: int, *, num_wanted: Callable[[], int]
) -> Iterator[Block]:
    """The records of a file, of which there must be `num_samples` at least; 0: all. Blocks are as `num_wanted` says.

    Raises:
        ModelFormatError: the file ends early, is no whole number of records, or may have one key in a slot or several.
        OSError: the file cannot be read.
    """
    num_bytes = path.stat().st_size
    if not form.is_multi_hot:
        shape = _of_file(path, shape, num_samples, num_bytes)
    width = _num_words(shape, form.key_words(shape))
    num_records, rest = divmod(num_bytes, 4 * width)
    if num_samples > num_records or (rest and not num_samples):
        expected = f"{num_samples} records" if num_samples else "a whole number of records"
        raise ModelFormatError(f"{path}: {num_bytes} bytes; expected {expected} of {4 * width} bytes")
    records = np.memmap(path, "<i4", "r", shape=(num_records, width)) if num_records else np.empty((0, width), "<i4")
    records, begin = records[: num_samples or num_records], 0
    while begin < len(records):
        part = np.asarray(records[begin : begin + num_wanted()])
        yield _block(_Records(path, begin, part), shape, form)
        begin += len(part)


def _num_words(shape: RecordShape, key_words: int = 1) -> int:
    """Words of 4 bytes in a record."""
    return shape.label_dim + shape.dense_dim + int(shape.most_keys.sum()) * key_words


def _of_file(path: Path, shape: RecordShape, num_samples: int, num_bytes: int) -> RecordShape:
    """Each slot has one key, as HugeCTR reads this format, or as many as nnz_per_slot says: the file's size decides."""
    sparse = tuple(replace(item, nnz_per_slot=(1,) * item.slot_num) for item in shape.sparse)
    one_each, several = replace(shape, sparse=sparse), shape
    numbers = [divmod(num_bytes, 4 * _num_words(each)) for each in (one_each, several)]
    fit = [not rest and number >= num_samples for number, rest in numbers]
    if fit != [True, True] or several == one_each:
        return several if fit == [False, True] else one_each
    whole = [number for number, _ in numbers]
    if num_samples not in whole:
        raise ModelFormatError(
            f"{path}: {num_bytes} bytes are {whole[0]} records with one key in each slot, or {whole[1]} with as many "
            "as nnz_per_slot says; give the right one of these numbers as num_samples, or make nnz_per_slot 1"
        )
    return several if num_samples == whole[1] else one_each


class _Records(NamedTuple):
    """Some records of a file."""

    path: Path
    first: int
    values: NDArray[np.int32]


def _block(records: _Records, shape: RecordShape, form: RawFormat) -> Block:
    head, words = shape.label_dim + shape.dense_dim, form.key_words(shape)
    labels, dense = (
        _copied(part.view("<f4") if is_float else part)
        for part, is_float in (
            (records.values[:, : shape.label_dim], form.has_float_labels),
            (records.values[:, shape.label_dim : head], form.has_float_dense),
        )
    )
    if not form.has_float_dense:
        _check_logarithms(records, shape.label_dim, dense)
        dense = np.log(np.add(dense, 1.0, out=dense), out=dense)  # NumPy's log1p takes three times as long
    ends = np.cumsum([head, *(sum(item.nnz_per_slot) * words for item in shape.sparse)])
    own = [
        _unique_over_slots(records, item, _keys(records.values[:, ends[i] : ends[i + 1]], words)).ravel()
        for i, item in enumerate(shape.sparse)
    ]
    return Block(labels, dense, tuple(map(even_bags, shape.sparse, own)))


def _check_logarithms(records: _Records, begin: int, dense: NDArray[np.float32]) -> None:
    if dense.min(initial=0) > -1:
        return
    record, column = np.argwhere(dense <= -1)[0]
    found = records.values[record, begin + column]
    raise ModelFormatError(
        f"{records.path}: record {records.first + record}: the dense feature {column} is {found}; integers are read as "
        "log(feature + 1), so they must be 0 or more. Does the file have float features (float_label_dense)?"
    )


def _keys(part: NDArray[np.int32], words: int) -> NDArray[np.int64]:
    """uint32 keys, or int64 ones of two words each, as int64."""
    return np.ascontiguousarray(part).view("<u4" if words == 1 else "<i8").astype(np.int64)


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
