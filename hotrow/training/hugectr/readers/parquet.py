"""The Parquet format: files with a `_metadata.json` that names their columns of labels, dense features and keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hotrow.training.hugectr.readers.block import Bags, Block, RecordShape, offsets_of
from inference_session.errors import ModelFormatError
from inference_session.importers.hugectr.json_file import JsonFile, read_json

METADATA_FILE = "_metadata.json"
_ROWS_AT_ONCE = 1 << 12
_UINT32_BYTES = 4
_MAX_UINT32 = 2**32 - 1


@dataclass(frozen=True)
class Metadata:
    """The content of `_metadata.json`."""

    path: Path
    labels: tuple[str, ...]
    dense: tuple[str, ...]
    keys: tuple[str, ...]
    """One column per slot."""
    num_rows: dict[str, int]
    """By file name; empty if the file does not say."""


def read_metadata(folder: Path, shape: RecordShape) -> Metadata:
    """Read `_metadata.json` of a folder.

    Raises:
        ModelFormatError: it is missing, malformed, or does not fit the model's Input.
    """
    file = read_json(folder / METADATA_FILE, ModelFormatError)
    labels, dense, keys = (_columns(file, section) for section in ("labels", "conts", "cats"))
    metadata = Metadata(file.path, labels, dense, keys, _num_rows(file))
    if len(metadata.keys) != shape.slot_num:
        file.fail(("cats",), f"{len(metadata.keys)} columns; the model's Input has {shape.slot_num} slots")
    return metadata


def _columns(file: JsonFile, section: str) -> tuple[str, ...]:
    raw = file.document.get(section, [])
    if not isinstance(raw, list) or not all(isinstance(x, dict) and isinstance(x.get("col_name"), str) for x in raw):
        file.fail((section,), "a list of objects with 'col_name' is required")
    return tuple(item["col_name"] for item in raw)


def _num_rows(file: JsonFile) -> dict[str, int]:
    raw = file.document.get("file_stats", [])
    is_valid = isinstance(raw, list) and all(
        isinstance(x, dict) and isinstance(x.get("file_name"), str) and isinstance(x.get("num_rows"), int) for x in raw
    )
    if not is_valid:
        file.fail(("file_stats",), "a list of objects with 'file_name' and 'num_rows' is required")
    return {Path(item["file_name"]).name: item["num_rows"] for item in raw}


class SlotOffsets:
    """Where the keys of each slot begin in their table, by `slot_size_array`; and how many each may have.

    A slot of size 0 shares the keys of the next slot with a size.
    """

    def __init__(self, slot_size_array: Sequence[int], slot_num: int) -> None:
        """ModelFormatError: the array is not as long as there are slots."""
        if slot_size_array and len(slot_size_array) != slot_num:
            raise ModelFormatError(
                f"slot_size_array has {len(slot_size_array)} elements; the model's Input has {slot_num} slots"
            )
        sizes = list(slot_size_array) or [0] * slot_num
        self.first: list[int] = np.cumsum([0, *sizes])[:-1].tolist()
        self.size: list[int] = sizes[:]
        for slot in reversed(range(slot_num - 1)):
            self.size[slot] = self.size[slot] or self.size[slot + 1]


def read_parquet(path: Path, shape: RecordShape, metadata: Metadata, offsets: SlotOffsets) -> Iterator[Block]:
    """The records of one file, a block per row group.

    Raises:
        ModelFormatError: names the file, the row group and the column, what was expected and found.
        OSError: the file cannot be read.
    """
    where = f"{path}"
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:  # of pages that have a checksum
            _check_file(path, file, metadata)
            for group in range(file.num_row_groups):
                where = f"{path}: row group {group}"
                yield _RowGroup(path, group, file.read_row_group(group)).block(shape, metadata, offsets)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise ModelFormatError(f"{where}: cannot be read as Parquet: {' '.join(str(error).split())}") from error


def _check_file(path: Path, file: pq.ParquetFile, metadata: Metadata) -> None:
    found, named = file.schema_arrow.names, {*metadata.labels, *metadata.dense, *metadata.keys}
    if missing := sorted(named - set(found)):
        raise ModelFormatError(f"{path}: lacks the columns {missing}, which {metadata.path} names")
    if unnamed := [name for name in found if name not in named]:
        raise ModelFormatError(
            f"{path}: {metadata.path} does not name the columns {unnamed}; it names {sorted(named)}. "
            "Enter them there, or write the file without them"
        )
    if not metadata.num_rows:
        return
    if path.name not in metadata.num_rows:
        raise ModelFormatError(f"{path}: {metadata.path} does not name the file in 'file_stats'")
    if file.metadata.num_rows != metadata.num_rows[path.name]:
        raise ModelFormatError(
            f"{path}: {file.metadata.num_rows} rows; {metadata.path} says {metadata.num_rows[path.name]}"
        )


@dataclass(frozen=True)
class _RowGroup:
    path: Path
    number: int
    table: pa.Table

    def block(self, shape: RecordShape, metadata: Metadata, offsets: SlotOffsets) -> Block:
        return Block(
            self._floats(metadata.labels, shape.label_dim, "label_dim"),
            self._floats(metadata.dense, shape.dense_dim, "dense_dim"),
            self._bags(shape, metadata, offsets),
        )

    def _floats(self, names: Sequence[str], width: int, what: str) -> NDArray[np.float32]:
        columns = []
        for name in names:
            values, counts = self._values(name, "fiub")
            if counts is not None and len(counts) and (counts != counts[0]).any():
                self._fail(name, "lists of different lengths; labels and dense features have one length")
            columns.append(values.reshape(self.table.num_rows, -1 if len(values) else 0))
        num_found = sum(column.shape[1] for column in columns)
        if self.table.num_rows and num_found != width:
            self._fail(", ".join(names), f"{num_found} elements per row; the model's Input has {what} {width}")
        return _side_by_side(columns, np.empty((self.table.num_rows, width), np.float32))

    def _bags(self, shape: RecordShape, metadata: Metadata, offsets: SlotOffsets) -> tuple[Bags, ...]:
        bags, slot = [], 0
        for item in shape.sparse:
            slots = []
            for position in range(item.slot_num):
                name, most = metadata.keys[slot], item.nnz_per_slot[position]
                read = self._keys(name, offsets.first[slot], offsets.size[slot], most)
                slots.append(self._of_uint32(name, read) if shape.key_bytes == _UINT32_BYTES else read)
                slot += 1
            bags.append(_interleaved(slots))
        return tuple(bags)

    def _keys(self, name: str, first: int, size: int, most: int) -> _Slot:
        keys, counts = self._values(name, "iu")
        if keys.dtype == np.uint64:
            keys = keys.view(np.int64)
        if size and len(keys) and (keys.min() < 0 or keys.max() >= size):
            wrong = int(np.flatnonzero((keys < 0) | (keys >= size))[0])
            row = _row_of(wrong, counts)
            self._fail(name, f"row {row}: key {keys[wrong]}; slot_size_array allows 0 to {size - 1}")
        longest = int(counts.max(initial=0)) if counts is not None else 1
        if longest > most and self.table.num_rows:
            row = 0 if counts is None else int(counts.argmax())
            self._fail(name, f"row {row}: {longest} keys; nnz_per_slot of the model's Input allows {most}")
        return _Slot(keys, counts, first)

    def _of_uint32(self, name: str, slot: _Slot) -> _Slot:
        """Keys that are uint32: negative ones of 32 bits are taken for those, as HugeCTR does; others are refused."""
        keys, low, high = slot.keys, -(2**31), _MAX_UINT32 - slot.first
        if not len(keys) or (int(keys.min()) >= 0 and int(keys.max()) <= high):
            return slot
        wide = keys.astype(np.int64)
        found = np.where((wide < 0) & (wide >= low), wide & _MAX_UINT32, wide)
        wrong = np.flatnonzero((found < 0) | (found > high))
        if len(wrong):
            row = _row_of(int(wrong[0]), slot.counts)
            self._fail(
                name,
                f"row {row}: key {keys[wrong[0]]}; keys are uint32, {low} to {high} here, unless CreateSolver has "
                "i64_input_key=True",
            )
        return replace(slot, keys=found)

    def _values(self, name: str, kinds: str) -> tuple[NDArray[Any], NDArray[np.int64] | None]:
        """The elements of a column, and how many each row has where they are lists."""
        column = self.table.column(name).combine_chunks()
        counts = None
        if pa.types.is_fixed_size_list(column.type):
            column = column.cast(pa.large_list(column.type.value_type))
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            if column.null_count:
                self._fail(name, "a row has no value; missing values are not allowed")
            starts = column.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
            counts, column = np.diff(starts), column.flatten()
        if column.null_count:
            self._fail(name, "a row has no value; missing values are not allowed")
        values = column.to_numpy(zero_copy_only=False)
        if values.dtype.kind not in kinds:
            self._fail(
                name, f"elements of type {column.type}; {'integers' if kinds == 'iu' else 'numbers'} are required"
            )
        return values, counts

    def _fail(self, column: str, message: str) -> None:
        raise ModelFormatError(f"{self.path}: row group {self.number}: column {column!r}: {message}")


@dataclass(frozen=True)
class _Slot:
    """A column of keys."""

    keys: NDArray[Any]
    counts: NDArray[np.int64] | None
    """Of keys, by row; None where each row has one."""
    first: int
    """What its keys begin from in their table."""


def _row_of(position: int, counts: NDArray[np.int64] | None) -> int:
    """The row of an element of a column, whose rows have `counts` elements, or one each."""
    return position if counts is None else int(np.searchsorted(np.cumsum(counts), position, "right"))


def _side_by_side(columns: Sequence[NDArray[Any]], whole: NDArray[Any], firsts: Sequence[int] = ()) -> NDArray[Any]:
    """Write columns [rows, any] into `whole` [rows, all], plus the first key of each if that is given.

    Some rows at a time, because `whole` is written in strides: those should stay in the processor's cache.
    """
    ends = np.cumsum([0, *(column.shape[1] for column in columns)])
    for begin in range(0, len(whole), _ROWS_AT_ONCE):
        rows = slice(begin, begin + _ROWS_AT_ONCE)
        for number, column in enumerate(columns):
            target = whole[rows, ends[number] : ends[number + 1]]
            if firsts and firsts[number]:
                np.add(column[rows], firsts[number], out=target, dtype=np.int64)
            else:
                target[...] = column[rows]
    return whole


def _interleaved(slots: Sequence[_Slot]) -> Bags:
    """Slots side by side, by row."""
    if all(slot.counts is None for slot in slots):
        whole = np.empty((len(slots[0].keys), len(slots)), np.int64)
        columns = [slot.keys[:, np.newaxis] for slot in slots]
        return Bags(_side_by_side(columns, whole, [slot.first for slot in slots]).ravel(), width=1)
    counts = np.stack(
        [np.ones(len(slot.keys), np.int64) if slot.counts is None else slot.counts for slot in slots], axis=1
    )
    offsets = offsets_of(counts)
    keys = np.empty(int(offsets[-1]), np.int64)
    for number, slot in enumerate(slots):
        count = counts[:, number]
        begins = np.repeat(offsets[:-1].reshape(counts.shape)[:, number], count)
        within = np.arange(len(slot.keys)) - np.repeat(offsets_of(count)[:-1], count)
        keys[begins + within] = slot.keys.astype(np.int64) + slot.first
    is_even = counts.size > 0 and counts[0, 0] > 0 and bool((counts == counts[0, 0]).all())
    return Bags(keys, offsets, width=int(counts[0, 0]) if is_even else None)
