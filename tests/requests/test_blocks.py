"""Blocks of candidates: all of one length, each of one context, every candidate in one place."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inference_session.requests.blocks import arrange

counts_of = st.lists(st.integers(0, 70), min_size=1, max_size=12).filter(any)


@given(counts_of, st.booleans())
def test_every_candidate_stands_in_a_block_of_its_context(counts: list[int], may_pad: bool) -> None:
    """Candidates keep their order; rows that fill up a block repeat one of its context, where that is allowed."""
    numbers = np.array(counts)
    owners = np.repeat(np.arange(len(counts)), numbers)

    blocks = arrange(numbers, may_pad=may_pad)

    length, rest = divmod(len(blocks.row_context), len(blocks.block_context))
    assert rest == 0
    np.testing.assert_array_equal(blocks.row_context, np.repeat(blocks.block_context, length))
    if blocks.candidates is None:
        assert blocks.rows is None
        np.testing.assert_array_equal(blocks.row_context, owners)
        return
    assert may_pad
    assert blocks.rows is not None
    np.testing.assert_array_equal(blocks.candidates[blocks.rows], np.arange(len(owners)))
    np.testing.assert_array_equal(owners[blocks.candidates], blocks.row_context)


@given(counts_of)
def test_padding_is_bounded(counts: list[int]) -> None:
    """Filling up never costs more than one row for each candidate, but for contexts with few of them."""
    blocks = arrange(np.array(counts), may_pad=True)
    present = [count for count in counts if count]
    assert len(blocks.row_context) <= 2 * sum(present) + 16 * len(present)


sizes_of = st.lists(st.tuples(st.integers(1, 16), st.integers(1, 80)), max_size=4)


@given(counts_of, sizes_of)
def test_batches_are_filled_up_to_sizes_that_are_replayed(counts: list[int], replayed: list[tuple[int, int]]) -> None:
    """One block per context, and further ones of the last context; every candidate is in its context's block."""
    numbers = np.array(counts)
    owners = np.repeat(np.arange(len(counts)), numbers)
    fitting = [size for size in replayed if size[0] >= len(counts) and size[1] >= max(counts)]

    blocks = arrange(numbers, may_pad=True, replayed=replayed)

    if not fitting:
        assert blocks.num_contexts == len(counts)
        return
    num_contexts, length = blocks.num_contexts, len(blocks.row_context) // blocks.num_contexts
    assert num_contexts * length == min(a * b for a, b in fitting)
    assert len(blocks.block_context) == num_contexts
    found = np.arange(num_contexts * length) if blocks.candidates is None else blocks.candidates
    np.testing.assert_array_equal(owners[found], blocks.row_context)
    rows = np.arange(len(owners)) if blocks.rows is None else blocks.rows
    np.testing.assert_array_equal(found[rows], np.arange(len(owners)))


def test_a_batch_is_not_filled_up_with_thousands_of_rows_or_where_rows_may_not_be_added() -> None:
    """A network may take longer for them than the launches that are saved."""
    replayed = [(1, 3000), (4, 1000), (16, 1000)]
    for counts, found in (([1000] * 15, 15), ([1000] * 3, 4), ([1000, 1000], 4), ([1000, 990, 5], 3), ([10], 1)):
        blocks = arrange(np.array(counts), may_pad=True, replayed=replayed)
        assert blocks.num_contexts == found, counts
        assert arrange(np.array(counts), may_pad=False, replayed=replayed).num_contexts == len(counts)


def test_equal_numbers_make_one_block_for_each_context() -> None:
    """Nothing is filled up, and contexts without candidates have no block."""
    blocks = arrange(np.array([500, 0, 500]), may_pad=True)
    assert blocks.candidates is None
    np.testing.assert_array_equal(blocks.block_context, [0, 2])
