"""The look-up of segments that stand side by side, unpooled, row by row: the common request of some tables and samples.

A row has one or more keys of each segment. One loop goes through the keys of a row, segment after segment, so that
vectors are written in the order in which they lie. The rows `ahead` of the one that is written have their vectors asked
for, and where tables have an index, the rows twice as far ahead their buckets. Requests of one sample with many tables
thus have all their misses of the processor's caches at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from inference_session.kernels.cpu.hash_index import (
    BUCKET_BYTES,
    candidate_row,
    find_row,
    hash_key,
    home_bucket,
)
from inference_session.kernels.cpu.intrinsics import kernel, load, prefetch_near
from inference_session.kernels.cpu.rows import load_key, mark_hit, row_of, row_of_number
from inference_session.kernels.cpu.stream import MIN_STREAM_KEYS
from inference_session.kernels.cpu.vectors import copy_vector, prefetch_vector_near
from inference_session.kernels.records import PoolingCode, VectorCode

MAX_CELLS = 512
"""Keys of one row, at most; of more, each segment is looked up by itself."""
_AHEAD_BYTES = 4096
_MIN_AHEAD, _MAX_AHEAD = 16, 64
_ENTRIES = 4096
"""Of a ring, a power of 2: the keys of all rows between the farthest that is asked for and the one that is written."""

_NONE, _FLOAT32 = int(PoolingCode.NONE), int(VectorCode.FLOAT32)

CELL = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("segment", "keys_address", "key_bytes", "row_stride", "output_address", "output_stride"),
            *("index_address", "num_buckets", "table_keys_address", "vectors_address", "row_bytes", "num_rows"),
            *("embedding_dim", "vector_code", "default_address", "marks_address", "next_table"),
        )
    ],
    align=True,
)
"""One key of each row: where it is, where its vector goes, and the table's record."""


def new_ring() -> np.ndarray[Any, Any]:
    """Memory for one call at a time: the hashes of keys, then the rows that they are likely in."""
    return np.zeros(2 * _ENTRIES, np.int64)


@kernel
def end_of_interleaved(segments: Any, first: int, last: int) -> int:
    """The segment up to which those from `first` on, below `last`, are looked up together; `first`: none is."""
    num_cells, s = 0, first
    while s < last:
        segment = segments[s]
        num_cells += segment.keys_per_row
        is_even = segment.pooling == _NONE and segment.begins_address == 0
        is_long = segment.num_rows * segment.keys_per_row >= MIN_STREAM_KEYS
        if not is_even or is_long or segment.num_rows != segments[first].num_rows or num_cells > MAX_CELLS:
            break
        s += 1
    return s


@kernel
def look_up_interleaved(
    tables: Any,
    segments: Any,
    first: int,
    last: int,
    cells: Any,
    ring: Any,
    missing_counts: Any,
    missing_positions: Any,
    num_noted: int,
) -> int:
    """Look up segments first ≤ s < last, which stand side by side; returns the number of unknown keys.

    Each segment's are added to `missing_counts`, which hold 0; their positions go to `missing_positions` from
    `num_noted` on. `cells`, CELL[MAX_CELLS], and `ring` are overwritten.
    """
    num_cells, any_hashed = _describe_cells(tables, segments, first, last, cells)
    num_rows = segments[first].num_rows
    if num_cells == 0:
        return 0
    wanted = max(_MIN_AHEAD, min(_MAX_AHEAD, _AHEAD_BYTES // max(cells[0].row_bytes, 1)))
    ahead = (wanted + num_cells - 1) // num_cells
    if any_hashed:
        num_missing = _look_up_mixed(tables, cells, num_cells, num_rows, ahead, ring, missing_counts)
    else:
        num_missing = _look_up_numbered(tables, cells, num_cells, num_rows, ahead, missing_counts)
    if num_missing > 0 and len(missing_positions) > 0:
        return _note_missing(tables, cells, num_cells, num_rows, missing_counts, missing_positions, num_noted)
    return num_missing


@kernel
def _describe_cells(tables: Any, segments: Any, first: int, last: int, cells: Any) -> Any:
    """Fill in the cells; returns how many there are, and whether a table of theirs has an index."""
    c, any_hashed = 0, False
    for s in range(first, last):
        segment = segments[s]
        table = tables[segment.table]
        any_hashed = any_hashed or table.index_address != 0
        for k in range(segment.keys_per_row):
            cell = cells[c]
            cell.segment = s
            cell.keys_address = segment.keys_address + k * segment.key_stride
            cell.key_bytes, cell.row_stride = segment.key_bytes, segment.row_stride
            cell.output_address = segment.output_address + k * 4 * table.embedding_dim
            cell.output_stride = segment.output_stride
            cell.index_address, cell.num_buckets = table.index_address, table.num_buckets
            cell.table_keys_address, cell.vectors_address = table.keys_address, table.vectors_address
            cell.row_bytes, cell.num_rows = table.row_bytes, table.num_rows
            cell.embedding_dim, cell.vector_code = table.embedding_dim, table.vector_code
            cell.default_address, cell.marks_address = table.default_address, table.marks_address
            cell.next_table = table.next_table
            c += 1
    return c, any_hashed


@kernel
def _look_up_numbered(tables: Any, cells: Any, num_cells: int, num_rows: int, ahead: int, missing_counts: Any) -> int:
    for r in range(min(ahead, num_rows)):
        for c in range(num_cells):
            _ask_for_number(cells[c], r)
    num_missing = 0
    for r in range(num_rows):
        for c in range(num_cells):
            cell = cells[c]
            if r + ahead < num_rows:
                _ask_for_number(cell, r + ahead)
            if not _write(tables, cell, r, row_of_number(_key(cell, r), cell.num_rows)):
                missing_counts[cell.segment] += 1
                num_missing += 1
    return num_missing


@kernel
def _look_up_mixed(
    tables: Any, cells: Any, num_cells: int, num_rows: int, ahead: int, ring: Any, missing_counts: Any
) -> int:
    while ahead > 1 and (2 * ahead + 1) * num_cells > _ENTRIES:
        ahead -= 1
    at = np.int64(0)  # of the next key that is written, in the ring
    for r in range(min(2 * ahead, num_rows)):
        for c in range(num_cells):
            _ask_for_bucket(cells[c], r, ring, r * num_cells + c)
    for r in range(min(ahead, num_rows)):
        for c in range(num_cells):
            _ask_for_row(tables, cells[c], r, ring, r * num_cells + c)
    num_missing = 0
    for r in range(num_rows):
        for c in range(num_cells):
            cell = cells[c]
            if r + 2 * ahead < num_rows:
                _ask_for_bucket(cell, r + 2 * ahead, ring, at + 2 * ahead * num_cells)
            if r + ahead < num_rows:
                _ask_for_row(tables, cell, r + ahead, ring, at + ahead * num_cells)
            if not _write(tables, cell, r, _find(cell, r, ring, at)):
                missing_counts[cell.segment] += 1
                num_missing += 1
            at += 1
    return num_missing


@kernel
def _key(cell: Any, r: int) -> Any:
    return load_key(cell.keys_address + r * cell.row_stride, cell.key_bytes)


@kernel
def _ask_for_number(cell: Any, r: int) -> None:
    row = row_of_number(_key(cell, r), cell.num_rows)
    if row >= 0:
        prefetch_vector_near(cell.vectors_address + row * cell.row_bytes, cell.row_bytes)


@kernel
def _ask_for_bucket(cell: Any, r: int, ring: Any, at: int) -> None:
    if cell.index_address != 0:
        hashed = hash_key(_key(cell, r))
        ring[at & (_ENTRIES - 1)] = np.int64(hashed)
        prefetch_near(cell.index_address + BUCKET_BYTES * home_bucket(hashed, cell.num_buckets))


@kernel
def _ask_for_row(tables: Any, cell: Any, r: int, ring: Any, at: int) -> None:
    if cell.index_address == 0:
        _ask_for_number(cell, r)
        return
    hashed = np.uint64(ring[at & (_ENTRIES - 1)])
    row = candidate_row(cell.index_address, cell.num_buckets, cell.num_rows, hashed)
    ring[_ENTRIES + (at & (_ENTRIES - 1))] = row
    if row >= 0:
        prefetch_near(cell.table_keys_address + 8 * row)
        prefetch_vector_near(cell.vectors_address + row * cell.row_bytes, cell.row_bytes)
        if cell.marks_address != 0:
            prefetch_near(cell.marks_address + row)
    elif cell.next_table >= 0:
        _ask_further(tables[cell.next_table], _key(cell, r))


@kernel
def _ask_further(table: Any, key: int) -> None:
    """Ask for what the next table of a chain has of the key, or for its bucket."""
    if table.index_address != 0:
        prefetch_near(table.index_address + BUCKET_BYTES * home_bucket(hash_key(key), table.num_buckets))
        return
    row = row_of_number(key, table.num_rows)
    if row >= 0:
        prefetch_vector_near(table.vectors_address + row * table.row_bytes, table.row_bytes)


@kernel
def _find(cell: Any, r: int, ring: Any, at: int) -> Any:
    """The row of a key, -1 where the table has none."""
    if cell.index_address == 0:
        return row_of_number(_key(cell, r), cell.num_rows)
    row = ring[_ENTRIES + (at & (_ENTRIES - 1))]
    if row >= 0 and load(cell.table_keys_address, np.int64, row) == _key(cell, r):
        return row
    return _find_again(cell, r)


@kernel
def _write(tables: Any, cell: Any, r: int, row: int) -> Any:
    """Answer a key of the row that was found for it in its first table, -1: none; returns whether it is known."""
    output = cell.output_address + r * cell.output_stride
    if row >= 0:
        copy_vector(output, cell.vectors_address + row * cell.row_bytes, cell.vector_code, cell.embedding_dim)
        if cell.marks_address != 0:
            mark_hit(cell.marks_address, row)
        return True
    if cell.next_table >= 0 and _write_further(tables, cell, _key(cell, r), output):
        return True
    if cell.default_address != 0:
        copy_vector(output, cell.default_address, _FLOAT32, cell.embedding_dim)
    return False


@kernel
def _write_further(tables: Any, cell: Any, key: int, output: int) -> Any:
    """Answer a key by the tables behind the first, if they have it."""
    hashed, t = hash_key(key), cell.next_table
    for _ in range(len(tables)):
        if t < 0:
            break
        row = row_of(tables[t], key, hashed)
        if row >= 0:
            source = tables[t].vectors_address + row * tables[t].row_bytes
            copy_vector(output, source, tables[t].vector_code, cell.embedding_dim)
            return True
        t = tables[t].next_table
    return False


@kernel
def _note_missing(
    tables: Any,
    cells: Any,
    num_cells: int,
    num_rows: int,
    missing_counts: Any,
    missing_positions: Any,
    num_noted: int,
) -> int:
    """Note the positions of unknown keys, segment after segment; returns how many there are now.

    A key that a writer has brought into a cache since is answered here; none is left open without being noted.
    """
    c, num_missing = 0, 0
    while c < num_cells:
        segment, width = cells[c].segment, 0
        while c + width < num_cells and cells[c + width].segment == segment:
            width += 1
        if missing_counts[segment] > 0:
            missing_counts[segment] = 0
            for i in range(num_rows * width):
                cell, r = cells[c + i % width], i // width
                if not _write(tables, cell, r, _find_again(cell, r)):
                    missing_positions[num_noted + num_missing] = i
                    missing_counts[segment] += 1
                    num_missing += 1
        c += width
    return num_missing


@kernel
def _find_again(cell: Any, r: int) -> Any:
    key = _key(cell, r)
    if cell.index_address == 0:
        return row_of_number(key, cell.num_rows)
    hashed = hash_key(key)
    return find_row(cell.index_address, cell.num_buckets, cell.table_keys_address, cell.num_rows, key, hashed)
