"""The look-up on the CPU: all tables of a request in one call, straight into the dense network's inputs.

A request is one stream of keys, cut into blocks. Three blocks are under way at a time, each in another stage:

    1  take the keys; ask for their lines of the index
    2  match tags; ask for the keys and vectors of the rows that match
    3  compare the keys, then copy or pool the vectors

so that memory works on some hundred lines at once while the processor never waits for a single one. Nothing here
allocates per key or holds the GIL. `gpu.py` is the twin with the same signature.
"""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.embedding_cache.kernels.hash_index import (
    BUCKET_BYTES,
    candidate_row,
    find_row,
    hash_key,
    home_bucket,
)
from inference_session.embedding_cache.kernels.intrinsics import (
    half_to_float,
    kernel,
    load,
    prefetch,
    store,
)
from inference_session.embedding_cache.kernels.layout import MAX_MARK, SEGMENT, TABLE, PoolingCode, VectorCode

BLOCK_KEYS = 64
NUM_STAGES = 3
CHUNK = 256
"""Elements that pooling handles at a time."""
MAX_PREFETCH_BYTES = 1024
"""Of one vector; the processor's own prefetcher follows a longer one."""
PART_BYTES = 256 << 10
"""Output a further thread must have to write before it is worth waking."""

_FLOAT32, _FLOAT16 = int(VectorCode.FLOAT32), int(VectorCode.FLOAT16)
_NONE, _MEAN, _MAX = int(PoolingCode.NONE), int(PoolingCode.MEAN), int(PoolingCode.MAX)


_KEY = np.dtype(
    [
        ("key", np.int64),
        ("hash", np.uint64),
        ("table", np.int64),  # record in which the row was found
        ("candidate", np.int64),  # row whose tag matches, to be compared first; -1: none
        ("row", np.int64),  # -1: not found so far
        ("position", np.int64),  # of the key in its segment
        ("output", np.int64),  # address to write to
        ("weight", np.float32),
        ("first", np.int32),  # 1: the first key of its bag
        ("divisor", np.int64),  # keys in the bag that ends with this key, 0 elsewhere
    ],
    align=True,
)
_BLOCK = np.dtype([("segment", np.int64), ("count", np.int64), ("keys", _KEY, (BLOCK_KEYS,))], align=True)
_CURSOR = np.dtype([(name, np.int64) for name in ("segment", "row", "column", "last_segment", "last_row")], align=True)


def lookup(
    tables: NDArray[np.void],
    segments: NDArray[np.void],
    missing_counts: NDArray[np.int64],
    missing_positions: NDArray[np.int64],
    num_threads: int = 1,
) -> int:
    """Write the vectors of every key of every segment to its output; returns how many keys were unknown.

    `tables` and `segments` are arrays of the records in layout.py; whoever filled them vouches for every address.
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
    """Compile what `lookup` runs, or load it from Numba's cache, so that no request waits for a compiler."""
    nothing = np.zeros(0, np.int64)
    lookup(np.zeros(1, TABLE), np.zeros(0, SEGMENT), nothing, nothing, num_threads=2)


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
    cursor = np.array([(*begin, 0, *end)], _CURSOR)
    blocks = np.empty(NUM_STAGES, _BLOCK)
    scratch = np.empty(CHUNK, np.float32)
    return int(_run_stages(tables, segments, cursor, blocks, scratch, missing_counts, missing_positions))


@kernel
def _run_stages(
    tables: Any,
    segments: Any,
    cursor: Any,
    blocks: Any,
    scratch: Any,
    missing_counts: Any,
    missing_positions: Any,
) -> Any:
    for b in range(NUM_STAGES):
        blocks[b].count = 0
        blocks[b].segment = 0
    missing_counts[:] = 0
    num_missing = 0
    step = 0
    idle = 0
    while idle < NUM_STAGES:
        newest, middle, oldest = blocks[step % 3], blocks[(step + 2) % 3], blocks[(step + 1) % 3]
        _take_keys(tables, segments, cursor[0], newest)
        if oldest.count > 0:
            missing = _find_rows(tables, segments[oldest.segment].table, oldest)
            if missing > 0:
                _note_missing(oldest, missing_positions, num_missing)
                missing_counts[oldest.segment] += missing
                num_missing += missing
        _advance(tables, segments, newest, middle, oldest, scratch)
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
        _take_keys_of(segments[s], tables[segments[s].table].embedding_dim, num_rows, cursor, block)
        if cursor.row >= num_rows:
            cursor.segment = s + 1
            cursor.row = 0


@kernel
def _take_keys_of(segment: Any, dim: int, num_rows: int, cursor: Any, block: Any) -> None:
    count = 0
    row, column = cursor.row, cursor.column
    while row < num_rows and count < BLOCK_KEYS:
        length = _bag_length(segment, row)
        taken = min(length - column, BLOCK_KEYS - count)
        if length > 0:
            _take_keys_of_row(segment, dim, row, column, taken, length, block, count)
            count += taken
            column += taken
        elif segment.pooling != _NONE:
            _fill_zeros(segment.output_address + row * segment.output_stride, dim)
        if column >= length:
            row += 1
            column = 0
    cursor.row = row
    cursor.column = column
    block.count = count


@kernel
def _bag_length(segment: Any, row: int) -> Any:
    if segment.begins_address == 0:
        return segment.keys_per_row
    return load(segment.ends_address, np.int64, row) - load(segment.begins_address, np.int64, row)


@kernel
def _take_keys_of_row(
    segment: Any, dim: int, row: int, column: int, taken: int, length: int, block: Any, count: int
) -> None:
    """Enter `taken` keys of one row, whose bag has `length`, from `column` on, as the block's keys from `count` on."""
    if segment.begins_address == 0:
        begin = row * segment.keys_per_row
        keys_address = segment.keys_address + row * segment.row_stride
    else:
        begin = load(segment.begins_address, np.int64, row)
        keys_address = segment.keys_address + begin * segment.key_stride
    output = segment.output_address + row * segment.output_stride
    output_step = 4 * dim if segment.pooling == _NONE else 0
    for j in range(column, column + taken):
        key = _load_key(keys_address + j * segment.key_stride, segment.key_bytes)
        item = block.keys[count + j - column]
        item.key = key
        item.hash = hash_key(key)
        item.row = -1
        item.position = begin + j
        item.output = output + j * output_step
        if segment.pooling != _NONE:
            weighted = segment.weights_address != 0
            item.weight = load(segment.weights_address, np.float32, begin + j) if weighted else 1.0
            item.first = 1 if j == 0 else 0
            item.divisor = length if segment.pooling == _MEAN and j == length - 1 else 0


@kernel
def _load_key(address: int, key_bytes: int) -> Any:
    return load(address, np.int64, 0) if key_bytes == 8 else np.int64(load(address, np.int32, 0))


@kernel
def _advance(tables: Any, segments: Any, newest: Any, middle: Any, oldest: Any, scratch: Any) -> None:
    """Stages 1 to 3 of three blocks, key by key in turn: memory takes few requests at once and drops prefetches that
    come in bursts.
    """
    if len(segments) == 0:
        return
    first, second, third = segments[newest.segment], segments[middle.segment], segments[oldest.segment]
    for i in range(max(newest.count, middle.count, oldest.count)):
        if i < newest.count:
            _prefetch_bucket(tables[first.table], newest.keys[i])
        if i < middle.count:
            _prefetch_row(tables[second.table], middle.keys[i])
        if i < oldest.count:
            _write_vector(tables, third, oldest.keys[i], scratch)


@kernel
def _prefetch_bucket(table: Any, item: Any) -> None:
    """Stage 1."""
    if table.index_address != 0:
        prefetch(table.index_address + BUCKET_BYTES * home_bucket(item.hash, table.num_buckets))


@kernel
def _prefetch_row(table: Any, item: Any) -> None:
    """Stage 2."""
    if table.index_address == 0:
        row = _row_of_number(item.key, table.num_rows)
    else:
        row = candidate_row(table.index_address, table.num_buckets, table.num_rows, item.hash)
        prefetch(table.keys_address + 8 * row)
    item.candidate = row
    if row >= 0:
        vector = table.vectors_address + row * table.row_bytes
        for address in range(vector, vector + min(table.row_bytes, MAX_PREFETCH_BYTES), 64):
            prefetch(address)
        if table.marks_address != 0:
            prefetch(table.marks_address + row)


@kernel
def _row_of_number(key: int, num_rows: int) -> Any:
    row = key + num_rows if key < 0 else key
    return row if 0 <= row < num_rows else -1


@kernel
def _find_rows(tables: Any, first_table: int, block: Any) -> Any:
    """Find the rows of the block, in the table and those chained behind it; returns the number of unknown keys."""
    t = first_table
    missing = _find_rows_in(tables[t], t, block)
    for _ in range(len(tables)):
        t = tables[t].next_table
        if missing == 0 or t < 0:
            break
        _prefetch_missing(tables[t], block)
        missing = _find_rows_in(tables[t], t, block)
    return missing


@kernel
def _prefetch_missing(table: Any, block: Any) -> None:
    for i in range(block.count):
        if block.keys[i].row < 0:
            _prefetch_bucket(table, block.keys[i])
    for i in range(block.count):
        if block.keys[i].row < 0:
            _prefetch_row(table, block.keys[i])


@kernel
def _find_rows_in(table: Any, t: int, block: Any) -> Any:
    missing = 0
    for i in range(block.count):
        item = block.keys[i]
        if item.row >= 0:
            continue
        row = item.candidate
        if table.index_address != 0 and (row < 0 or load(table.keys_address, np.int64, row) != item.key):
            row = find_row(
                table.index_address, table.num_buckets, table.keys_address, table.num_rows, item.key, item.hash
            )
        item.row = row
        item.table = t
        if row < 0:
            missing += 1
        elif table.marks_address != 0:
            _mark(table.marks_address, row)
    return missing


@kernel
def _mark(marks_address: int, row: int) -> None:
    """Two readers that mark a row at once may count as one, which the cache does not mind."""
    mark = load(marks_address, np.uint8, row)
    if mark < MAX_MARK:
        store(marks_address, np.uint8, row, np.uint8(mark + 1))


@kernel
def _note_missing(block: Any, positions: Any, num_noted: int) -> None:
    for i in range(block.count):
        if block.keys[i].row < 0 and num_noted < len(positions):
            positions[num_noted] = block.keys[i].position
            num_noted += 1


@kernel
def _write_vector(tables: Any, segment: Any, item: Any, scratch: Any) -> None:
    """Stage 3."""
    own = tables[segment.table]
    source, code = own.default_address, _FLOAT32
    if item.row >= 0:
        table = tables[item.table]
        source, code = table.vectors_address + item.row * table.row_bytes, table.vector_code
    if segment.pooling != _NONE:
        _pool_vector(segment.pooling, item, source, code, own.embedding_dim, scratch)
    elif source != 0:
        _copy_vector(item.output, source, code, own.embedding_dim)


@kernel
def _copy_vector(output: int, source: int, code: int, dim: int) -> None:
    if code != _FLOAT32:
        _widen(output, source, code, dim, 0, dim)
    else:
        for d in range(dim):
            store(output, np.float32, d, load(source, np.float32, d))


@kernel
def _pool_vector(pooling: int, item: Any, source: int, code: int, dim: int, scratch: Any) -> None:
    """Let one vector take part in its bag."""
    for begin in range(0, dim, CHUNK):
        count = min(CHUNK, dim - begin)
        vector = source + 4 * begin
        if source == 0 or code != _FLOAT32:
            vector = scratch.ctypes.data
            _widen(vector, source, code, dim, begin, count)
        _pool_chunk(pooling, item, item.output + 4 * begin, vector, count)


@kernel
def _pool_chunk(pooling: int, item: Any, pooled: int, vector: int, count: int) -> None:
    """The first key of a bag sets the output, further ones take part, the last one of a mean divides."""
    weight, divisor = item.weight, np.float32(item.divisor)
    if item.first != 0:
        for d in range(count):
            store(pooled, np.float32, d, load(vector, np.float32, d) * weight)
    elif pooling == _MAX:
        for d in range(count):
            store(pooled, np.float32, d, _maximum(load(pooled, np.float32, d), load(vector, np.float32, d)))
    else:
        for d in range(count):
            store(pooled, np.float32, d, load(pooled, np.float32, d) + load(vector, np.float32, d) * weight)
    if item.divisor > 1:
        for d in range(count):
            store(pooled, np.float32, d, load(pooled, np.float32, d) / divisor)


@kernel
def _maximum(a: float, b: float) -> float:
    """A NaN wins, as in NumPy and the frameworks."""
    return b if b > a or b != b else a  # noqa: PLR0124


@kernel
def _widen(output: int, source: int, code: int, dim: int, begin: int, count: int) -> None:
    """Write elements of a float16 or int8 vector, from `begin` on, as float32; a vector at address 0 is zeros."""
    if source == 0:
        _fill_zeros(output, count)
    elif code == _FLOAT16:
        for d in range(count):
            store(output, np.float32, d, half_to_float(load(source, np.uint16, begin + d)))
    else:
        scale, bias = load(source + dim, np.float32, 0), load(source + dim, np.float32, 1)
        for d in range(count):
            store(output, np.float32, d, np.float32(load(source, np.int8, begin + d)) * scale + bias)


@kernel
def _fill_zeros(output: int, count: int) -> None:
    for d in range(count):
        store(output, np.float32, d, np.float32(0))


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
        count += max(_bag_length(segment, row), 0)
    return count
