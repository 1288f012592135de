"""Look-ups that are bound to their records answer as those that are passed them."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.errors import TypingError
from numpy.typing import NDArray

from inference_session.kernels.cpu import lookup as cpu
from inference_session.kernels.cpu.arguments import Arguments, array_at, int_at, put_array, put_int
from inference_session.kernels.cpu.intrinsics import kernel
from inference_session.kernels.cpu.lookup import NO_POSITIONS, PART_BYTES, BoundLookups
from inference_session.kernels.machine_code import of_ints
from inference_session.kernels.records import TABLE, Lookup, PoolingCode
from tests.testing.known_tables import make_table, segment

_FLOAT32 = np.dtype(np.float32)
INT64 = np.iinfo(np.int64)


@numba.njit
def _weighted_sum(arguments: int, scale: int) -> float:
    """Argument 1, an array, times argument 0, a number, and `scale`."""
    total = 0.0
    for value in array_at(arguments, 1, _FLOAT32):
        total += value
    return total * int_at(arguments, 0) * scale


@kernel
def _replace(arguments: int, factor: int, values: Any) -> None:
    put_int(arguments, 0, factor)
    put_array(arguments, 1, values)


@numba.njit
def _bits(first: int, second: int) -> int:
    return first ^ second


@settings(max_examples=30)
@given(factor=st.integers(-5, 5), values=st.lists(st.integers(-100, 100), max_size=20))
def test_compiled_code_reads_arguments_from_memory(factor: int, values: list[int]) -> None:
    """Whole numbers and arrays, empty ones too, which live as long as the function that reads them."""
    bound: Any = Arguments(factor, np.array(values, np.float32)).bound_to(_weighted_sum)
    gc.collect()

    assert bound(3) == 3 * factor * sum(values)


@settings(max_examples=30)
@given(factor=st.integers(-5, 5), values=st.lists(st.integers(-100, 100), max_size=20))
def test_compiled_code_replaces_arguments_in_memory(factor: int, values: list[int]) -> None:
    """Whole numbers and arrays, empty ones too."""
    arguments, new = Arguments(2, np.ones(3, np.float32)), np.array(values, np.float32)
    arguments.bound_to(_replace)(factor, new)
    weighted_sum: Any = arguments.bound_to(_weighted_sum)

    assert weighted_sum(3) == 3 * factor * sum(values)


@pytest.mark.parametrize("values", [np.ones(6, np.float32)[::2], np.ones((2, 3), np.float32)])
def test_compiled_code_takes_contiguous_arrays_only(values: NDArray[np.float32]) -> None:
    """It would read others as if they were."""
    with pytest.raises(TypingError, match="contiguous"):
        Arguments(2, np.ones(3, np.float32)).bound_to(_replace)(1, values)


@given(first=st.integers(INT64.min, INT64.max), second=st.integers(INT64.min, INT64.max))
def test_a_kernel_of_whole_numbers_answers_without_numbas_look_at_them(first: int, second: int) -> None:
    """As with it, over the whole range, and it refuses a wrong number of arguments."""
    called: Any = of_ints(_bits)
    compiled: Any = _bits

    assert called is not _bits
    assert called(first, second) == compiled(first, second) == (first ^ second)
    with pytest.raises(TypeError):
        called(first)


def test_other_functions_are_called_as_they_are() -> None:
    """Such as stand-ins, and those of a Numba that has no such code."""
    assert of_ints(min) is min


keys_of_requests = st.lists(
    st.one_of(st.integers(-60, 60), st.sampled_from([INT64.min, INT64.max])), min_size=1, max_size=300
)


@settings(max_examples=40)
@given(
    batches=st.lists(keys_of_requests, min_size=1, max_size=3),
    dim=st.sampled_from([1, 16, 40]),
    pooling=st.sampled_from(list(PoolingCode)),
    has_index=st.booleans(),
    threads=st.integers(1, 3),
)
def test_a_bound_lookup_answers_whatever_its_records_say(  # noqa: PLR0917
    batches: list[list[int]],
    dim: int,
    pooling: PoolingCode,
    has_index: bool,
    threads: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Over several calls, between which keys and sizes change."""
    vectors = np.random.default_rng(dim).normal(size=(50, dim)).astype(np.float32)
    folder = tmp_path_factory.mktemp("bound")
    known = make_table(folder / "t", list(range(-25, 25)) if has_index else None, vectors)
    tables = np.array([known.file.record()], TABLE)
    longest = max(map(len, batches))
    nothing, nowhere = np.zeros((0, 1), np.int64), np.zeros((0, dim), np.float32)
    record = segment(nothing, nowhere)
    lookup = Lookup(record, np.zeros(1, np.int64), np.full(1, -7, np.int64))
    answer = BoundLookups(tables, threads).bind(lookup)
    for batch in batches:
        keys = np.array(batch, np.int64).reshape(-1, 1)
        expected, found = (np.full((longest, dim), np.nan, np.float32) for _ in range(2))
        counts = np.zeros(1, np.int64)
        cpu.look_up(tables, segment(keys, expected, pooling=pooling), counts, NO_POSITIONS)

        record[:] = segment(keys, found, pooling=pooling)
        answer()

        np.testing.assert_array_equal(found, expected)
        assert lookup.num_unknown.tolist() == counts.tolist()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_several_threads_share_a_large_bound_lookup(threads: int, tmp_path: Path) -> None:
    """As large as is worth it, and a key less."""
    dim = 64
    vectors = np.random.default_rng(0).normal(size=(1000, dim)).astype(np.float32)
    known = make_table(tmp_path / "t", None, vectors)
    tables = np.array([known.file.record()], TABLE)
    enough = 2 * PART_BYTES // (4 * dim)
    for num_keys in (enough - 1, enough, 5 * enough):
        keys = np.random.default_rng(num_keys).integers(-1200, 1200, (num_keys, 1))
        found = np.full((num_keys, dim), np.nan, np.float32)
        lookup = Lookup(segment(keys, found), np.full(1, num_keys), np.full(1, -7, np.int64))

        BoundLookups(tables, threads).bind(lookup)()

        is_known = (keys[:, 0] >= -1000) & (keys[:, 0] < 1000)
        np.testing.assert_array_equal(found[is_known], vectors[keys[is_known, 0]])
        np.testing.assert_array_equal(found[~is_known], np.tile(known.default, (int((~is_known).sum()), 1)))
        assert lookup.num_unknown.tolist() == [int((~is_known).sum())]
