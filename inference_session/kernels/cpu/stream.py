"""The look-up of many keys in one table, unpooled: the common case, and the simplest work of the memory.

Keys at an even distance, vectors wanted at an even distance within a row: one loop, in which the key `ahead` has its
row asked for and the key twice as far ahead its bucket of the index, while one vector is copied. Memory is thus kept
evenly busy with reads and writes; asking for many rows, then copying many, took half as long again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from inference_session.kernels.cpu.hash_index import BUCKET_BYTES, candidate_row, find_row, hash_key, home_bucket
from inference_session.kernels.cpu.intrinsics import copy_16_floats, finish_lines, kernel, load, prefetch, write_line
from inference_session.kernels.cpu.rows import load_key, mark_hit, row_of_number
from inference_session.kernels.cpu.vectors import LINE_BYTES, MAX_PREFETCH_BYTES, copy_vector
from inference_session.kernels.records import PoolingCode, VectorCode

MIN_STREAM_KEYS = 256
"""Fewer keys are looked up in blocks, which reach over the segments of a request."""
RING = 256
"""Keys remembered until they are used, a power of 2 beyond twice the farthest `ahead`."""
_AHEAD_BYTES = 16384
_MIN_AHEAD, _MAX_AHEAD = 16, 64

SHORT_ROW_BYTES = 128
"""Rows that are no longer are looked up faster in other ways, if their vectors have gaps between them."""
PAST_CACHES_BYTES = 4 << 20
"""Output of this size would push from the caches what is read next, and is itself pushed out before it is read."""

_NONE, _FLOAT32 = int(PoolingCode.NONE), int(VectorCode.FLOAT32)


class Stream(NamedTuple):
    """Where the keys of a stream are and where their vectors go."""

    num_keys: int
    keys_address: int
    key_bytes: int
    key_step: int
    output_address: int
    output_step: int
    keys_per_row: int
    row_gap: int
    """Bytes between the last vector of a row and the first of the next, beyond a step."""
    position: int
    """Of the first key in its segment."""
    past_caches: bool
    """Whether vectors are written to memory at once."""


class Source(NamedTuple):
    """The fields of a TABLE record that a stream needs, by the same names.

    The compiler would read those of a record again for each key, as it cannot know that no output overwrites them.
    """

    index_address: int
    num_buckets: int
    keys_address: int
    vectors_address: int
    row_bytes: int
    num_rows: int
    embedding_dim: int
    vector_code: int
    default_address: int
    marks_address: int
    is_even: bool
    """Whether each vector begins and ends with a line of the processor's caches."""
    lines: int
    """Cache lines of a row of float32 that begins and ends at such; 0: rows are others."""


@kernel
def is_stream(table: Any, segment: Any, num_rows: int) -> Any:
    """Whether these rows of the segment are a stream that is worth its start."""
    if segment.pooling != _NONE or segment.begins_address != 0 or table.next_table >= 0:
        return False
    if num_rows * segment.keys_per_row < MIN_STREAM_KEYS:
        return False
    if segment.keys_per_row == 1:
        return True
    has_gaps = segment.output_stride != segment.keys_per_row * 4 * table.embedding_dim
    return segment.row_stride == segment.keys_per_row * segment.key_stride and (
        table.row_bytes > SHORT_ROW_BYTES or not has_gaps
    )


@kernel
def look_up_stream(
    table: Any, segment: Any, first_row: int, last_row: int, ring: Any, missing_positions: Any, num_noted: int
) -> Any:
    """Look up rows first_row ≤ row < last_row of a segment; returns the number of unknown keys.

    Their positions go to `missing_positions` from `num_noted` on. `ring`, int64[2 x RING], is overwritten: with the
    hashes of keys, then with their rows.
    """
    source, stream = _source(table), _stream(table, segment, first_row, last_row)
    if source.index_address == 0:
        num_missing = _look_up_numbered(source, stream, missing_positions, num_noted)
    else:
        num_missing = _look_up_hashed(source, stream, ring, missing_positions, num_noted)
    if stream.past_caches:
        finish_lines()
    return num_missing


@kernel
def _source(table: Any) -> Any:
    return Source(
        table.index_address,
        table.num_buckets,
        table.keys_address,
        table.vectors_address,
        table.row_bytes,
        table.num_rows,
        table.embedding_dim,
        table.vector_code,
        table.default_address,
        table.marks_address,
        _is_even(table),
        table.row_bytes // LINE_BYTES if _is_even(table) and table.vector_code == _FLOAT32 else 0,
    )


@kernel
def _is_even(table: Any) -> Any:
    return (table.vectors_address | table.row_bytes) & (LINE_BYTES - 1) == 0


@kernel
def _stream(table: Any, segment: Any, first_row: int, last_row: int) -> Any:
    single = segment.keys_per_row == 1
    num_keys = (last_row - first_row) * segment.keys_per_row
    output_step = segment.output_stride if single else 4 * table.embedding_dim
    output = segment.output_address + first_row * segment.output_stride
    row_gap = segment.output_stride - segment.keys_per_row * output_step
    return Stream(
        num_keys,
        segment.keys_address + first_row * segment.row_stride,
        segment.key_bytes,
        segment.row_stride if single else segment.key_stride,
        output,
        output_step,
        segment.keys_per_row,
        row_gap,
        first_row * segment.keys_per_row,
        (output | output_step | row_gap) & (LINE_BYTES - 1) == 0
        and num_keys * 4 * table.embedding_dim >= PAST_CACHES_BYTES,
    )


@kernel
def _ahead(row_bytes: int) -> Any:
    return max(_MIN_AHEAD, min(_MAX_AHEAD, _AHEAD_BYTES // max(row_bytes, 1)))


@kernel
def _key(stream: Any, i: int) -> Any:
    return load_key(stream.keys_address + i * stream.key_step, stream.key_bytes)


@kernel
def _look_up_numbered(table: Any, stream: Any, missing_positions: Any, num_noted: int) -> Any:
    ahead, num_missing = _ahead(table.row_bytes), 0
    for i in range(min(ahead, stream.num_keys)):
        _ask_for_number(table, stream, i)
    for i in range(stream.num_keys):
        if i + ahead < stream.num_keys:
            _ask_for_number(table, stream, i + ahead)
        row = row_of_number(_key(stream, i), table.num_rows)
        _write(table, stream, i, row)
        if row < 0:
            _note(missing_positions, num_noted + num_missing, stream.position + i)
            num_missing += 1
    return num_missing


@kernel
def _ask_for_number(table: Any, stream: Any, i: int) -> None:
    row = row_of_number(_key(stream, i), table.num_rows)
    if row >= 0:
        _ask_for_vector(table, row)


@kernel
def _look_up_hashed(table: Any, stream: Any, ring: Any, missing_positions: Any, num_noted: int) -> Any:
    ahead, num_missing = _ahead(table.row_bytes), 0
    for i in range(min(2 * ahead, stream.num_keys)):
        _ask_for_bucket(table, stream, i, ring)
    for i in range(min(ahead, stream.num_keys)):
        _ask_for_row(table, i, ring)
    for i in range(stream.num_keys):
        if i + 2 * ahead < stream.num_keys:
            _ask_for_bucket(table, stream, i + 2 * ahead, ring)
        if i + ahead < stream.num_keys:
            _ask_for_row(table, i + ahead, ring)
        row = _find(table, _key(stream, i), ring, i)
        _write(table, stream, i, row)
        if row < 0:
            _note(missing_positions, num_noted + num_missing, stream.position + i)
            num_missing += 1
    return num_missing


@kernel
def _ask_for_bucket(table: Any, stream: Any, i: int, ring: Any) -> None:
    hashed = hash_key(_key(stream, i))
    ring[i & (RING - 1)] = np.int64(hashed)
    prefetch(table.index_address + BUCKET_BYTES * home_bucket(hashed, table.num_buckets))


@kernel
def _ask_for_row(table: Any, i: int, ring: Any) -> None:
    hashed = np.uint64(ring[i & (RING - 1)])
    row = candidate_row(table.index_address, table.num_buckets, table.num_rows, hashed)
    ring[RING + (i & (RING - 1))] = row
    if row >= 0:
        prefetch(table.keys_address + 8 * row)
        _ask_for_vector(table, row)
        if table.marks_address != 0:
            prefetch(table.marks_address + row)


@kernel
def _find(table: Any, key: int, ring: Any, i: int) -> Any:
    row = ring[RING + (i & (RING - 1))]
    if row >= 0 and load(table.keys_address, np.int64, row) == key:
        return row
    hashed = np.uint64(ring[i & (RING - 1)])
    return find_row(table.index_address, table.num_buckets, table.keys_address, table.num_rows, key, hashed)


@kernel
def _write(table: Any, stream: Any, i: int, row: int) -> None:
    output = stream.output_address + i * stream.output_step
    if stream.row_gap != 0:
        output += np.int64(np.uint32(i) // np.uint32(stream.keys_per_row)) * stream.row_gap  # fewer bits divide sooner
    if row >= 0:
        vector = table.vectors_address + row * table.row_bytes
        _copy(table, stream, output, vector)
        if table.marks_address != 0:
            mark_hit(table.marks_address, row)
    elif table.default_address != 0:
        copy_vector(output, table.default_address, _FLOAT32, table.embedding_dim)


@kernel
def _ask_for_vector(table: Any, row: int) -> None:
    vector, asked = table.vectors_address + row * table.row_bytes, min(table.row_bytes, MAX_PREFETCH_BYTES)
    for offset in range(0, asked, LINE_BYTES):
        prefetch(vector + offset)
    if not table.is_even:
        prefetch(vector + asked - 1)


@kernel
def _copy(table: Any, stream: Any, output: int, vector: int) -> None:
    if table.lines == 0:
        copy_vector(output, vector, table.vector_code, table.embedding_dim)
    elif stream.past_caches:
        for line in range(table.lines):
            write_line(output + LINE_BYTES * line, vector + LINE_BYTES * line)
    else:
        for line in range(table.lines):
            copy_16_floats(output + LINE_BYTES * line, vector + LINE_BYTES * line)


@kernel
def _note(missing_positions: Any, at: int, position: int) -> None:
    if at < len(missing_positions):
        missing_positions[at] = position
