"""The keys that a look-up did not find: they are collected, and their vectors are written to the outputs.

The missing keys of each table, each once, become a small table, the *overlay*: TABLE records like any other, whose
vectors the caller fetches. `write_vectors` copies them to outputs that are not pooled; for outputs on a GPU,
`describe_copies` describes these copies. Pooled segments are looked up again, on the processor with the overlay as the
table to search after the one that lacked the keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from inference_session.kernels.cpu.hash_index import enter_row, hash_key
from inference_session.kernels.cpu.intrinsics import kernel, store
from inference_session.kernels.cpu.rows import load_key, row_of
from inference_session.kernels.cpu.vectors import copy_vector
from inference_session.kernels.records import SEGMENT, TABLE, VECTOR_COPY, PoolingCode, VectorCode

_NONE, _FLOAT32, _FLOAT16 = int(PoolingCode.NONE), int(VectorCode.FLOAT32), int(VectorCode.FLOAT16)


def compile_kernels(*, gpu: bool) -> None:
    """Compile what a cache in host memory needs, or one on a GPU; or load what was compiled before."""
    segments, overlay, none = np.zeros(0, SEGMENT), np.zeros(0, TABLE), np.zeros(0, np.int64)
    collect_keys(segments, none, none, overlay, none)
    if gpu:
        find_positions(np.zeros(0, np.uint32), np.zeros(1, np.uint32), 1, none, none)
        describe_copies(segments, none, none, overlay, none, 0, np.zeros(0, VECTOR_COPY))
    else:
        write_vectors(segments, none, none, overlay, none, np.zeros(0, np.bool_), none, none)


@kernel
def collect_keys(segments: Any, counts: Any, positions: Any, overlay: Any, rows: Any) -> None:
    """Enter the keys at `positions` (counts[s] of them of segment s, as `cpu.look_up` gives them) into the overlay.

    overlay[t] belongs to the segments of table t: an empty index with room for all its keys, at keys_address room for
    as many, num_rows 0. rows[i] receives the row of the key at positions[i].
    """
    i = 0
    for s in range(len(segments)):
        for _ in range(counts[s]):
            rows[i] = _row_of(overlay[segments[s].table], _key_at(segments[s], positions[i]))
            i += 1


@kernel
def _row_of(table: Any, key: int) -> Any:
    """The row of the key, which is added if it is new."""
    hashed = hash_key(key)
    row = row_of(table, key, hashed)
    if row < 0:
        row = table.num_rows
        store(table.keys_address, np.int64, row, np.int64(key))
        enter_row(table.index_address, table.num_buckets, table.keys_address, row, key, hashed, row)
        table.num_rows = row + 1
    return row


@kernel
def _key_at(segment: Any, position: int) -> Any:
    if segment.begins_address == 0:
        row, column = position // segment.keys_per_row, position % segment.keys_per_row
        address = segment.keys_address + row * segment.row_stride + column * segment.key_stride
    else:
        address = segment.keys_address + position * segment.key_stride
    return load_key(address, segment.key_bytes)


@kernel
def find_positions(bits: Any, first_tiles: Any, keys_per_tile: int, counts: Any, positions: Any) -> Any:
    """The missing keys of each segment, from the bits that a GPU's look-up has noted for each tile of it.

    The tiles of segment s are those from first_tiles[s] on. counts[s] receives how many of its keys are missing, and
    `positions`, which has room for all, where they are, segment after segment. Returns how many there are in all. The
    bits become zeros.
    """
    num_found = 0
    for s in range(len(first_tiles) - 1):
        before = num_found
        for tile in range(first_tiles[s], first_tiles[s + 1]):
            if bits[tile] != 0:
                for i in range(keys_per_tile):
                    if bits[tile] >> np.uint32(i) & np.uint32(1):
                        positions[num_found] = (tile - first_tiles[s]) * keys_per_tile + i
                        num_found += 1
                bits[tile] = 0
        counts[s] = num_found - before
    return num_found


@kernel
def write_vectors(
    segments: Any, counts: Any, positions: Any, overlay: Any, rows: Any, found: Any, first_rows: Any, num_unknown: Any
) -> None:
    """Copy the overlay's vectors to the outputs of segments that are not pooled; count the keys that are unknown.

    found[first_rows[t] + row] says whether the key in that row of table t is known; num_unknown[s] receives how many of
    the positions of segment s, pooled or not, are of keys that are not.
    """
    i = 0
    for s in range(len(segments)):
        segment, t = segments[s], segments[s].table
        dim, row_bytes = overlay[t].embedding_dim, overlay[t].row_bytes
        num_unknown[s] = 0
        for _ in range(counts[s]):
            if not found[first_rows[t] + rows[i]]:
                num_unknown[s] += 1
            if segment.pooling == _NONE:
                source = overlay[t].vectors_address + rows[i] * row_bytes
                copy_vector(_output_at(segment, dim, positions[i]), source, _FLOAT32, dim)
            i += 1


@kernel
def describe_copies(
    segments: Any, counts: Any, positions: Any, overlay: Any, rows: Any, moved: int, copies: Any
) -> None:
    """Describe the copy of each position's vector: copies[i], a VECTOR_COPY record, is that of positions[i].

    The vectors are read `moved` bytes behind where the overlay has them.
    """
    i = 0
    for s in range(len(segments)):
        segment, t = segments[s], segments[s].table
        dim = overlay[t].embedding_dim
        for _ in range(counts[s]):
            copies[i].vector_address = overlay[t].vectors_address + rows[i] * overlay[t].row_bytes + moved
            copies[i].output_address = _output_at(segment, dim, positions[i])
            copies[i].embedding_dim, copies[i].output_code = dim, segment.output_code
            i += 1


@kernel
def _output_at(segment: Any, dim: int, position: int) -> Any:
    row, column = position // segment.keys_per_row, position % segment.keys_per_row
    element_bytes = 2 if segment.output_code == _FLOAT16 else 4
    return segment.output_address + row * segment.output_stride + column * dim * element_bytes
