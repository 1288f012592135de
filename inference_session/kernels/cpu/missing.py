"""What a look-up left open: which keys, each once per table, and their vectors' way into the outputs.

The keys that a look-up has not found are collected into a small table of their own, the *overlay*: TABLE records like
any other, whose vectors somebody else fills in. Keys with vectors of their own in the output are then copied there;
pooled ones are looked up again, with the overlay behind the table that they were missing from.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from inference_session.kernels.cpu.hash_index import find_row, hash_key, insert_rows
from inference_session.kernels.cpu.intrinsics import kernel, load, store
from inference_session.kernels.records import PoolingCode

_NONE = int(PoolingCode.NONE)


@kernel
def collect_keys(segments: Any, counts: Any, positions: Any, overlay: Any, rows: Any) -> None:
    """Enter the keys at `positions` (counts[s] of them of segment s, as `cpu.lookup` gives them) into the overlay.

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
    row = find_row(table.index_address, table.num_buckets, table.keys_address, table.num_rows, key, hash_key(key))
    if row < 0:
        row = table.num_rows
        store(table.keys_address, np.int64, row, np.int64(key))
        insert_rows(table.index_address, table.num_buckets, table.keys_address, row, row, row + 1)
        table.num_rows = row + 1
    return row


@kernel
def _key_at(segment: Any, position: int) -> Any:
    if segment.begins_address == 0:
        row, column = position // segment.keys_per_row, position % segment.keys_per_row
        address = segment.keys_address + row * segment.row_stride + column * segment.key_stride
    else:
        address = segment.keys_address + position * segment.key_stride
    return load(address, np.int64, 0) if segment.key_bytes == 8 else np.int64(load(address, np.int32, 0))


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
                _copy_vector(
                    _output_at(segment, dim, positions[i]), overlay[t].vectors_address + rows[i] * row_bytes, dim
                )
            i += 1


@kernel
def _output_at(segment: Any, dim: int, position: int) -> Any:
    row, column = position // segment.keys_per_row, position % segment.keys_per_row
    return segment.output_address + row * segment.output_stride + column * dim * 4


@kernel
def _copy_vector(output: int, source: int, dim: int) -> None:
    for d in range(dim):
        store(output, np.float32, d, load(source, np.float32, d))
