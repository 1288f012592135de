"""The look-up on the CPU: all tables of a request in one call, straight into the dense network's inputs.

Long even runs of keys in one table have a loop of their own (stream.py), all else goes block by block (blocks.py). In
both, memory works on some hundred lines at once while the processor waits for none of them. Nothing here allocates per
key or holds the GIL. `cuda/launch.py` is the twin with the same signature.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.kernels.cpu.arguments import Arguments, array_at, int_at, put_array, put_int
from inference_session.kernels.cpu.blocks import BLOCK, CURSOR, NUM_STAGES, Span, look_up_blocks
from inference_session.kernels.cpu.interleaved import CELL, MAX_CELLS, end_of_interleaved, look_up_interleaved, new_ring
from inference_session.kernels.cpu.intrinsics import kernel
from inference_session.kernels.cpu.rows import bag_length
from inference_session.kernels.cpu.stream import RING, is_stream, look_up_stream
from inference_session.kernels.cpu.vectors import CHUNK, LINE_BYTES
from inference_session.kernels.machine_code import of_ints
from inference_session.kernels.records import SEGMENT, TABLE, Lookup, PoolingCode
from inference_session.kernels.threads import run_parts

_Steps = tuple[Callable[..., None], Callable[[], int]]

_FIRST_LONGEST = 1024
"""Elements of a vector that a thread can pool at first."""
PART_BYTES = 256 << 10
"""Output a further thread must have to write before it is worth waking."""
NO_POSITIONS = np.empty(0, np.int64)
"""For `look_up`, if the caller does not ask which keys are unknown."""


def _working_memory(longest: int) -> tuple[NDArray[Any], ...]:
    """What look-ups write to on the way, those of one thread at a time. `longest`: elements of a pooled vector."""
    cursor, blocks, ring = np.zeros(1, CURSOR), np.zeros(NUM_STAGES, BLOCK), np.zeros(2 * RING, np.int64)
    vectors, cells = np.zeros(CHUNK + 2 * longest + LINE_BYTES // 4, np.float32), np.zeros(MAX_CELLS, CELL)
    vectors = vectors[-vectors.ctypes.data % LINE_BYTES // 4 :]  # wide moves within a cache line take less time
    return cursor, blocks, ring, vectors, cells, new_ring()


class _Workspace(threading.local):
    """The working memory of each thread, made once, and again where longer vectors are pooled than before."""

    @functools.cached_property
    def steps(self) -> _Steps:
        return _steps(_FIRST_LONGEST)


def _steps(longest: int) -> _Steps:
    """A look-up in two calls, with working memory of its own: the first is told what the second one does.

    `longest`: elements of the longest vector that is pooled.
    """
    tables, segments = np.zeros(0, TABLE), np.zeros(0, SEGMENT)
    arguments = _arguments(1, tables, segments, _working_memory(longest), NO_POSITIONS, NO_POSITIONS)
    return arguments.bound_to(_describe_range), arguments.bound_to(of_ints(look_up_range))


def _arguments(
    num_threads: int,
    tables: NDArray[np.void],
    segments: NDArray[np.void],
    memory: tuple[NDArray[Any], ...],
    counts: NDArray[np.int64],
    positions: NDArray[np.int64],
) -> Arguments:
    """Those of `look_up_range`, for all of the segments."""
    return Arguments(num_threads, tables, segments, *memory, counts, positions, 0, 0, len(segments), 0)


_workspace = _Workspace()
_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
_NONE = int(PoolingCode.NONE)


def look_up(
    tables: NDArray[np.void],
    segments: NDArray[np.void],
    missing_counts: NDArray[np.int64],
    missing_positions: NDArray[np.int64],
    num_threads: int = 1,
) -> int:
    """Write the vectors of every key of every segment to its output; returns how many keys were unknown.

    `tables` and `segments` are arrays of the records in ../records.py, whose addresses must be valid.
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


class BoundLookups:
    """Look-ups in the same tables whose records stay where they are, by one thread at a time.

    A call of one is a single call of compiled code.
    """

    def __init__(self, tables: NDArray[np.void], num_threads: int = 1) -> None:
        """`tables`: TABLE records, which may change later; `num_threads`: see `look_up`."""
        self._tables, self._num_threads = tables, num_threads
        self._memory = _working_memory(_longest(tables))

    def bind(self, lookup: Lookup) -> Callable[[], object]:
        """A function that answers this look-up with what its records say then. It may be called again and again."""
        segments, counts = lookup.segments, lookup.num_unknown
        arguments = _arguments(self._num_threads, self._tables, segments, self._memory, counts, NO_POSITIONS)
        bound = arguments.bound_to(of_ints(look_up_range))

        def by_threads() -> None:
            if bound() < 0:
                look_up(self._tables, segments, counts, NO_POSITIONS, self._num_threads)

        if self._num_threads > 1:
            return by_threads
        return bound


def compile_kernels() -> None:
    """Compile what `look_up` runs, or load it from Numba's cache, so that no request waits for a compiler."""
    nothing, tables = np.zeros(0, np.int64), np.zeros(1, TABLE)
    look_up(tables, np.zeros(0, SEGMENT), nothing, nothing, num_threads=2)


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

    missing = run_parts(run, len(counts), _threads(os.getpid()))
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
    describe, run = _workspace.steps
    describe(tables, segments, *begin, *end, missing_counts, missing_positions)
    num_missing = run()
    if num_missing >= 0:
        return num_missing
    _workspace.steps = _steps(_longest(tables))
    return _lookup_range(tables, segments, begin, end, missing_counts, missing_positions)


def _longest(tables: NDArray[np.void]) -> int:
    """The elements of the longest vector of these tables."""
    return int(tables["embedding_dim"].max(initial=0))


@kernel
def _describe_range(
    arguments: int,
    tables: Any,
    segments: Any,
    segment: int,
    row: int,
    last_segment: int,
    last_row: int,
    missing_counts: Any,
    missing_positions: Any,
) -> None:
    """Write down what `look_up_range` is to do.

    A kernel apart, for it is soon compiled: `look_up_range` takes half of the time of all kernels, so it has one type
    of arguments only.
    """
    put_array(arguments, 1, tables)
    put_array(arguments, 2, segments)
    put_array(arguments, 9, missing_counts)
    put_array(arguments, 10, missing_positions)
    put_int(arguments, 11, segment)
    put_int(arguments, 12, row)
    put_int(arguments, 13, last_segment)
    put_int(arguments, 14, last_row)


@kernel
def look_up_range(arguments: int) -> Any:
    """Look up from one (segment, row) up to, not including, another; see `look_up`.

    Returns the number of unknown keys; -1, with nothing done, where several threads should do it, or the working memory
    is too short for a vector to pool.
    """
    tables, segments = array_at(arguments, 1, TABLE), array_at(arguments, 2, SEGMENT)
    if int_at(arguments, 0) > 1 and _num_bytes(tables, segments) >= 2 * PART_BYTES:
        return np.int64(-1)
    cursor, blocks, ring = array_at(arguments, 3, CURSOR), array_at(arguments, 4, BLOCK), array_at(arguments, 5, _INT64)
    scratch, cells = array_at(arguments, 6, _FLOAT32), array_at(arguments, 7, CELL)
    hashes, counts = array_at(arguments, 8, _INT64), array_at(arguments, 9, _INT64)
    positions = array_at(arguments, 10, _INT64)
    if not _can_pool(tables, segments, scratch):
        return np.int64(-1)
    whole = Span(int_at(arguments, 11), int_at(arguments, 12), int_at(arguments, 13), int_at(arguments, 14))
    return _look_up_span(tables, segments, whole, cursor, blocks, ring, scratch, cells, hashes, counts, positions)


@kernel
def _look_up_span(
    tables: Any,
    segments: Any,
    whole: Any,
    cursor: Any,
    blocks: Any,
    ring: Any,
    scratch: Any,
    cells: Any,
    hashes: Any,
    missing_counts: Any,
    missing_positions: Any,
) -> Any:
    for s in range(len(missing_counts)):
        missing_counts[s] = 0
    num_missing = np.int64(0)  # a plain 0 is a type of its own, for which all below would be compiled as well
    segment, row = whole.segment, whole.row
    while segment < whole.last_segment or (segment == whole.last_segment and row < whole.last_row):
        end = end_of_interleaved(tables, segments, segment, whole.last_segment) if row == 0 else segment
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
def _can_pool(tables: Any, segments: Any, scratch: Any) -> Any:
    """Whether there is room for what pooling keeps of a vector; see `look_up_blocks`."""
    for s in range(len(segments)):
        if segments[s].pooling != _NONE and 2 * tables[segments[s].table].embedding_dim > len(scratch) - CHUNK:
            return False
    return True


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
    num_bytes = _num_bytes(tables, segments)
    num_parts: int = max(min(len(cuts) - 1, num_bytes // PART_BYTES), 1)
    part, bytes_before, keys_before = 1, 0, 0
    for s in range(len(segments)):
        segment, key_bytes = segments[s], 4 * tables[segments[s].table].embedding_dim
        num_keys = _key_count(segment, segment.num_rows)
        segment_bytes = num_keys * key_bytes
        while part < num_parts and bytes_before + segment_bytes > num_bytes * part // num_parts:
            share = (num_bytes * part // num_parts - bytes_before) / segment_bytes
            row = np.int64(segment.num_rows * share)
            cuts[part] = (s, row, keys_before + _key_count(segment, row))
            part += 1
        bytes_before += segment_bytes
        keys_before += num_keys
    cuts[num_parts] = (len(segments), 0, keys_before)
    return num_parts


@kernel
def _num_bytes(tables: Any, segments: Any) -> Any:
    """Of all vectors, before they are pooled."""
    num_bytes = 0
    for s in range(len(segments)):
        num_bytes += _key_count(segments[s], segments[s].num_rows) * 4 * tables[segments[s].table].embedding_dim
    return num_bytes


@kernel
def _key_count(segment: Any, num_rows: int) -> Any:
    """The keys of this many of its rows, the first ones."""
    if segment.begins_address == 0:
        return num_rows * segment.keys_per_row
    count = 0
    for row in range(num_rows):
        count += max(bag_length(segment, row), 0)
    return count
