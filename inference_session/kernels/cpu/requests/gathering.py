"""The inputs of requests go to where a recorded batch reads them, without Python per input or request.

First the requests are compared with what is expected, and their samples counted; then, once it is known which recorded
batch has that shape, their values are copied to its places.
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
from inference_session.kernels.cpu.intrinsics import copy_bytes, kernel, load, store
from inference_session.kernels.cpu.requests.bags import have_one_key_each
from inference_session.kernels.cpu.requests.staging import INPUT, check_arrays, header_at, note_open_sizes

SAME, FROM_INT32, FROM_UINT32 = range(3)
"""How elements are copied: as they are, or as int64 from narrower integers."""

COPY = np.dtype(
    [
        ("input", np.int64),  # number of the input
        ("address", np.int64),  # of the copy
        ("element_bytes", np.int64),  # of the input
        ("conversion", np.int64),  # SAME, FROM_INT32 or FROM_UINT32
        ("row_elements", np.int64),  # of a sample in the input
        ("first", np.int64),  # of them that is copied
        ("num", np.int64),  # how many of them are copied
        ("to_next_element", np.int64),  # in the copy, in elements: from one of a sample to the next
        ("to_next_sample", np.int64),  # the same from a sample to the next
        ("is_contexts", np.int64),  # 1: each request has one row, whatever its number of samples is
    ],
    align=True,
)
PACKED = np.dtype(
    [
        ("dense", np.int64),  # numbers of the inputs
        ("keys", np.int64),
        ("offsets", np.int64),
        ("dense_dim", np.int64),
        ("num_tables", np.int64),
        ("num_slots", np.int64),  # of all tables
        ("max_samples", np.int64),  # of one request
    ],
    align=True,
)


@kernel
def check_tensors(
    items: int, num_requests: int, array_type: int, max_elements: int, inputs: Any, open_sizes: Any, counts: Any
) -> Any:
    """Whether the requests have what a model's inputs describe, equal in all sizes but the samples.

    Args:
        items: address of a list of arrays, request after request, which no other thread changes meanwhile.
        num_requests: how many; the list has as many arrays for each as there are inputs.
        array_type: address of NumPy's type of arrays.
        max_elements: of one array.
        inputs: INPUT records of the model's inputs, in the order of the arrays.
        open_sizes: receives the samples of the batch, then the sizes that are open, input after input, then, where it
            is that long, the number of requests.
        counts: [requests or more] receives the samples of each.
    """
    arrays = load(items + LIST_ITEMS, np.int64, 0)
    num_samples = check_arrays(arrays, num_requests, array_type, max_elements, inputs, counts)
    if num_samples <= 0:
        return False
    note_open_sizes(inputs, num_samples, num_requests, open_sizes)
    return True


@kernel
def check_packed(
    items: int,
    num_requests: int,
    array_type: int,
    max_elements: int,
    inputs: Any,
    packed: Any,
    slots: Any,
    open_sizes: Any,
    counts: Any,
) -> Any:
    """As `check_tensors` for HugeCTR's requests, and whether each slot of each sample has one key.

    Args:
        packed: one PACKED record; `slots`: [tables].
    """
    arrays = load(items + LIST_ITEMS, np.int64, 0)
    total = np.int64(0)
    for r in range(num_requests):
        for i in range(len(inputs)):
            array = header_at(arrays, len(inputs), r, i)
            if load(array + OBJECT_TYPE, np.int64, 0) != array_type or not _is_flat(array, inputs[i], max_elements):
                return False
        counts[r] = _samples_of(arrays + 8 * len(inputs) * r, packed[0], slots)
        if counts[r] <= 0:
            return False
        total += counts[r]
    open_sizes[0] = total
    return True


@kernel
def gather(
    items: int, num_requests: int, num_inputs: int, num_blocks: int, num_rows: int, counts: Any, copies: Any
) -> None:
    """Copy the inputs of requests that have been checked, those of one after those of the other.

    Where the batch has more rows than the requests have samples, all blocks are equally long: the last sample of a
    request fills up its block, and the last request is repeated in further blocks.

    Args:
        items: see `check_tensors`.
        num_requests: how many.
        num_inputs: of each.
        num_blocks: at least as many as there are requests.
        num_rows: of all blocks together.
        counts: the samples of each request.
        copies: COPY records.
    """
    arrays = load(items + LIST_ITEMS, np.int64, 0)
    num_samples = np.int64(0)
    for r in range(num_requests):
        num_samples += counts[r]
    length = num_rows // num_blocks if num_rows > num_samples else np.int64(0)
    for c in range(len(copies)):
        copy, row = copies[c], np.int64(0)
        for b in range(num_blocks):
            r = min(b, num_requests - 1)
            count = np.int64(1) if copy.is_contexts else counts[r]
            source = load(header_at(arrays, num_inputs, r, copy.input) + DATA, np.int64, 0)
            _copy_samples(copy, source, row, count)
            row += count
            if copy.is_contexts == 0:
                last = source + (count - 1) * copy.row_elements * copy.element_bytes
                for _ in range(length - count):
                    _copy_samples(copy, last, row, np.int64(1))
                    row += 1


def compile_kernels() -> None:
    """Compile, or load from Numba's cache, so that no request waits for a compiler."""
    nothing, inputs = np.zeros(0, np.int64), np.zeros(0, INPUT)
    items = list[Any]()
    check_tensors(id(items), 0, 0, 0, inputs, nothing, nothing)
    check_packed(id(items), 0, 0, 0, inputs, np.zeros(1, PACKED), nothing, np.zeros(1, np.int64), nothing)
    gather(id(items), 0, 0, 1, 0, nothing, np.zeros(0, COPY))


@kernel
def _samples_of(arrays: int, form: Any, slots: Any) -> Any:
    """The samples of one request, whose arrays these are; -1: it has not one key per slot, or sizes do not agree."""
    offsets = header_at(arrays, 0, 0, form.offsets)
    num_samples = (_num_elements(offsets) - form.num_tables) // form.num_slots
    if num_samples <= 0 or num_samples > form.max_samples:
        return -1
    agree = _num_elements(offsets) == num_samples * form.num_slots + form.num_tables
    agree &= _num_elements(header_at(arrays, 0, 0, form.keys)) == num_samples * form.num_slots
    agree &= _num_elements(header_at(arrays, 0, 0, form.dense)) == num_samples * form.dense_dim
    if not agree or not have_one_key_each(load(offsets + DATA, np.int64, 0), slots, num_samples):
        return -1
    return num_samples


@kernel
def _num_elements(array: int) -> Any:
    """Of an array with one or two dimensions."""
    sizes = load(array + SIZES, np.int64, 0)
    last = load(sizes, np.int64, load(array + RANK, np.int32, 0) - 1)
    return np.int64(last)


@kernel
def _is_flat(array: int, record: Any, max_elements: int) -> Any:
    """Whether it is [n] or [1, n], contiguous, of a type that is expected."""
    dtype = load(array + DTYPE, np.int64, 0)
    rank = load(array + RANK, np.int32, 0)
    if (dtype != record.dtypes[0] and dtype != record.dtypes[1]) or rank < 1 or rank > 2:
        return False
    if load(array + FLAGS, np.int32, 0) & C_CONTIGUOUS == 0:
        return False
    if rank == 2 and load(load(array + SIZES, np.int64, 0), np.int64, 0) != 1:
        return False
    return _num_elements(array) <= max_elements


@kernel
def _copy_samples(copy: Any, source: int, row: int, count: int) -> None:
    """Copy some samples of one request; the first becomes sample `row` of the batch."""
    is_whole = copy.num == copy.row_elements and copy.to_next_sample == copy.num and copy.to_next_element == 1
    if copy.conversion == SAME and is_whole:
        sample_bytes = copy.num * copy.element_bytes
        copy_bytes(copy.address + row * sample_bytes, source, count * sample_bytes)
        return
    to_next_element = copy.to_next_element
    for s in range(count):
        begin, target = s * copy.row_elements + copy.first, (row + s) * copy.to_next_sample
        if copy.conversion == FROM_INT32:
            for e in range(copy.num):
                store(copy.address, np.int64, target + e * to_next_element, np.int64(load(source, np.int32, begin + e)))
        elif copy.conversion == FROM_UINT32:
            for e in range(copy.num):
                store(
                    copy.address, np.int64, target + e * to_next_element, np.int64(load(source, np.uint32, begin + e))
                )
        elif copy.element_bytes == 8:
            for e in range(copy.num):
                store(copy.address, np.int64, target + e * to_next_element, load(source, np.int64, begin + e))
        else:
            for e in range(copy.num):
                store(copy.address, np.int32, target + e * to_next_element, load(source, np.int32, begin + e))
