"""The look-up of segments that stand side by side, unpooled, row by row: the common request of some tables and samples.

A row has one or more keys of each segment. A tile is some rows: it is answered key column by key column, so that what
a column needs is read once per tile. While a tile is written, the vectors of the next tile are asked for, and where
tables have an index, the buckets of the tile after that. Requests of one sample with many tables thus have all their
misses of the processor's caches at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from inference_session.kernels.cpu.hash_index import BUCKET_BYTES, candidate_row, find_row, hash_key, home_bucket
from inference_session.kernels.cpu.intrinsics import kernel, load, prefetch
from inference_session.kernels.cpu.rows import load_key, mark_hit, row_of, row_of_number
from inference_session.kernels.cpu.stream import MIN_STREAM_KEYS, SHORT_ROW_BYTES
from inference_session.kernels.cpu.vectors import copy_floats, copy_vector, prefetch_vector
from inference_session.kernels.records import PoolingCode, VectorCode

MAX_CELLS = 512
"""Keys of one row, at most; of more, each segment is looked up by itself."""
_TILE_BYTES, _MIN_TILE, _MAX_TILE = 32 << 10, 16, 512
"""What is asked for in one go: bytes of vectors, and the least and the largest number of keys."""
_ENOUGH_KEYS = 512
"""Segments with at most this many keys are looked up together; with more, a tile would have fewer rows."""
_MANY_ROWS = 64
"""From this many rows on, the number of segments that are looked up together does not depend on how many."""
_FEW_CELLS = 4
"""Long segments are looked up together if their vectors are short, and one by one if they have fewer cells: writing
short vectors column by column touches every row of the matrix once for each column.
"""
_ENTRIES = 4096
"""Of a ring, a power of 2: the keys of all rows between the farthest that is asked for and the one that is written."""

_INT64, _INT32 = 8, 4
"""Bytes of a key."""
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
def end_of_interleaved(tables: Any, segments: Any, first: int, last: int) -> int:
    """The segment up to which those from `first` on, below `last`, are looked up together; `first`: none is."""
    num_cells, s = 0, first
    while s < last and num_cells * min(segments[first].num_rows, _MANY_ROWS) < _ENOUGH_KEYS:
        segment = segments[s]
        is_even = segment.pooling == _NONE and segment.begins_address == 0
        is_stream = _is_long(segment) and not _is_scattered(tables[segment.table], segment)
        has_room = num_cells + segment.keys_per_row <= MAX_CELLS
        if not is_even or is_stream or segment.num_rows != segments[first].num_rows or not has_room:
            break
        num_cells += segment.keys_per_row
        s += 1
    return first if s > first and num_cells < _FEW_CELLS and _is_long(segments[first]) else s


@kernel
def _is_long(segment: Any) -> Any:
    return segment.num_rows * segment.keys_per_row >= MIN_STREAM_KEYS


@kernel
def _is_scattered(table: Any, segment: Any) -> Any:
    """Whether short vectors, found by row numbers, go to rows of a matrix that is wider than they are."""
    if table.index_address != 0 or table.vector_code != _FLOAT32 or table.row_bytes > SHORT_ROW_BYTES:
        return False
    return segment.output_stride > segment.keys_per_row * table.row_bytes


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
    wanted = max(_MIN_TILE, min(_MAX_TILE, _TILE_BYTES // max(cells[0].row_bytes, 1)))
    tile = max(wanted // num_cells, 1)
    if any_hashed:
        num_missing = _look_up_mixed(tables, cells, num_cells, num_rows, tile, ring, missing_counts)
    else:
        num_missing = _look_up_numbered(tables, cells, num_cells, num_rows, tile, missing_counts)
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
def _look_up_numbered(tables: Any, cells: Any, num_cells: int, num_rows: int, tile: int, missing_counts: Any) -> int:
    for c in range(num_cells):
        _ask_for_numbers(cells[c], np.int64(0), min(tile, num_rows))
    num_missing = 0
    for first in range(0, num_rows, tile):
        second, third = min(first + tile, num_rows), min(first + 2 * tile, num_rows)
        for c in range(num_cells):
            _ask_for_numbers(cells[c], second, third)
            missing = _write_numbered(tables, cells[c], first, second)
            if missing > 0:
                missing_counts[cells[c].segment] += missing
                num_missing += missing
    return num_missing


@kernel
def _look_up_mixed(
    tables: Any, cells: Any, num_cells: int, num_rows: int, tile: int, ring: Any, missing_counts: Any
) -> int:
    for c in range(num_cells):
        _ask_for_buckets(cells[c], np.int64(0), min(2 * tile, num_rows), ring, c, num_cells)
    for c in range(num_cells):
        _ask_for_rows(tables, cells[c], np.int64(0), min(tile, num_rows), ring, c, num_cells)
    num_missing = 0
    for first in range(0, num_rows, tile):
        second, third = min(first + tile, num_rows), min(first + 2 * tile, num_rows)
        fourth = min(first + 3 * tile, num_rows)
        for c in range(num_cells):
            _ask_for_buckets(cells[c], third, fourth, ring, c, num_cells)
            _ask_for_rows(tables, cells[c], second, third, ring, c, num_cells)
            missing = _write_mixed(tables, cells[c], first, second, ring, c, num_cells)
            if missing > 0:
                missing_counts[cells[c].segment] += missing
                num_missing += missing
    return num_missing


@kernel
def _key(cell: Any, r: int) -> Any:
    return load_key(cell.keys_address + r * cell.row_stride, cell.key_bytes)


@kernel
def _ask_for_numbers(cell: Any, first: int, last: int) -> None:
    # Each with a constant, from which the compiler makes a loop of its own.
    if cell.key_bytes == _INT64:
        _ask_for_vectors(cell, first, last, _INT64)
    else:
        _ask_for_vectors(cell, first, last, _INT32)


@kernel
def _ask_for_vectors(cell: Any, first: int, last: int, key_bytes: int) -> None:
    # Into local names, here and below: the compiler cannot know that writing vectors leaves the cells as they are.
    keys_address, row_stride = cell.keys_address, cell.row_stride
    vectors_address, row_bytes, num_rows = cell.vectors_address, cell.row_bytes, cell.num_rows
    for r in range(first, last):
        row = row_of_number(load_key(keys_address + r * row_stride, key_bytes), num_rows)
        if row >= 0:
            prefetch_vector(vectors_address + row * row_bytes, row_bytes)


@kernel
def _write_numbered(tables: Any, cell: Any, first: int, last: int) -> Any:
    """Answer some rows of a cell whose keys are row numbers; returns how many keys are unknown."""
    num_missing = 0
    if cell.vector_code != _FLOAT32 or cell.marks_address != 0:
        for r in range(first, last):
            num_missing += not _write(tables, cell, r, row_of_number(_key(cell, r), cell.num_rows))
        return num_missing
    if cell.key_bytes == _INT64:
        return _copy_vectors(tables, cell, first, last, _INT64)
    return _copy_vectors(tables, cell, first, last, _INT32)


@kernel
def _copy_vectors(tables: Any, cell: Any, first: int, last: int, key_bytes: int) -> Any:
    """As `_write_numbered`, of vectors that are copied as they are."""
    num_missing = 0
    keys_address, row_stride = cell.keys_address, cell.row_stride
    vectors_address, row_bytes, num_rows = cell.vectors_address, cell.row_bytes, cell.num_rows
    output, output_stride, dim = cell.output_address, cell.output_stride, cell.embedding_dim
    for r in range(first, last):
        row = row_of_number(load_key(keys_address + r * row_stride, key_bytes), num_rows)
        if row >= 0:
            copy_floats(output + r * output_stride, vectors_address + row * row_bytes, dim)
        else:
            num_missing += not _write(tables, cell, r, row)
    return num_missing


@kernel
def _write_mixed(tables: Any, cell: Any, first: int, last: int, ring: Any, c: int, num_cells: int) -> Any:
    """Answer some rows of cell number `c`, whose table may have an index; returns how many keys are unknown."""
    if cell.index_address == 0:
        return _write_numbered(tables, cell, first, last)
    num_missing = 0
    for r in range(first, last):
        num_missing += not _write(tables, cell, r, _find(cell, r, ring, r * num_cells + c))
    return num_missing


@kernel
def _ask_for_buckets(cell: Any, first: int, last: int, ring: Any, c: int, num_cells: int) -> None:
    index_address, num_buckets = cell.index_address, cell.num_buckets
    if index_address == 0:
        return
    for r in range(first, last):
        hashed = hash_key(_key(cell, r))
        ring[(r * num_cells + c) & (_ENTRIES - 1)] = np.int64(hashed)
        prefetch(index_address + BUCKET_BYTES * home_bucket(hashed, num_buckets))


@kernel
def _ask_for_rows(tables: Any, cell: Any, first: int, last: int, ring: Any, c: int, num_cells: int) -> None:
    if cell.index_address == 0:
        _ask_for_numbers(cell, first, last)
        return
    for r in range(first, last):
        _ask_for_row(tables, cell, r, ring, r * num_cells + c)


@kernel
def _ask_for_row(tables: Any, cell: Any, r: int, ring: Any, at: int) -> None:
    hashed = np.uint64(ring[at & (_ENTRIES - 1)])
    row = candidate_row(cell.index_address, cell.num_buckets, cell.num_rows, hashed)
    ring[_ENTRIES + (at & (_ENTRIES - 1))] = row
    if row >= 0:
        prefetch(cell.table_keys_address + 8 * row)
        prefetch_vector(cell.vectors_address + row * cell.row_bytes, cell.row_bytes)
        if cell.marks_address != 0:
            prefetch(cell.marks_address + row)
    elif cell.next_table >= 0:
        _ask_further(tables[cell.next_table], _key(cell, r))


@kernel
def _ask_further(table: Any, key: int) -> None:
    """Ask for what the next table of a chain has of the key, or for its bucket."""
    if table.index_address != 0:
        prefetch(table.index_address + BUCKET_BYTES * home_bucket(hash_key(key), table.num_buckets))
        return
    row = row_of_number(key, table.num_rows)
    if row >= 0:
        prefetch_vector(table.vectors_address + row * table.row_bytes, table.row_bytes)


@kernel
def _find(cell: Any, r: int, ring: Any, at: int) -> Any:
    """The row of a key in a table with an index, -1 where it has none."""
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
    tables: Any, cells: Any, num_cells: int, num_rows: int, missing_counts: Any, missing_positions: Any, num_noted: int
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
