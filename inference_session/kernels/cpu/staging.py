"""Requests become the records of one look-up, without Python per input: their arrays are read by their headers.

The keys stay where the requests have them: each look-up gets a SEGMENT record per request, all of which write to the
same array of vectors. Inputs that the network reads are copied behind each other to where it reads them, which
may be next to vectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from inference_session.kernels.array_headers import (
    C_CONTIGUOUS,
    DATA,
    DTYPE,
    FLAGS,
    LIST_ITEMS,
    OBJECT_TYPE,
    RANK,
    SIZES,
)
from inference_session.kernels.cpu.arguments import Arguments, array_at, int_at
from inference_session.kernels.cpu.intrinsics import copy_bytes, kernel, load
from inference_session.kernels.records import SEGMENT, PoolingCode

MAX_RANK = 8
OPEN, DIFFERING = -1, -2
"""In place of a size: it may be any, the same in all requests of a batch; it may differ between them."""
STAGED, NOT_STAGED, NO_ROOM = range(3)
"""What `stage` returns: all is in place; the requests are not as described; some memory is too small."""
INT64 = np.dtype(np.int64)
_MAX_SIZE = 1 << 31
_NONE = int(PoolingCode.NONE)

INPUT = np.dtype(
    [
        ("dtypes", np.int64, (2,)),  # addresses of the dtype objects that are accepted
        ("element_bytes", np.int64),
        ("rank", np.int64),
        ("expected", np.int64, (MAX_RANK,)),  # sizes, OPEN or DIFFERING
        ("sizes", np.int64, (MAX_RANK,)),  # receives those of the batch; DIFFERING as it is
        ("is_read", np.int64),  # by the network
        ("is_contexts", np.int64),  # each request has one row, whatever its number of samples is
        ("vector_input", np.int64),  # number of the record whose last columns it is; -1: it has memory of its own
        ("column_bytes", np.int64),  # distance from the beginning of the row there
        ("address", np.int64),  # where it reads
        ("num_bytes", np.int64),  # room there
        ("wanted_bytes", np.int64),  # receives what a batch needs
    ],
    align=True,
)
LOOKUP = np.dtype(
    [
        ("table", np.int64),
        ("embedding_dim", np.int64),
        ("pooling", np.int64),  # PoolingCode
        ("keys", np.int64),  # number of the input
        ("weights", np.int64),  # number of the input, -1: none
        ("first_column", np.int64),  # of the input, -1: all of it is keys
        ("num_columns", np.int64),
        ("vector_input", np.int64),  # number of its record
        ("joined", np.int64),  # next to others in it
        ("is_contexts", np.int64),  # as its keys
        ("rows_per_sample", np.int64),  # the remaining fields are worked out for each batch
        ("keys_per_row", np.int64),
        ("column_bytes", np.int64),  # distance from the beginning of the row
    ],
    align=True,
)
VECTOR_INPUT = np.dtype(
    [
        ("address", np.int64),  # where the network reads vectors
        ("num_bytes", np.int64),  # room there
        ("wanted_bytes", np.int64),  # receives what a batch needs
        ("given_bytes", np.int64),  # of a row, behind the vectors: for inputs, and zeros
        ("row_bytes", np.int64),  # of one output row, worked out for each batch
        ("rows_per_sample", np.int64),
        ("is_contexts", np.int64),
    ],
    align=True,
)


@kernel
def stage(arguments: int, items: int, num_requests: int) -> int:
    """Read the arrays of some requests, and describe their look-up.

    Args:
        arguments: address of Arguments:
            array_type: address of NumPy's type of arrays.
            max_elements: of one array, more of which are not staged.
            inputs: INPUT records of the model's inputs, in the order of the arrays.
            lookups: LOOKUP records.
            vector_inputs: VECTOR_INPUT records: what the network reads vectors from.
            open_sizes: receives the samples of the batch, then the sizes that are open, input after input, then, where
                it is that long, the number of requests.
            counts: [requests] receives the samples of each.
            segments: SEGMENT records, [requests x look-ups] or more, which receive the look-up.
            num_keys: as many, receives the keys of each segment.
        items: address of a list of arrays, request after request, which lives as long as the look-up.
        num_requests: how many; the list has as many arrays for each as there are inputs.
    """
    array_type, max_elements = int_at(arguments, 0), int_at(arguments, 1)
    inputs, lookups = array_at(arguments, 2, INPUT), array_at(arguments, 3, LOOKUP)
    vector_inputs, open_sizes = array_at(arguments, 4, VECTOR_INPUT), array_at(arguments, 5, INT64)
    counts, segments = array_at(arguments, 6, INT64), array_at(arguments, 7, SEGMENT)
    num_keys = array_at(arguments, 8, INT64)
    arrays = load(items + LIST_ITEMS, np.int64, 0)
    if num_requests > len(counts) or num_requests * len(lookups) > len(segments):
        return NO_ROOM
    num_samples = check_arrays(arrays, num_requests, array_type, max_elements, inputs, counts)
    if num_samples <= 0:
        return NOT_STAGED
    note_open_sizes(inputs, num_samples, num_requests, open_sizes)
    _lay_out(inputs, lookups, vector_inputs, num_samples, num_requests)
    if not has_room(inputs, vector_inputs):
        return NO_ROOM
    _copy_inputs(arrays, num_requests, inputs, vector_inputs, counts)
    _fill_segments(arrays, num_requests, inputs, lookups, vector_inputs, counts, segments, num_keys)
    return STAGED


def compile_kernels() -> None:
    """Compile `stage`, or load it from Numba's cache, so that no request waits for a compiler."""
    nothing, items = np.zeros(0, np.int64), list[Any]()
    records = np.zeros(0, INPUT), np.zeros(0, LOOKUP), np.zeros(0, VECTOR_INPUT)
    arguments = Arguments(0, 0, *records, nothing, nothing, np.zeros(0, SEGMENT), nothing)
    arguments.bound_to(stage)(id(items), 1)


@kernel
def header_at(arrays: int, num_inputs: int, request: int, number: int) -> Any:
    """The address of an array's header."""
    return load(arrays, np.int64, request * num_inputs + number)


@kernel
def check_arrays(arrays: int, num_requests: int, array_type: int, max_elements: int, inputs: Any, counts: Any) -> Any:
    """Compare all arrays with what is expected, note their sizes, and return the number of samples; -1: they differ.

    Where requests have a context, each has one, and all have equally many samples.
    """
    num_samples, has_contexts = np.int64(0), False
    for r in range(num_requests):
        counts[r] = -1
        for i in range(len(inputs)):
            array = header_at(arrays, len(inputs), r, i)
            if load(array + OBJECT_TYPE, np.int64, 0) != array_type:
                return -1
            if not _is_as_expected(array, inputs[i], r == 0, max_elements):
                return -1
            count = load(load(array + SIZES, np.int64, 0), np.int64, 0)
            if inputs[i].is_contexts:
                has_contexts = True
                if count != 1:
                    return -1
            elif counts[r] < 0:
                counts[r] = count
                num_samples += count
            elif count != counts[r]:
                return -1
        if has_contexts and counts[r] != counts[0]:
            return -1
    return num_samples


@kernel
def _is_as_expected(array: int, record: Any, is_first: bool, max_elements: int) -> Any:
    dtype = load(array + DTYPE, np.int64, 0)
    if (dtype != record.dtypes[0] and dtype != record.dtypes[1]) or load(array + RANK, np.int32, 0) != record.rank:
        return False
    if load(array + FLAGS, np.int32, 0) & C_CONTIGUOUS == 0:
        return False
    sizes = load(array + SIZES, np.int64, 0)
    num_elements = load(sizes, np.int64, 0)
    product = max(num_elements, 1)  # as if no size were 0: it stays small, and so do all addresses
    for axis in range(1, record.rank):
        size, expected = load(sizes, np.int64, axis), record.expected[axis]
        if size > _MAX_SIZE or product > _MAX_SIZE:
            return False
        if expected == OPEN and is_first:
            record.sizes[axis] = size
        elif expected == OPEN:
            expected = record.sizes[axis]
        if expected >= 0 and size != expected:
            return False
        num_elements *= size
        product *= max(size, 1)
    return num_elements <= max_elements and product <= _MAX_SIZE


@kernel
def note_open_sizes(inputs: Any, num_samples: int, num_requests: int, open_sizes: Any) -> None:
    open_sizes[0] = num_samples
    at = 1
    for i in range(len(inputs)):
        for axis in range(1, inputs[i].rank):
            if inputs[i].expected[axis] == OPEN:
                open_sizes[at] = inputs[i].sizes[axis]
                at += 1
    if at < len(open_sizes):
        open_sizes[at] = num_requests


@kernel
def _inner(record: Any) -> Any:
    """Elements of one sample, without the last axis."""
    inner = np.int64(1)
    for axis in range(1, record.rank - 1):
        inner *= record.sizes[axis]
    return inner


@kernel
def _lay_out(inputs: Any, lookups: Any, vector_inputs: Any, num_samples: int, num_requests: int) -> None:
    """Work out what follows from the sizes of a batch."""
    for i in range(len(inputs)):
        record = inputs[i]
        last = record.sizes[record.rank - 1] if record.rank > 1 else 1
        num_rows = num_requests if record.is_contexts else num_samples
        has_memory = record.is_read and record.vector_input < 0
        record.wanted_bytes = num_rows * _inner(record) * last * record.element_bytes if has_memory else 0
    for i in range(len(lookups)):
        _lay_out_lookup(lookups[i], inputs[lookups[i].keys])
    lay_out_vectors(lookups, vector_inputs, num_samples, num_requests)


@kernel
def lay_out_vectors(lookups: Any, vector_inputs: Any, num_samples: int, num_requests: int) -> None:
    """Work out the rows of vector inputs, from those of their look-ups."""
    for v in range(len(vector_inputs)):
        vector_inputs[v].row_bytes = 0
    for i in range(len(lookups)):
        lookup, vector_input = lookups[i], vector_inputs[lookups[i].vector_input]
        side_by_side = lookup.keys_per_row if lookup.pooling == _NONE else 1
        lookup.column_bytes = vector_input.row_bytes
        vector_input.row_bytes += 4 * lookup.embedding_dim * side_by_side
        vector_input.rows_per_sample, vector_input.is_contexts = lookup.rows_per_sample, lookup.is_contexts
    for v in range(len(vector_inputs)):
        vector_inputs[v].row_bytes += vector_inputs[v].given_bytes
        num_rows = num_requests if vector_inputs[v].is_contexts else num_samples
        vector_inputs[v].wanted_bytes = num_rows * vector_inputs[v].rows_per_sample * vector_inputs[v].row_bytes


@kernel
def _lay_out_lookup(lookup: Any, keys: Any) -> None:
    """How many output rows a sample has, and how many keys one of them, where these do not differ."""
    inner, last = _inner(keys), keys.sizes[keys.rank - 1] if keys.rank > 1 else 1
    if lookup.first_column >= 0:
        lookup.rows_per_sample, lookup.keys_per_row = 1, lookup.num_columns
    elif lookup.joined:
        lookup.rows_per_sample, lookup.keys_per_row = 1, inner * last
    elif lookup.pooling == _NONE:
        lookup.rows_per_sample, lookup.keys_per_row = inner * last, 1
    else:
        lookup.rows_per_sample, lookup.keys_per_row = inner, last


@kernel
def has_room(inputs: Any, vector_inputs: Any) -> Any:
    """Whether the memory of all records is as large as a batch needs."""
    num_short = 0
    for i in range(len(inputs)):
        num_short += inputs[i].wanted_bytes > inputs[i].num_bytes
    for v in range(len(vector_inputs)):
        num_short += vector_inputs[v].wanted_bytes > vector_inputs[v].num_bytes
    return num_short == 0


@kernel
def _copy_inputs(arrays: int, num_requests: int, inputs: Any, vector_inputs: Any, counts: Any) -> None:
    """Put what the network reads behind each other."""
    for i in range(len(inputs)):
        record = inputs[i]
        if record.is_read:
            last = record.sizes[record.rank - 1] if record.rank > 1 else 1
            sample_bytes, target, row_bytes = _inner(record) * last * record.element_bytes, record.address, np.int64(0)
            if record.vector_input >= 0:
                joined = vector_inputs[record.vector_input]
                target, row_bytes = joined.address + record.column_bytes, joined.row_bytes
            for r in range(num_requests):
                source = load(header_at(arrays, len(inputs), r, i) + DATA, np.int64, 0)
                num_rows = np.int64(1) if record.is_contexts else counts[r]
                if row_bytes > 0:
                    copy_rows(target, row_bytes, source, sample_bytes, num_rows)
                    target += num_rows * row_bytes
                else:
                    copy_bytes(target, source, num_rows * sample_bytes)
                    target += num_rows * sample_bytes


@kernel
def copy_rows(target: int, target_bytes: int, source: int, row_bytes: int, num_rows: int) -> None:
    """Copy adjacent rows to where they are `target_bytes` apart."""
    for row in range(num_rows):
        copy_bytes(target + row * target_bytes, source + row * row_bytes, row_bytes)


@kernel
def _fill_segments(
    arrays: int,
    num_requests: int,
    inputs: Any,
    lookups: Any,
    vector_inputs: Any,
    counts: Any,
    segments: Any,
    num_keys: Any,
) -> None:
    s, samples_before = 0, np.int64(0)
    for r in range(num_requests):
        for i in range(len(lookups)):
            lookup, segment = lookups[i], segments[s]
            array = header_at(arrays, len(inputs), r, lookup.keys)
            _enter_keys(segment, lookup, inputs[lookup.keys], array)
            if lookup.is_contexts:
                enter_output(segment, lookup, vector_inputs[lookup.vector_input], np.int64(r), np.int64(1))
            else:
                enter_output(segment, lookup, vector_inputs[lookup.vector_input], samples_before, counts[r])
            if lookup.weights >= 0:
                weights = header_at(arrays, len(inputs), r, lookup.weights)
                segment.weights_address = load(weights + DATA, np.int64, 0)
            num_keys[s] = segment.num_rows * segment.keys_per_row
            s += 1
        samples_before += counts[r]


@kernel
def enter_output(segment: Any, lookup: Any, vector_input: Any, samples_before: int, num_samples: int) -> None:
    """Enter where the vectors of one request go, behind those of the samples before it."""
    rows_before = samples_before * lookup.rows_per_sample
    segment.table, segment.pooling = lookup.table, lookup.pooling
    segment.num_rows = num_samples * lookup.rows_per_sample
    segment.output_address = vector_input.address + rows_before * vector_input.row_bytes + lookup.column_bytes
    segment.output_stride = vector_input.row_bytes


@kernel
def _enter_keys(segment: Any, lookup: Any, keys: Any, array: int) -> None:
    """Enter where the keys of one request are."""
    segment.keys_address = load(array + DATA, np.int64, 0)
    segment.begins_address, segment.ends_address, segment.weights_address = 0, 0, 0
    segment.key_bytes, segment.key_stride = keys.element_bytes, keys.element_bytes
    segment.keys_per_row = lookup.keys_per_row
    if keys.expected[keys.rank - 1] == DIFFERING:
        last = load(load(array + SIZES, np.int64, 0), np.int64, keys.rank - 1)
        segment.keys_per_row = _inner(keys) * last if lookup.joined else last
    segment.row_stride = segment.keys_per_row * keys.element_bytes
    if lookup.first_column >= 0:
        segment.keys_address += lookup.first_column * keys.element_bytes
        segment.row_stride = keys.sizes[1] * keys.element_bytes
