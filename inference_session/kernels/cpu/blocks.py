"""The look-up of any request, block by block.

A request is one sequence of keys, over all its segments, cut into blocks. Three are under way at a time, each in
another stage, so that the misses of many tables overlap however few keys each has:

    1  take the keys; ask for their buckets of the index, or where keys are row numbers, for the rows
    2  match tags; ask for the keys and vectors of the rows that match
    3  compare the keys, then copy or pool the vectors
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from inference_session.kernels.cpu.hash_index import BUCKET_BYTES, candidate_row, find_row, hash_key, home_bucket
from inference_session.kernels.cpu.intrinsics import kernel, load, prefetch
from inference_session.kernels.cpu.rows import bag_length, load_key, mark_hit, row_of, row_of_number
from inference_session.kernels.cpu.sums import sum_vectors
from inference_session.kernels.cpu.vectors import (
    CHUNK,
    SUM_BLOCK,
    add_sums,
    copy_vector,
    divide_floats,
    fill_zeros,
    pool_vector,
    prefetch_vector,
    take_sums,
)
from inference_session.kernels.records import PoolingCode, VectorCode

BLOCK_KEYS = 64
BLOCK_BYTES = 8192
"""About what one block asks for: wide vectors make shorter blocks, since memory serves few requests at once."""
MIN_BLOCK_KEYS = 8
NUM_STAGES = 3

_FLOAT32 = int(VectorCode.FLOAT32)
_SEVERAL = -1
"""In place of the one type that all vectors have."""
_NONE, _MEAN, _MAX = int(PoolingCode.NONE), int(PoolingCode.MEAN), int(PoolingCode.MAX)


def _per_key(*names: str) -> list[tuple[str, type[np.int64], tuple[int]]]:
    return [(name, np.int64, (BLOCK_KEYS,)) for name in names]


BLOCK = np.dtype(
    [
        ("segment", np.int64),
        ("count", np.int64),
        *_per_key("keys", "hashes"),
        *_per_key("rows"),  # after stage 2, where the tag matches; after stage 3, where the key is; -1: none
        *_per_key("tables"),  # record in which the row was found
        *_per_key("positions"),  # of the keys in their segment
        *_per_key("outputs"),  # addresses to write to
        *_per_key("indices", "lengths"),  # pooled: place in the bag, keys in the bag
        *_per_key("sources"),  # pooled: addresses of the vectors
    ],
    align=True,
)
CURSOR = np.dtype([(name, np.int64) for name in ("segment", "row", "column", "last_segment", "last_row")], align=True)


class Span(NamedTuple):
    """Part of a request: from a row of a segment up to, not including, another."""

    segment: int
    row: int
    last_segment: int
    last_row: int


@kernel
def look_up_blocks(
    tables: Any,
    segments: Any,
    span: Any,
    cursors: Any,
    blocks: Any,
    scratch: Any,
    missing_counts: Any,
    missing_positions: Any,
    num_noted: int,
) -> Any:
    """Look up a part of a request; returns the number of unknown keys.

    Each segment's are added to `missing_counts`, their positions go to `missing_positions` from `num_noted` on.
    `scratch`: float32[CHUNK + 2 x the elements of the longest vector that is pooled].
    """
    cursor = cursors[0]
    cursor.segment, cursor.row, cursor.column = span.segment, span.row, 0
    cursor.last_segment, cursor.last_row = span.last_segment, span.last_row
    for b in range(NUM_STAGES):
        blocks[b].count = 0
    num_missing = step = idle = 0
    while idle < NUM_STAGES:
        newest, middle, oldest = blocks[step % 3], blocks[(step + 2) % 3], blocks[(step + 1) % 3]
        _take_keys(tables, segments, cursor, newest)
        if newest.count > 0:
            _ask_first(tables[segments[newest.segment].table], newest)
        if middle.count > 0:
            _ask_for_matching_rows(tables[segments[middle.segment].table], middle)
        if oldest.count > 0:
            missing = _find_rows(tables, segments[oldest.segment].table, oldest)
            if missing > 0:
                _note_missing(oldest, missing_positions, num_noted + num_missing)
                missing_counts[oldest.segment] += missing
                num_missing += missing
            _write_vectors(tables, segments[oldest.segment], oldest, missing, scratch)
        idle = idle + 1 if newest.count == 0 else 0
        step += 1
    return num_missing


@kernel
def _take_keys(tables: Any, segments: Any, cursor: Any, block: Any) -> None:
    """Fill the block with the next keys of one segment, and zero the empty bags on the way."""
    block.count = 0
    while block.count == 0:
        s = cursor.segment
        if s > cursor.last_segment or s >= len(segments):
            return
        num_rows = cursor.last_row if s == cursor.last_segment else segments[s].num_rows
        block.segment = s
        table = tables[segments[s].table]
        room = max(MIN_BLOCK_KEYS, min(BLOCK_KEYS, BLOCK_BYTES // max(table.row_bytes, 1)))
        if segments[s].begins_address == 0 and segments[s].keys_per_row == 1 and segments[s].pooling == _NONE:
            _take_single_keys(segments[s], min(num_rows - cursor.row, room), cursor, block)
        else:
            _take_bags(segments[s], table.embedding_dim, num_rows, room, cursor, block)
        if cursor.row >= num_rows:
            cursor.segment = s + 1
            cursor.row = 0


@kernel
def _take_single_keys(segment: Any, count: int, cursor: Any, block: Any) -> None:
    """Rows of one key each, the common case."""
    row = cursor.row
    keys, output = segment.keys_address + row * segment.row_stride, segment.output_address + row * segment.output_stride
    _enter_keys(
        block, np.int64(0), count, keys, segment.key_bytes, segment.row_stride, row, output, segment.output_stride
    )
    cursor.row = row + count
    block.count = count


@kernel
def _take_bags(segment: Any, dim: int, num_rows: int, room: int, cursor: Any, block: Any) -> None:
    count = np.int64(0)
    row, column = cursor.row, cursor.column
    while row < num_rows and count < room:
        length = bag_length(segment, row)
        taken = min(length - column, room - count)
        if length > 0:
            _take_keys_of_row(segment, dim, row, column, taken, length, block, count)
            count += taken
            column += taken
        elif segment.pooling != _NONE:
            fill_zeros(segment.output_address + row * segment.output_stride, dim)
        if column >= length:
            row += 1
            column = 0
    cursor.row = row
    cursor.column = column
    block.count = count


@kernel
def _take_keys_of_row(
    segment: Any, dim: int, row: int, column: int, taken: int, length: int, block: Any, count: int
) -> None:
    """Enter `taken` keys of one row, whose bag has `length`, from `column` on, as the block's keys from `count` on."""
    if segment.begins_address == 0:
        begin = row * segment.keys_per_row
        keys = segment.keys_address + row * segment.row_stride
    else:
        begin = load(segment.begins_address, np.int64, row)
        keys = segment.keys_address + begin * segment.key_stride
    keys += column * segment.key_stride
    output_step = 4 * dim if segment.pooling == _NONE else 0
    output = segment.output_address + row * segment.output_stride + column * output_step
    _enter_keys(block, count, taken, keys, segment.key_bytes, segment.key_stride, begin + column, output, output_step)
    if segment.pooling != _NONE:
        for j in range(taken):
            block.indices[count + j] = column + j
            block.lengths[count + j] = length


@kernel
def _enter_keys(
    block: Any,
    first: int,
    count: int,
    address: int,
    key_bytes: int,
    key_step: int,
    position: int,
    output: int,
    output_step: int,
) -> None:
    """Enter keys at an even distance, whose vectors are wanted at an even distance, as the block's from `first` on."""
    keys, positions, outputs = block.keys, block.positions, block.outputs
    for i in range(count):
        here = address + i * key_step
        keys[first + i] = load_key(here, key_bytes)
        positions[first + i] = position + i
        outputs[first + i] = output + i * output_step


@kernel
def _ask_first(table: Any, block: Any) -> None:
    """Stage 1."""
    if table.index_address == 0:
        _ask_for_numbered_rows(table, block)
    else:
        _ask_for_buckets(table, block)


@kernel
def _ask_for_buckets(table: Any, block: Any) -> None:
    keys, hashes = block.keys, block.hashes
    index, num_buckets = table.index_address, table.num_buckets
    for i in range(block.count):
        hashed = hash_key(keys[i])
        hashes[i] = np.int64(hashed)
        prefetch(index + BUCKET_BYTES * home_bucket(hashed, num_buckets))


@kernel
def _ask_for_numbered_rows(table: Any, block: Any) -> None:
    keys, rows = block.keys, block.rows
    num_rows, vectors, row_bytes = table.num_rows, table.vectors_address, table.row_bytes
    for i in range(block.count):
        row = row_of_number(keys[i], num_rows)
        if row >= 0:
            prefetch_vector(vectors + row * row_bytes, row_bytes)
        rows[i] = row


@kernel
def _ask_for_matching_rows(table: Any, block: Any) -> None:
    """Stage 2."""
    if table.index_address == 0:
        return
    hashes, rows = block.hashes, block.rows
    index, num_buckets, keys_address = table.index_address, table.num_buckets, table.keys_address
    num_rows, vectors, row_bytes = table.num_rows, table.vectors_address, table.row_bytes
    for i in range(block.count):
        row = candidate_row(index, num_buckets, num_rows, np.uint64(hashes[i]))
        if row >= 0:
            prefetch(keys_address + 8 * row)
            prefetch_vector(vectors + row * row_bytes, row_bytes)
            if table.marks_address != 0:
                prefetch(table.marks_address + row)
        rows[i] = row


@kernel
def _find_rows(tables: Any, first_table: int, block: Any) -> Any:
    """Stage 3: find the rows of the block, in the table and those chained behind it; returns the number of unknown
    keys.
    """
    t = first_table
    missing = _find_rows_in(tables[t], block)
    if tables[t].marks_address != 0:
        _mark_hits(tables[t].marks_address, block)
    tables_of = block.tables
    for i in range(block.count):
        tables_of[i] = t
    for _ in range(len(tables)):
        t = tables[t].next_table
        if missing == 0 or t < 0:
            break
        missing = _find_missing_rows_in(tables[t], t, block)
    return missing


@kernel
def _find_rows_in(table: Any, block: Any) -> Any:
    rows, keys, hashes = block.rows, block.keys, block.hashes
    index, num_buckets = table.index_address, table.num_buckets
    keys_address, num_rows = table.keys_address, table.num_rows
    missing = 0
    for i in range(block.count):
        row = rows[i]
        if index != 0 and (row < 0 or load(keys_address, np.int64, row) != keys[i]):
            row = find_row(index, num_buckets, keys_address, num_rows, keys[i], np.uint64(hashes[i]))
            rows[i] = row
        missing += 1 if row < 0 else 0
    return missing


@kernel
def _mark_hits(marks: int, block: Any) -> None:
    """For a cache, which the first table of a chain may be. Two readers at one mark may count as one: so be it."""
    rows = block.rows
    for i in range(block.count):
        if rows[i] >= 0:
            mark_hit(marks, rows[i])


@kernel
def _find_missing_rows_in(table: Any, t: int, block: Any) -> Any:
    """Find in a further table what those before lack; a loop for each stage."""
    keys, hashes, rows = block.keys, block.hashes, block.rows
    missing = 0
    for i in range(block.count):
        if rows[i] < 0:
            hashes[i] = np.int64(hash_key(keys[i]))
            prefetch(table.index_address + BUCKET_BYTES * home_bucket(np.uint64(hashes[i]), table.num_buckets))
    for i in range(block.count):
        if rows[i] < 0 and table.index_address != 0:
            row = candidate_row(table.index_address, table.num_buckets, table.num_rows, np.uint64(hashes[i]))
            prefetch(table.keys_address + 8 * row)
            prefetch(table.vectors_address + table.row_bytes * row)
    for i in range(block.count):
        if rows[i] < 0:
            rows[i] = row_of(table, keys[i], np.uint64(hashes[i]))
            block.tables[i] = t
            missing += 1 if rows[i] < 0 else 0
    return missing


@kernel
def _note_missing(block: Any, positions: Any, num_noted: int) -> None:
    for i in range(block.count):
        if block.rows[i] < 0 and num_noted < len(positions):
            positions[num_noted] = block.positions[i]
            num_noted += 1


@kernel
def _write_vectors(tables: Any, segment: Any, block: Any, missing: int, scratch: Any) -> None:
    if segment.pooling != _NONE:
        _pool_bags(tables, segment, block, scratch)
    elif missing > 0 or tables[segment.table].next_table >= 0:
        for i in range(block.count):
            source, code = _source_of(tables, segment, block, i)
            if source != 0:
                copy_vector(block.outputs[i], source, code, tables[segment.table].embedding_dim)
    else:
        _copy_vectors(tables[segment.table], block)


@kernel
def _copy_vectors(table: Any, block: Any) -> None:
    rows, outputs = block.rows, block.outputs
    vectors, row_bytes = table.vectors_address, table.row_bytes
    code, dim = table.vector_code, table.embedding_dim
    for i in range(block.count):
        copy_vector(outputs[i], vectors + rows[i] * row_bytes, code, dim)


@kernel
def _pool_bags(tables: Any, segment: Any, block: Any, scratch: Any) -> None:
    i = np.int64(0)
    while i < block.count:
        place, length = block.indices[i], block.lengths[i]
        if length == 1 and segment.weights_address == 0:
            num = np.int64(1)
            _pool_single(tables, segment, block, i)
        else:
            num = min(block.count - i, length - place, SUM_BLOCK - place % SUM_BLOCK)
            _pool_some(tables, segment, block, i, num, scratch)
        i += num


@kernel
def _pool_single(tables: Any, segment: Any, block: Any, i: int) -> None:
    """A bag of one key: its vector, however it is pooled."""
    source, code = _source_of(tables, segment, block, i)
    if source != 0:
        copy_vector(block.outputs[i], source, code, tables[segment.table].embedding_dim)
    else:
        fill_zeros(block.outputs[i], tables[segment.table].embedding_dim)


@kernel
def _pool_some(tables: Any, segment: Any, block: Any, first: int, num: int, scratch: Any) -> None:
    """Pool some vectors of one bag, `first` of the block and those after it, all of them in one block of a sum.

    A block is added up in the output. If the bag goes on, `scratch` takes the sum, in double precision.
    """
    dim, weights, place = tables[segment.table].embedding_dim, segment.weights_address, block.indices[first]
    output, length, is_max = block.outputs[first], block.lengths[first], segment.pooling == _MAX
    sums = scratch.ctypes.data + 4 * CHUNK
    begins = place == 0 or (place % SUM_BLOCK == 0 and not is_max)
    code = _find_sources(tables, segment, block, first, num)
    if code != _SEVERAL and not is_max:
        of_first = weights + 4 * block.positions[first] if weights != 0 else 0
        sum_vectors(output, block.sources.ctypes.data + 8 * first, of_first, num, code, dim, begins)
    else:
        _pool_each(tables, segment, block, first, num, begins, scratch)
    end = place + num
    if length > SUM_BLOCK and not is_max:
        if end == length:
            add_sums(output, sums, dim)
        elif end % SUM_BLOCK == 0:
            take_sums(sums, output, dim, end == SUM_BLOCK)
    if end == length and segment.pooling == _MEAN:
        divide_floats(output, dim, np.float32(length))


@kernel
def _find_sources(tables: Any, segment: Any, block: Any, first: int, num: int) -> Any:
    """Note the addresses of some vectors; returns the type that all of them have, if there is one."""
    rows, tables_of, sources = block.rows, block.tables, block.sources
    table = tables[segment.table]
    vectors, row_bytes, of_all = table.vectors_address, table.row_bytes, table.vector_code
    for i in range(first, first + num):
        if rows[i] >= 0 and tables_of[i] == segment.table:
            sources[i] = vectors + rows[i] * row_bytes
        else:
            sources[i], code = _source_of(tables, segment, block, i)
            if code != table.vector_code or sources[i] == 0:
                of_all = _SEVERAL
    return of_all


@kernel
def _pool_each(tables: Any, segment: Any, block: Any, first: int, num: int, begins: bool, scratch: Any) -> None:
    """Vectors of several types, of which some may be a default vector of zeros, or the largest elements of any."""
    dim, weights, is_max = tables[segment.table].embedding_dim, segment.weights_address, segment.pooling == _MAX
    for i in range(first, first + num):
        source, code = _source_of(tables, segment, block, i)
        weight = load(weights, np.float32, block.positions[i]) if weights != 0 else np.float32(1)
        pool_vector(block.outputs[first], source, code, dim, weight, begins and i == first, is_max, scratch)


@kernel
def _source_of(tables: Any, segment: Any, block: Any, i: int) -> Any:
    """Address and code of the vector that answers the key: its own, or the default vector of the segment's table."""
    if block.rows[i] < 0:
        return tables[segment.table].default_address, _FLOAT32
    table = tables[block.tables[i]]
    return table.vectors_address + block.rows[i] * table.row_bytes, table.vector_code
