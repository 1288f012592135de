"""HugeCTR's requests become the records of one look-up, as those of a model's own inputs do (staging.py).

Keys of 64 bits stay where the requests have them. Offsets are copied before they are checked: in memory that is shared
with a client they could change between the check and the use.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
from inference_session.kernels.cpu.intrinsics import copy_bytes, kernel, load, store
from inference_session.kernels.cpu.requests.bags import place_bags
from inference_session.kernels.cpu.requests.staging import (
    INPUT,
    INT64,
    LOOKUP,
    NO_ROOM,
    NOT_STAGED,
    STAGED,
    VECTOR_INPUT,
    enter_output,
    has_room,
    header_at,
    lay_out_vectors,
)
from inference_session.kernels.records import FLOAT_BYTES, KEY_BYTES, SEGMENT

DENSE, KEYS, OFFSETS = range(3)
"""The arrays of a request, in this order."""
_OFFSET_BYTES = 4
_POSITION_BYTES = 16
"""Where a bag begins and ends."""

FORM = np.dtype(
    [
        ("dense_dim", np.int64),  # dense features of a sample
        ("slots_per_sample", np.int64),  # of all tables together
        ("max_samples", np.int64),  # of one request; 0: any number
    ],
    align=True,
)


class Place(NamedTuple):
    """Where one request is in the batch."""

    num_samples: int
    samples_before: int
    keys_before: int


@kernel
def stage_bags(arguments: int, items: int, num_requests: int) -> int:
    """Read the arrays of some requests, and describe their look-up; see `staging.stage`.

    Args:
        arguments: address of Arguments:
            array_type: address of NumPy's type of arrays.
            max_elements: of one array, more of which are not staged.
            form: one FORM record.
            slots: int64 [tables], bags that a sample has in each.
            inputs: INPUT records. Those of keys and offsets have the memory where keys of 32 bits are widened, and
                where the positions of bags go.
            lookups: LOOKUP records, one per table, whose `rows_per_sample` are its slots.
            vector_inputs: VECTOR_INPUT records: what the network reads vectors from.
            open_sizes: receives the samples of the batch.
            counts: [requests] receives the samples of each.
            segments: SEGMENT records, [requests x tables] or more, which receive the look-up.
            num_keys: as many, receives the keys of each segment.
        items: address of a list of arrays, three for each request, which lives as long as the look-up.
        num_requests: how many.
    """
    array_type, max_elements = int_at(arguments, 0), int_at(arguments, 1)
    form, slots = array_at(arguments, 2, FORM), array_at(arguments, 3, INT64)
    inputs, lookups = array_at(arguments, 4, INPUT), array_at(arguments, 5, LOOKUP)
    vector_inputs, open_sizes = array_at(arguments, 6, VECTOR_INPUT), array_at(arguments, 7, INT64)
    counts, segments = array_at(arguments, 8, INT64), array_at(arguments, 9, SEGMENT)
    num_keys = array_at(arguments, 10, INT64)
    arrays = load(items + LIST_ITEMS, np.int64, 0)
    if num_requests > len(counts) or num_requests * len(lookups) > len(segments):
        return NO_ROOM
    num_samples = _count_samples(arrays, num_requests, array_type, max_elements, form[0], len(slots), inputs, counts)
    if num_samples <= 0:
        return NOT_STAGED
    open_sizes[0] = num_samples
    lay_out_vectors(lookups, vector_inputs, num_samples, num_requests)
    if not has_room(inputs) or not has_room(vector_inputs):
        return NO_ROOM
    fits = _enter_requests(
        arrays, num_requests, form[0], slots, inputs, lookups, vector_inputs, counts, segments, num_keys
    )
    return STAGED if fits else NOT_STAGED


def compile_kernels() -> None:
    """Compile `stage_bags`, or load it from Numba's cache, so that no request waits for a compiler."""
    nothing, items = np.zeros(0, np.int64), list[Any]()
    records = np.zeros(1, FORM), nothing, np.zeros(3, INPUT), np.zeros(0, LOOKUP), np.zeros(0, VECTOR_INPUT)
    arguments = Arguments(0, 0, *records, nothing, nothing, np.zeros(0, SEGMENT), nothing)
    arguments.bound_to(stage_bags)(id(items), 1)


@kernel
def _enter_requests(
    arrays: int,
    num_requests: int,
    form: Any,
    slots: Any,
    inputs: Any,
    lookups: Any,
    vector_inputs: Any,
    counts: Any,
    segments: Any,
    num_keys: Any,
) -> Any:
    """Copy what has to be copied, and fill in the segments; returns whether the offsets of all requests allow it."""
    samples_before, keys_before, s = np.int64(0), np.int64(0), 0
    for r in range(num_requests):
        place = Place(counts[r], samples_before, keys_before)
        if not _copy_offsets(arrays, r, slots, inputs, form, place):
            return False
        keys_address = _keys(arrays, r, inputs, place)
        _copy_dense(arrays, r, inputs, form, place)
        num_bags = 0
        for t in range(len(lookups)):
            _enter_bags(segments[s], keys_address, inputs, form, place, num_bags)
            enter_output(segments[s], lookups[t], vector_inputs[lookups[t].vector_input], samples_before, counts[r])
            num_bags += segments[s].num_rows
            num_keys[s] = load(_offsets_address(inputs, form, len(slots), place), np.int32, num_bags + t)
            s += 1
        samples_before += counts[r]
        keys_before += _size(header_at(arrays, 3, r, KEYS))
    return True


@kernel
def _count_samples(
    arrays: int,
    num_requests: int,
    array_type: int,
    max_elements: int,
    form: Any,
    num_tables: int,
    inputs: Any,
    counts: Any,
) -> Any:
    """Check the sizes of all arrays, and note how much memory they need; returns the samples, -1: they do not fit."""
    num_samples, num_keys, num_offsets = np.int64(0), np.int64(0), np.int64(0)
    for r in range(num_requests):
        dense = _num_elements(header_at(arrays, 3, r, DENSE), inputs[DENSE], array_type, max_elements)
        keys = _num_elements(header_at(arrays, 3, r, KEYS), inputs[KEYS], array_type, max_elements)
        offsets = _num_elements(header_at(arrays, 3, r, OFFSETS), inputs[OFFSETS], array_type, max_elements)
        num_bags = offsets - num_tables
        if dense < 0 or keys < 0 or num_bags < 0 or num_bags % form.slots_per_sample != 0:
            return -1
        counts[r] = num_bags // form.slots_per_sample
        if dense != counts[r] * form.dense_dim or (form.max_samples > 0 and counts[r] > form.max_samples):
            return -1
        num_samples += counts[r]
        num_keys += keys
        num_offsets = max(num_offsets, offsets)
    inputs[DENSE].wanted_bytes = num_samples * form.dense_dim * FLOAT_BYTES if inputs[DENSE].is_read else 0
    inputs[KEYS].wanted_bytes = num_keys * KEY_BYTES if inputs[KEYS].element_bytes < KEY_BYTES else 0
    positions = num_samples * form.slots_per_sample * _POSITION_BYTES
    inputs[OFFSETS].wanted_bytes = positions + num_offsets * _OFFSET_BYTES
    return num_samples


@kernel
def _num_elements(array: int, record: Any, array_type: int, max_elements: int) -> Any:
    """Of an array that is [n] or [1, n] and of the record's type; -1: it is not."""
    if load(array + OBJECT_TYPE, np.int64, 0) != array_type:
        return -1
    dtype = load(array + DTYPE, np.int64, 0)
    if (dtype != record.dtypes[0] and dtype != record.dtypes[1]) or load(
        array + FLAGS, np.int32, 0
    ) & C_CONTIGUOUS == 0:
        return -1
    rank, sizes = load(array + RANK, np.int32, 0), load(array + SIZES, np.int64, 0)
    if rank != 1 and (rank != 2 or load(sizes, np.int64, 0) != 1):
        return -1
    count = load(sizes, np.int64, rank - 1)
    return count if count <= max_elements else -1


@kernel
def _size(array: int) -> Any:
    """Elements of an array that is [n] or [1, n]."""
    return load(load(array + SIZES, np.int64, 0), np.int64, load(array + RANK, np.int32, 0) - 1)


@kernel
def _positions_address(inputs: Any, form: Any, place: Any) -> Any:
    """Where the positions of a request's bags are: first where they begin, then where they end."""
    return inputs[OFFSETS].address + place.samples_before * form.slots_per_sample * _POSITION_BYTES


@kernel
def _offsets_address(inputs: Any, form: Any, num_tables: int, place: Any) -> Any:
    """Where a request's offsets are copied to, behind all positions. The next request's go there as well."""
    num_offsets = num_tables + place.num_samples * form.slots_per_sample
    return inputs[OFFSETS].address + inputs[OFFSETS].wanted_bytes - num_offsets * _OFFSET_BYTES


@kernel
def _copy_offsets(arrays: int, request: int, slots: Any, inputs: Any, form: Any, place: Any) -> Any:
    """Copy the offsets of one request and work out where its bags are; returns whether the offsets allow it."""
    offsets = _offsets_address(inputs, form, len(slots), place)
    source = header_at(arrays, 3, request, OFFSETS)
    copy_bytes(offsets, load(source + DATA, np.int64, 0), _size(source) * _OFFSET_BYTES)
    begins = _positions_address(inputs, form, place)
    ends = begins + place.num_samples * form.slots_per_sample * KEY_BYTES
    num_keys = _size(header_at(arrays, 3, request, KEYS))
    return place_bags(offsets, slots, place.num_samples, num_keys, begins, ends)


@kernel
def _keys(arrays: int, request: int, inputs: Any, place: Any) -> Any:
    """The address of one request's keys as int64, which are widened where they are uint32."""
    array = header_at(arrays, 3, request, KEYS)
    source = load(array + DATA, np.int64, 0)
    if inputs[KEYS].element_bytes == KEY_BYTES:
        return source
    target = inputs[KEYS].address + place.keys_before * KEY_BYTES
    for i in range(_size(array)):
        store(target, np.int64, i, np.int64(load(source, np.uint32, i)))
    return target


@kernel
def _copy_dense(arrays: int, request: int, inputs: Any, form: Any, place: Any) -> None:
    if inputs[DENSE].is_read:
        sample_bytes = form.dense_dim * FLOAT_BYTES
        source = load(header_at(arrays, 3, request, DENSE) + DATA, np.int64, 0)
        copy_bytes(
            inputs[DENSE].address + place.samples_before * sample_bytes, source, place.num_samples * sample_bytes
        )


@kernel
def _enter_bags(segment: Any, keys_address: int, inputs: Any, form: Any, place: Any, bags_before: int) -> None:
    """Enter where the keys and bags of one table are, behind `bags_before` bags of other tables."""
    begins = _positions_address(inputs, form, place) + bags_before * KEY_BYTES
    segment.keys_address, segment.key_bytes, segment.key_stride = keys_address, KEY_BYTES, KEY_BYTES
    segment.row_stride, segment.keys_per_row, segment.weights_address = 0, 0, 0
    segment.begins_address = begins
    segment.ends_address = begins + place.num_samples * form.slots_per_sample * KEY_BYTES
