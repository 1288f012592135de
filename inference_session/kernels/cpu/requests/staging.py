"""Requests become the records of one look-up, without Python per input: their arrays are read by their headers.

The keys stay where the requests have them: each look-up gets a SEGMENT record per request, all of which write to the
same array of vectors. Inputs that a network reads are copied behind each other to where it reads them, which may be
next to vectors.

Where a key graph computes keys, it runs between two parts of this: `read` gives it its inputs, and `describe` leads the
look-up to its results.
"""

from __future__ import annotations

from collections.abc import Callable
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
_ADDRESS_BYTES = 8
_NONE = int(PoolingCode.NONE)

INPUT = np.dtype(
    [
        ("dtypes", np.int64, (2,)),  # addresses of the dtype objects that are accepted
        ("element_bytes", np.int64),
        ("rank", np.int64),
        ("expected", np.int64, (MAX_RANK,)),  # sizes, OPEN or DIFFERING
        ("sizes", np.int64, (MAX_RANK,)),  # receives those of the batch; DIFFERING as it is
        ("is_read", np.int64),  # by the network or the key graph
        ("makes_keys", np.int64),  # read by the key graph
        ("is_contexts", np.int64),  # each request has one row, whatever its number of samples is
        ("is_flat", np.int64),  # the first two sizes are one in the result of the key graph
        ("vector_input", np.int64),  # number of the record whose last columns it is; -1: of none
        ("column_bytes", np.int64),  # distance from the beginning of the row there
        ("address", np.int64),  # where else it is read; of a result of the key graph, where it is
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
        ("keys", np.int64),  # number of the INPUT record
        ("weights", np.int64),  # the same, -1: none
        ("first_column", np.int64),  # of the input, -1: all of it is keys
        ("num_columns", np.int64),
        ("vector_input", np.int64),  # number of its record
        ("in_matrix", np.int64),  # next to others in it
        ("rows_per_sample", np.int64),  # this field, and those behind it, are worked out for each batch
        ("keys_per_row", np.int64),
        ("column_bytes", np.int64),  # distance from the beginning of the row
        ("is_contexts", np.int64),  # as its keys
    ],
    align=True,
)
VECTOR_INPUT = np.dtype(
    [
        ("address", np.int64),  # where the network reads vectors
        ("num_bytes", np.int64),  # room there
        ("wanted_bytes", np.int64),  # receives what a batch needs
        ("given_bytes", np.int64),  # of a row, behind the vectors: for inputs, and zeros
        ("vector_bytes", np.int64),  # what the vectors of a row must take, where others are behind them; 0: any number
        ("row_bytes", np.int64),  # of one output row, worked out for each batch
        ("rows_per_sample", np.int64),
        ("is_contexts", np.int64),
    ],
    align=True,
)


@kernel
def stage(arguments: int, items: int, num_requests: int) -> int:
    """Read the arrays of some requests, and describe their look-up, where all keys are inputs.

    Args:
        arguments: address of Arguments:
            array_type: address of NumPy's type of arrays.
            max_elements: of one array, more of which are not staged.
            num_arrays: of each request.
            inputs: INPUT records of the model's inputs, in the order of the arrays, then of the key graph's results.
            lookups: LOOKUP records.
            vector_inputs: VECTOR_INPUT records: what the network reads vectors from.
            open_sizes: receives the samples of the batch, then the sizes that are open, input after input, then, where
                it is that long, the number of requests.
            counts: [requests] receives the samples of each.
            segments: SEGMENT records, [requests x look-ups] or more, which receive the look-up.
            num_keys: as many, receives the keys of each segment.
        items: address of a list of arrays, request after request, which lives as long as the look-up.
        num_requests: how many; the list has `num_arrays` for each.
    """
    status = read(arguments, items, num_requests)
    return describe(arguments, items, num_requests) if status == STAGED else status


@kernel
def read(arguments: int, items: int, num_requests: int) -> int:
    """The first part of `stage`: check the arrays, and copy what the key graph reads."""
    array_type, max_elements = int_at(arguments, 0), int_at(arguments, 1)
    inputs = array_at(arguments, 3, INPUT)[: int_at(arguments, 2)]
    lookups, vector_inputs = array_at(arguments, 4, LOOKUP), array_at(arguments, 5, VECTOR_INPUT)
    open_sizes, counts = array_at(arguments, 6, INT64), array_at(arguments, 7, INT64)
    arrays = load(items + LIST_ITEMS, np.int64, 0)
    if num_requests > len(counts) or num_requests * len(lookups) > len(array_at(arguments, 8, SEGMENT)):
        return NO_ROOM
    num_samples = check_arrays(arrays, num_requests, array_type, max_elements, inputs, counts)
    if num_samples <= 0:
        return NOT_STAGED
    note_open_sizes(inputs, num_samples, num_requests, open_sizes)
    for i in range(len(inputs)):
        num_rows = num_requests if inputs[i].is_contexts else num_samples
        has_memory = inputs[i].makes_keys or (inputs[i].is_read and inputs[i].vector_input < 0)
        inputs[i].wanted_bytes = num_rows * _row_bytes(inputs[i]) if has_memory else 0
    for v in range(len(vector_inputs)):
        vector_inputs[v].wanted_bytes = 0  # not known yet
    if not has_room(inputs):
        return NO_ROOM
    for i in range(len(inputs)):
        if inputs[i].makes_keys:
            _copy_input(arrays, num_requests, inputs, i, counts, inputs[i].address, _row_bytes(inputs[i]))
    return STAGED


@kernel
def describe(arguments: int, items: int, num_requests: int) -> int:
    """The second part of `stage`: copy what only the network reads, and fill in the look-up."""
    num_arrays, tensors = int_at(arguments, 2), array_at(arguments, 3, INPUT)
    lookups, vector_inputs = array_at(arguments, 4, LOOKUP), array_at(arguments, 5, VECTOR_INPUT)
    open_sizes, counts = array_at(arguments, 6, INT64), array_at(arguments, 7, INT64)
    segments, num_keys = array_at(arguments, 8, SEGMENT), array_at(arguments, 9, INT64)
    arrays = load(items + LIST_ITEMS, np.int64, 0)
    for i in range(len(lookups)):
        _lay_out_lookup(lookups[i], tensors[lookups[i].keys])
    lay_out_vectors(lookups, vector_inputs, open_sizes[0], num_requests)
    for v in range(len(vector_inputs)):  # a key graph may give more or fewer keys than the network has room for
        vector_bytes = vector_inputs[v].row_bytes - vector_inputs[v].given_bytes
        if vector_inputs[v].vector_bytes > 0 and vector_bytes != vector_inputs[v].vector_bytes:
            return NOT_STAGED
    if not has_room(vector_inputs):
        return NO_ROOM
    _copy_other_inputs(arrays, num_requests, tensors[:num_arrays], vector_inputs, counts)
    _fill_segments(arrays, num_requests, num_arrays, tensors, lookups, vector_inputs, counts, segments, num_keys)
    return STAGED


def compile_kernels(*kernels: Callable[[int, int, int], int]) -> None:
    """Compile these, or `stage` and its parts, or load them from Numba's cache: no request waits for a compiler."""
    nothing, items = np.zeros(0, np.int64), list[Any]()
    records = np.zeros(0, INPUT), np.zeros(0, LOOKUP), np.zeros(0, VECTOR_INPUT)
    arguments = Arguments(0, 0, 0, *records, np.zeros(1, np.int64), nothing, np.zeros(0, SEGMENT), nothing)
    for one in kernels or (stage, read, describe):
        arguments.bound_to(one)(id(items), 1)


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
def _row_bytes(record: Any) -> Any:
    """Bytes of one sample."""
    last = record.sizes[record.rank - 1] if record.rank > 1 else 1
    return _inner(record) * last * record.element_bytes


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
    lookup.is_contexts = keys.is_contexts
    if lookup.first_column >= 0:
        lookup.rows_per_sample, lookup.keys_per_row = 1, lookup.num_columns
    elif lookup.in_matrix:
        lookup.rows_per_sample, lookup.keys_per_row = 1, inner * last
    elif lookup.pooling == _NONE:
        lookup.rows_per_sample, lookup.keys_per_row = inner * last, 1
    else:
        lookup.rows_per_sample, lookup.keys_per_row = inner, last


@kernel
def has_room(records: Any) -> Any:
    """Whether the memory of all these INPUT or VECTOR_INPUT records is as large as a batch needs."""
    num_short = 0
    for i in range(len(records)):
        num_short += records[i].wanted_bytes > records[i].num_bytes
    return num_short == 0


@kernel
def _copy_other_inputs(arrays: int, num_requests: int, inputs: Any, vector_inputs: Any, counts: Any) -> None:
    """Put what the network reads next to vectors, or behind each other unless the key graph reads it there."""
    for i in range(len(inputs)):
        if inputs[i].vector_input >= 0:
            matrix = vector_inputs[inputs[i].vector_input]
            target = matrix.address + inputs[i].column_bytes
            _copy_input(arrays, num_requests, inputs, i, counts, target, matrix.row_bytes)
        elif inputs[i].is_read and inputs[i].makes_keys == 0:
            _copy_input(arrays, num_requests, inputs, i, counts, inputs[i].address, _row_bytes(inputs[i]))


@kernel
def _copy_input(
    arrays: int, num_requests: int, inputs: Any, number: int, counts: Any, target: int, to_next_row: int
) -> None:
    """Put the rows of an input of all requests behind each other, this many bytes from one to the next."""
    record, row_bytes = inputs[number], _row_bytes(inputs[number])
    for r in range(num_requests):
        source = load(header_at(arrays, len(inputs), r, number) + DATA, np.int64, 0)
        num_rows = np.int64(1) if record.is_contexts else counts[r]
        if to_next_row == row_bytes:
            copy_bytes(target, source, num_rows * row_bytes)
        else:
            copy_rows(target, to_next_row, source, row_bytes, num_rows)
        target += num_rows * to_next_row


@kernel
def copy_rows(target: int, target_bytes: int, source: int, row_bytes: int, num_rows: int) -> None:
    """Copy adjacent rows to where they are `target_bytes` apart."""
    for row in range(num_rows):
        copy_bytes(target + row * target_bytes, source + row * row_bytes, row_bytes)


@kernel
def _fill_segments(
    arrays: int,
    num_requests: int,
    num_arrays: int,
    tensors: Any,
    lookups: Any,
    vector_inputs: Any,
    counts: Any,
    segments: Any,
    num_keys: Any,
) -> None:
    s, samples_before = 0, np.int64(0)
    for r in range(num_requests):
        request = arrays + _ADDRESS_BYTES * num_arrays * r
        for i in range(len(lookups)):
            lookup, segment = lookups[i], segments[s]
            first_row = np.int64(r) if lookup.is_contexts else samples_before
            num_rows = np.int64(1) if lookup.is_contexts else counts[r]
            _enter_keys(segment, lookup, request, num_arrays, tensors, first_row)
            enter_output(segment, lookup, vector_inputs[lookup.vector_input], first_row, num_rows)
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
def _enter_keys(segment: Any, lookup: Any, request: int, num_arrays: int, tensors: Any, first_row: int) -> None:
    """Enter where the keys of one request are."""
    keys = tensors[lookup.keys]
    segment.keys_address = _values_at(request, num_arrays, tensors, lookup.keys, first_row)
    segment.begins_address, segment.ends_address, segment.weights_address = 0, 0, 0
    if lookup.weights >= 0:
        segment.weights_address = _values_at(request, num_arrays, tensors, lookup.weights, first_row)
    segment.key_bytes, segment.key_stride = keys.element_bytes, keys.element_bytes
    segment.keys_per_row = lookup.keys_per_row
    if keys.expected[keys.rank - 1] == DIFFERING:
        array = load(request, np.int64, lookup.keys)
        last = load(load(array + SIZES, np.int64, 0), np.int64, keys.rank - 1)
        segment.keys_per_row = _inner(keys) * last if lookup.in_matrix else last
    segment.row_stride = segment.keys_per_row * keys.element_bytes
    if lookup.first_column >= 0:
        segment.keys_address += lookup.first_column * keys.element_bytes
        segment.row_stride = keys.sizes[1] * keys.element_bytes


@kernel
def _values_at(request: int, num_arrays: int, tensors: Any, number: int, first_row: int) -> Any:
    """The address of a request's values of that number: its own array, or rows of a result of the key graph, which has
    those of all requests.
    """
    if number < num_arrays:
        return load(load(request, np.int64, number) + DATA, np.int64, 0)
    return tensors[number].address + first_row * _row_bytes(tensors[number])
