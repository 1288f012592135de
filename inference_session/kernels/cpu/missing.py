"""The keys that a look-up did not find: they are collected, and their vectors are written to the outputs.

The missing keys of each table, each once, become a small table, the *overlay*: TABLE records like any other, whose
vectors the caller fetches. `write_vectors` copies them to outputs that are not pooled. Pooled segments are looked up
again, with the overlay as the table to search after the one that lacked the keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from inference_session.kernels.cpu.hash_index import enter_row, hash_key
from inference_session.kernels.cpu.intrinsics import kernel, store
from inference_session.kernels.cpu.rows import load_key, row_of
from inference_session.kernels.cpu.vectors import copy_vector
from inference_session.kernels.records import PoolingCode, VectorCode

_NONE, _FLOAT32 = int(PoolingCode.NONE), int(VectorCode.FLOAT32)


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
def _output_at(segment: Any, dim: int, position: int) -> Any:
    row, column = position // segment.keys_per_row, position % segment.keys_per_row
    return segment.output_address + row * segment.output_stride + column * dim * 4
