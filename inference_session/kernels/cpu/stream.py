"""The look-up of many keys in one table, unpooled: the common case, and the simplest work of the memory.

Keys at an even distance, vectors wanted at an even distance: one loop, in which the key `ahead` has its row asked for
and the key twice as far ahead its bucket of the index, while one vector is copied. Memory is thus kept evenly busy with
reads and writes; asking for many rows, then copying many, took half as long again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from inference_session.kernels.cpu.hash_index import (
    BUCKET_BYTES,
    candidate_row,
    find_row,
    hash_key,
    home_bucket,
)
from inference_session.kernels.cpu.intrinsics import kernel, load, prefetch_near
from inference_session.kernels.cpu.rows import load_key, mark_hit, row_of_number
from inference_session.kernels.cpu.vectors import copy_vector, prefetch_vector_near
from inference_session.kernels.records import PoolingCode, VectorCode

MIN_STREAM_KEYS = 256
"""Fewer keys are looked up in blocks, which reach over the segments of a request."""
RING = 256
"""Keys remembered until they are used, a power of 2 beyond twice the farthest `ahead`."""
_AHEAD_BYTES = 8192
_MIN_AHEAD, _MAX_AHEAD = 16, 64

_NONE, _FLOAT32 = int(PoolingCode.NONE), int(VectorCode.FLOAT32)


class Stream(NamedTuple):
    """Where the keys of a stream are and where their vectors go."""

    num_keys: int
    keys_address: int
    key_bytes: int
    key_step: int
    output_address: int
    output_step: int
    position: int
    """Of the first key in its segment."""


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


@kernel
def is_stream(table: Any, segment: Any, num_rows: int) -> Any:
    """Whether these rows of the segment are a stream that is worth its start."""
    if segment.pooling != _NONE or segment.begins_address != 0 or table.next_table >= 0:
        return False
    if num_rows * segment.keys_per_row < MIN_STREAM_KEYS:
        return False
    return segment.keys_per_row == 1 or (
        segment.row_stride == segment.keys_per_row * segment.key_stride
        and segment.output_stride == segment.keys_per_row * 4 * table.embedding_dim
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
        return _look_up_numbered(source, stream, missing_positions, num_noted)
    return _look_up_hashed(source, stream, ring, missing_positions, num_noted)


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
    )


@kernel
def _stream(table: Any, segment: Any, first_row: int, last_row: int) -> Any:
    single = segment.keys_per_row == 1
    return Stream(
        (last_row - first_row) * segment.keys_per_row,
        segment.keys_address + first_row * segment.row_stride,
        segment.key_bytes,
        segment.row_stride if single else segment.key_stride,
        segment.output_address + first_row * segment.output_stride,
        segment.output_stride if single else 4 * table.embedding_dim,
        first_row * segment.keys_per_row,
    )


@kernel
def _ahead(row_bytes: int) -> Any:
    return max(_MIN_AHEAD, min(_MAX_AHEAD, _AHEAD_BYTES // max(row_bytes, 1)))


@kernel
def _key(stream: Any, i: int) -> Any:
    return load_key(stream.keys_address + i * stream.key_step, stream.key_bytes)


@kernel
def _look_up_numbered(table: Any, stream: Any, missing_positions: Any, num_noted: int) -> Any:
    num_rows, vectors, row_bytes = table.num_rows, table.vectors_address, table.row_bytes
    ahead, num_missing = _ahead(row_bytes), 0
    for i in range(min(ahead, stream.num_keys)):
        _ask_for_number(stream, i, num_rows, vectors, row_bytes)
    for i in range(stream.num_keys):
        if i + ahead < stream.num_keys:
            _ask_for_number(stream, i + ahead, num_rows, vectors, row_bytes)
        row = row_of_number(_key(stream, i), num_rows)
        _write(table, stream, i, row)
        if row < 0:
            _note(missing_positions, num_noted + num_missing, stream.position + i)
            num_missing += 1
    return num_missing


@kernel
def _ask_for_number(stream: Any, i: int, num_rows: int, vectors: int, row_bytes: int) -> None:
    row = row_of_number(_key(stream, i), num_rows)
    if row >= 0:
        prefetch_vector_near(vectors + row * row_bytes, row_bytes)


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
    prefetch_near(table.index_address + BUCKET_BYTES * home_bucket(hashed, table.num_buckets))


@kernel
def _ask_for_row(table: Any, i: int, ring: Any) -> None:
    hashed = np.uint64(ring[i & (RING - 1)])
    row = candidate_row(table.index_address, table.num_buckets, table.num_rows, hashed)
    ring[RING + (i & (RING - 1))] = row
    if row >= 0:
        prefetch_near(table.keys_address + 8 * row)
        prefetch_vector_near(table.vectors_address + row * table.row_bytes, table.row_bytes)
        if table.marks_address != 0:
            prefetch_near(table.marks_address + row)


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
    if row >= 0:
        vector = table.vectors_address + row * table.row_bytes
        copy_vector(output, vector, table.vector_code, table.embedding_dim)
        if table.marks_address != 0:
            mark_hit(table.marks_address, row)
    elif table.default_address != 0:
        copy_vector(output, table.default_address, _FLOAT32, table.embedding_dim)


@kernel
def _note(missing_positions: Any, at: int, position: int) -> None:
    if at < len(missing_positions):
        missing_positions[at] = position
