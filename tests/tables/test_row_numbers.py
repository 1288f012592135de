"""Row numbers from the end: look-ups read copies of their keys, all from the start."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_session.kernels.records import SEGMENT, Lookup, address_of, key_segments
from inference_session.model_spec import TableSpec
from inference_session.tables.row_numbers import RowNumbers, stored_keys

SPECS = (
    TableSpec("numbered", "numbered", 10, 4, "float32", "row_number"),
    TableSpec("stored", "stored", 10, 4, "float32", "stored"),
)
EDGES = [0, 9, 10, -1, -10, -11, 2**31 - 1, -(2**31)]
Keys = st.lists(st.sampled_from(EDGES) | st.integers(-12, 12), min_size=12, max_size=12)


@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize("table", [0, 1])
@given(keys=Keys, is_by_column=st.booleans())
def test_rows_of_keys_are_copied(table: int, dtype: str, keys: list[int], is_by_column: bool) -> None:
    """Any layout; the keys of tables that store them, and those without one from the end, stay where they are."""
    matrix = np.asarray(np.reshape(keys, (4, 3)), dtype, order="F" if is_by_column else "C")
    segments = key_segments([matrix, matrix], [matrix, matrix], [table, table])
    before = segments.copy()
    lookup = Lookup(segments, np.array([12, 12]), np.zeros(2, np.int64))

    RowNumbers(SPECS).count_from_start(lookup)

    expected = stored_keys(SPECS[table], matrix.astype(np.int64))
    assert segments.tobytes() == before.tobytes()
    if (expected == matrix).all():
        assert lookup.segments is segments
    else:
        assert lookup.copied_keys is not None
        np.testing.assert_array_equal(lookup.copied_keys.reshape(2, 4, 3), [expected, expected])
        addresses = address_of(lookup.copied_keys) + np.array([0, 96])
        np.testing.assert_array_equal(lookup.segments["keys_address"], addresses)
        assert (lookup.segments[["key_bytes", "key_stride", "row_stride"]].tolist()) == [(8, 8, 24)] * 2


@given(keys=Keys, cuts=st.lists(st.integers(0, 12), min_size=4, max_size=4))
def test_bags_stay_where_they_begin(keys: list[int], cuts: list[int]) -> None:
    """Any bags in a list of keys, with keys between them that are in none."""
    cuts = sorted(cuts)
    flat, begins, ends = np.array(keys, np.int64), np.array(cuts[::2], np.int64), np.array(cuts[1::2], np.int64)
    segments = np.zeros(1, SEGMENT)
    segments["keys_address"], segments["key_bytes"], segments["key_stride"] = address_of(flat), 8, 8
    segments["num_rows"], segments["begins_address"], segments["ends_address"] = 2, address_of(begins), address_of(ends)
    lookup = Lookup(segments, np.array([12]), np.zeros(1, np.int64))

    RowNumbers(SPECS).count_from_start(lookup)

    bags = [flat[begin:end] for begin, end in zip(begins, ends, strict=True)]
    copied = flat if lookup.copied_keys is None else lookup.copied_keys
    assert (lookup.copied_keys is None) == all(((bag >= 0) | (bag < -10)).all() for bag in bags)
    for bag, begin in zip(bags, begins, strict=True):
        np.testing.assert_array_equal(copied[begin : begin + len(bag)], stored_keys(SPECS[0], bag))
