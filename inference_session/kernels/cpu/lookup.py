"""The look-up on the CPU: all tables of a request in one call, straight into the dense network's inputs.

Long even runs of keys in one table have a loop of their own (stream.py), all else goes block by block (blocks.py). In
both, memory works on some hundred lines at once while the processor waits for none of them. Nothing here allocates per
key or holds the GIL. `cuda/launch.py` is the twin with the same signature.
"""

from __future__ import annotations

import functools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.kernels.cpu.blocks import BLOCK, CURSOR, NUM_STAGES, Span, look_up_blocks
from inference_session.kernels.cpu.interleaved import (
    CELL,
    MAX_CELLS,
    end_of_interleaved,
    look_up_interleaved,
    new_ring,
)
from inference_session.kernels.cpu.intrinsics import kernel
from inference_session.kernels.cpu.rows import bag_length
from inference_session.kernels.cpu.stream import RING, is_stream, look_up_stream
from inference_session.kernels.cpu.vectors import CHUNK
from inference_session.kernels.records import SEGMENT, TABLE

PART_BYTES = 256 << 10
"""Output a further thread must have to write before it is worth waking."""


class _Workspace(threading.local):
    """What one thread's look-ups write to on the way, made once."""

    def __init__(self) -> None:
        cursor, blocks, ring = np.zeros(1, CURSOR), np.zeros(NUM_STAGES, BLOCK), np.zeros(2 * RING, np.int64)
        vector, cells = np.zeros(CHUNK, np.float32), np.zeros(MAX_CELLS, CELL)
        self.arrays = cursor, blocks, ring, vector, cells, new_ring()


_workspace = _Workspace()

NO_POSITIONS = np.empty(0, np.int64)
"""For `look_up`, where nobody asks which keys are unknown."""


def look_up(
    tables: NDArray[np.void],
    segments: NDArray[np.void],
    missing_counts: NDArray[np.int64],
    missing_positions: NDArray[np.int64],
    num_threads: int = 1,
) -> int:
    """Write the vectors of every key of every segment to its output; returns how many keys were unknown.

    `tables` and `segments` are arrays of the records in ../records.py; whoever filled them vouches for every address.
    A key is searched in its segment's table, then along `next_table`. A key that none has, or a row number outside
    the table, gets the default vector of the segment's table, or where that has none (address 0) leaves its output
    as it is, or pooled counts as zeros.

    Pooled, an empty bag is zeros, unknown keys take part by their default vector, and a mean divides by the number of
    keys in the bag, weighted or not. MAX takes no weights.

    `missing_counts`, int64[segments], receives the unknown keys of each segment; `missing_positions`, int64, if not
    empty must have room for all keys of the request and receives their positions, segment after segment, ascending:
    row x keys_per_row + column, or where bags have begins, the position that those count in.

    Large requests are split by rows over up to `num_threads` threads, so a flat list of keys is best written as rows
    of one key.
    """
    if num_threads > 1:
        cuts = np.zeros((num_threads + 1, 3), np.int64)
        num_parts = _cut(tables, segments, cuts)
        if num_parts > 1:
            return _lookup_parts(tables, segments, missing_counts, missing_positions, cuts[: num_parts + 1])
    return _lookup_range(tables, segments, (0, 0), (len(segments), 0), missing_counts, missing_positions)


def compile_kernels() -> None:
    """Compile what `look_up` runs, or load it from Numba's cache, so that no request waits for a compiler."""
    nothing = np.zeros(0, np.int64)
    look_up(np.zeros(1, TABLE), np.zeros(0, SEGMENT), nothing, nothing, num_threads=2)


def _lookup_parts(
    tables: NDArray[np.void],
    segments: NDArray[np.void],
    missing_counts: NDArray[np.int64],
    missing_positions: NDArray[np.int64],
    cuts: NDArray[np.int64],
) -> int:
    counts = np.zeros((len(cuts) - 1, len(segments)), np.int64)

    def run(part: int) -> int:
        segment, row, first_key = cuts[part].tolist()
        last_segment, last_row, last_key = cuts[part + 1].tolist()
        positions = missing_positions[first_key:last_key]
        begin, end = (segment, row), (last_segment, last_row)
        return _lookup_range(tables, segments, begin, end, counts[part], positions)

    others = [_threads(os.getpid()).submit(run, part) for part in range(1, len(counts))]
    missing = [run(0), *(other.result() for other in others)]
    missing_counts[:] = counts.sum(axis=0)
    if len(missing_positions):
        _close_gaps(missing_positions, missing, cuts[:, 2].tolist())
    return sum(missing)


def _close_gaps(positions: NDArray[np.int64], missing: list[int], begins: list[int]) -> None:
    """Each part wrote its positions behind room for all keys before it; the parts' order is that of the keys."""
    end = missing[0]
    for begin, count in zip(begins[1:], missing[1:], strict=False):
        positions[end : end + count] = positions[begin : begin + count]
        end += count


@functools.cache
def _threads(_process_id: int) -> ThreadPoolExecutor:
    """The threads that help with large requests; a forked process, which inherits none, gets its own."""
    return ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="hotrow-lookup")


def _lookup_range(
    tables: NDArray[np.void],
    segments: NDArray[np.void],
    begin: tuple[int, int],
    end: tuple[int, int],
    missing_counts: NDArray[np.int64],
    missing_positions: NDArray[np.int64],
) -> int:
    """Look up from one (segment, row) up to, not including, another."""
    arguments = (tables, segments, *begin, *end, *_workspace.arrays, missing_counts, missing_positions)
    return int(look_up_range(*arguments))


@kernel
def look_up_range(
    tables: Any,
    segments: Any,
    segment: int,
    row: int,
    last_segment: int,
    last_row: int,
    cursor: Any,
    blocks: Any,
    ring: Any,
    scratch: Any,
    cells: Any,
    hashes: Any,
    missing_counts: Any,
    missing_positions: Any,
) -> Any:
    """Look up from one (segment, row) up to, not including, another; see `lookup`."""
    for s in range(len(missing_counts)):
        missing_counts[s] = 0
    num_missing = np.int64(0)  # a plain 0 is a type of its own, for which all below would be compiled as well
    whole = Span(segment, row, last_segment, last_row)
    while segment < last_segment or (segment == last_segment and row < last_row):
        end = end_of_interleaved(segments, segment, last_segment) if row == 0 else segment
        if end > segment:
            part = Span(segment, row, end, 0)
            missing = look_up_interleaved(
                tables, segments, segment, end, cells, hashes, missing_counts, missing_positions, num_missing
            )
        elif _is_stream(tables, segments, segment, row, whole):
            part = Span(segment, row, segment + 1, 0)
            table, num_rows = tables[segments[segment].table], _num_rows(segments, segment, whole)
            missing = look_up_stream(table, segments[segment], row, num_rows, ring, missing_positions, num_missing)
            missing_counts[segment] += missing
        else:
            part = _until_stream(tables, segments, segment, row, whole)
            missing = look_up_blocks(
                tables, segments, part, cursor, blocks, scratch, missing_counts, missing_positions, num_missing
            )
        num_missing += missing
        segment, row = part.last_segment, part.last_row
    return num_missing


@kernel
def _num_rows(segments: Any, segment: int, whole: Any) -> Any:
    return whole.last_row if segment == whole.last_segment else segments[segment].num_rows


@kernel
def _is_stream(tables: Any, segments: Any, segment: int, first_row: int, whole: Any) -> Any:
    num_rows = _num_rows(segments, segment, whole) - first_row
    return num_rows > 0 and is_stream(tables[segments[segment].table], segments[segment], num_rows)


@kernel
def _until_stream(tables: Any, segments: Any, segment: int, row: int, whole: Any) -> Any:
    for end in range(segment + 1, len(segments)):
        if end <= whole.last_segment and _is_stream(tables, segments, end, np.int64(0), whole):
            return Span(segment, row, end, 0)
    return Span(segment, row, whole.last_segment, whole.last_row)


@kernel
def _cut(tables: Any, segments: Any, cuts: Any) -> int:
    """Cut a request into parts of about equal output, at most len(cuts) - 1 and none below PART_BYTES.

    Part i runs from cuts[i] to cuts[i + 1], each (segment, row, keys before it). Returns the number of parts.
    """
    num_bytes = 0
    for s in range(len(segments)):
        num_bytes += _key_count(segments[s], 0, segments[s].num_rows) * 4 * tables[segments[s].table].embedding_dim
    num_parts = max(min(len(cuts) - 1, num_bytes // PART_BYTES), 1)
    part, bytes_before, keys_before = 1, 0, 0
    for s in range(len(segments)):
        segment, key_bytes = segments[s], 4 * tables[segments[s].table].embedding_dim
        num_keys = _key_count(segment, 0, segment.num_rows)
        segment_bytes = num_keys * key_bytes
        while part < num_parts and bytes_before + segment_bytes > num_bytes * part // num_parts:
            share = (num_bytes * part // num_parts - bytes_before) / segment_bytes
            row = np.int64(segment.num_rows * share)
            cuts[part] = (s, row, keys_before + _key_count(segment, 0, row))
            part += 1
        bytes_before += segment_bytes
        keys_before += num_keys
    cuts[num_parts] = (len(segments), 0, keys_before)
    return num_parts


@kernel
def _key_count(segment: Any, first_row: int, last_row: int) -> Any:
    if segment.begins_address == 0:
        return (last_row - first_row) * segment.keys_per_row
    count = 0
    for row in range(first_row, last_row):
        count += max(bag_length(segment, row), 0)
    return count
