"""Sums of bags on the CPU: how exact they are, and that they are the same to the last bit on every path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inference_session.embedding_cache.cpu import CpuEmbeddingCache
from inference_session.kernels.cpu import lookup as cpu
from inference_session.kernels.cpu.lookup import NO_POSITIONS, BoundLookups
from inference_session.kernels.cpu.sums import sum_vectors
from inference_session.kernels.cpu.vectors import SUM_BLOCK
from inference_session.kernels.records import TABLE, Lookup, PoolingCode, VectorCode
from tests.testing.known_tables import KnownTable, make_table, segment
from tests.testing.sums import LENGTHS, most_error, summed

ROWS = 400
ODD_FLOATS = np.array([0, -0.0, 1, -3.3, 1e-45, -7e-6, 65504, 3e38, np.inf, -np.inf, np.nan, 0.1], np.float32)


def known_table(folder: Path, dim: int, dtype: str = "float32", *, has_index: bool = False) -> KnownTable:
    """Of normally distributed rows with keys from 0 on."""
    vectors = np.random.default_rng(dim).normal(size=(ROWS, dim)).astype(np.float32)
    return make_table(folder / f"{dtype}{dim}{has_index}", list(range(ROWS)) if has_index else None, vectors, dtype)


def widened(known: KnownTable) -> NDArray[np.float32]:
    """The rows, by key; the last one is the default vector."""
    rows = [known.rows[key] for key in range(ROWS)]
    return np.array([*rows, known.default]).astype(np.float32)


def bags_of(lengths: Any, seed: int) -> list[NDArray[np.int64]]:
    """Keys of bags of these lengths; ROWS is unknown."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, ROWS + 1, length) for length in lengths]


def segment_of(bags: list[NDArray[np.int64]], pooling: PoolingCode, dim: int) -> tuple[NDArray[np.void], Any, Any]:
    """A segment, its output, and what has to be kept with it."""
    keys, lengths = np.concatenate(bags), np.array([len(bag) for bag in bags])
    ends = np.cumsum(lengths)
    begins, output = ends - lengths, np.full((len(bags), dim), np.nan, np.float32)
    record = segment(keys.reshape(1, -1), output, pooling=pooling, num_rows=len(bags), key_stride=8)
    record["begins_address"], record["ends_address"] = begins.ctypes.data, ends.ctypes.data
    return record, output, (keys, begins, ends)


def answers(known: KnownTable, bags: list[NDArray[np.int64]], pooling: PoolingCode) -> Iterator[NDArray[np.float32]]:
    """Of each path that leads to a table's rows."""
    tables, dim = np.array([known.file.record()], TABLE), len(known.default)
    for threads in (1, 3):
        record, output, kept = segment_of(bags, pooling, dim)
        cpu.look_up(tables, record, np.zeros(1, np.int64), NO_POSITIONS, threads)
        yield output
        output.fill(np.nan)
        lookup = Lookup(record, np.array([len(kept[0])]), np.zeros(1, np.int64))
        BoundLookups(tables, threads).bind(lookup)()
        yield output


@pytest.mark.parametrize("pooling", [PoolingCode.SUM, PoolingCode.MEAN])
@pytest.mark.parametrize("dim", [1, 16, 300])
def test_sums_are_as_exact_as_promised(pooling: PoolingCode, dim: int, tmp_path: Path) -> None:
    """Bags of any length, unknown keys among theirs."""
    known = known_table(tmp_path, dim)
    rows = widened(known)
    bags = bags_of([length for length in LENGTHS if length * dim <= 3_200_000], seed=dim)
    for found in answers(known, bags, pooling):
        for bag, answer in zip(bags, found, strict=True):
            exact = rows[bag].sum(axis=0, dtype=np.float64)
            if pooling == PoolingCode.MEAN:
                exact /= max(len(bag), 1)
            assert (np.abs(answer - exact) <= most_error(rows[bag], pooling)).all()


@settings(max_examples=20)
@given(
    length=st.one_of(st.integers(33, 1000), st.sampled_from([3_200, 10_000, 100_000])),
    dtype=st.sampled_from(["float32", "float16", "int8"]),
    has_index=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_sums_of_long_bags_have_the_digits_of_float32(
    length: int, dtype: str, has_index: bool, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The errors of 32 elements together: what roundings of the sum itself, and of those of its blocks, come to."""
    known = known_table(tmp_path_factory.mktemp("long"), 32, dtype, has_index=has_index)
    vectors, bags = widened(known), bags_of([length], seed)
    exact = vectors[bags[0]].sum(axis=0, dtype=np.float64)
    size = np.hypot(np.linalg.norm(exact), np.linalg.norm(vectors[bags[0]].astype(np.float64)))
    for found in answers(known, bags, PoolingCode.SUM):
        assert np.linalg.norm(found[0] - exact) <= 1.5 * np.finfo(np.float32).eps * size


@settings(max_examples=60)
@given(
    lengths=st.lists(st.one_of(st.sampled_from(LENGTHS[:-2]), st.integers(0, 100)), min_size=1, max_size=8),
    pooling=st.sampled_from([PoolingCode.SUM, PoolingCode.MEAN]),
    dtype=st.sampled_from(["float32", "float16", "int8"]),
    dim=st.sampled_from([1, 3, 16, 128, 300, 1500]),
    has_index=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_sum_is_the_same_on_every_path(  # noqa: PLR0917
    lengths: list[int],
    pooling: PoolingCode,
    dtype: str,
    dim: int,
    has_index: bool,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Whatever bags stand before it, in rows of all types, by one thread or several."""
    known = known_table(tmp_path_factory.mktemp("sums"), dim, dtype, has_index=has_index)
    rows, bags = widened(known), bags_of(lengths, seed)
    wanted = np.array([summed(rows[bag], pooling) for bag in bags])
    for found in answers(known, bags, pooling):
        np.testing.assert_array_equal(found, wanted)


def test_a_sum_with_weights_and_of_cached_rows_is_the_same() -> None:
    """Each vector is multiplied by its weight, and then takes part as any other."""
    generator = np.random.default_rng(0)
    vectors = generator.normal(size=(ROWS, 24)).astype(np.float32)
    cache = CpuEmbeddingCache({"t": 24}, 1 << 20)
    cache.insert("t", np.arange(ROWS), vectors)
    bags = [bag % ROWS for bag in bags_of([70, 1, 200, 33], seed=0)]
    record, output, (keys, begins, ends) = segment_of(bags, PoolingCode.SUM, 24)
    for weights in (None, generator.normal(size=len(keys)).astype(np.float32)):
        record["weights_address"] = 0 if weights is None else weights.ctypes.data
        lookup = Lookup(record, np.array([len(keys)]), np.zeros(1, np.int64))
        assert cache.look_up(lookup) == 0
        weighted = vectors[keys] * (1 if weights is None else weights[:, None])
        wanted = [summed(weighted[b:e]) for b, e in zip(begins, ends, strict=True)]
        np.testing.assert_array_equal(output, np.array(wanted))
    cache.close()


@settings(max_examples=200, deadline=None)
@given(
    code=st.sampled_from(VectorCode),
    dim=st.integers(1, 150),
    num=st.integers(1, SUM_BLOCK),
    has_weights=st.booleans(),
    begins=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_registers_add_as_numpy_does_one_vector_after_the_other(  # noqa: PLR0917
    code: VectorCode, dim: int, num: int, has_weights: bool, begins: bool, seed: int
) -> None:
    """To the last bit, whatever values the vectors have; nothing is written behind the sum."""
    generator = np.random.default_rng(seed)
    rows = stored_rows(code, generator.choice(ODD_FLOATS, (num, dim)), generator)
    weights = generator.choice(ODD_FLOATS, num)
    total = np.append(generator.choice(ODD_FLOATS, dim), np.float32(7))
    with np.errstate(all="ignore"):
        wanted = total[:dim].copy()
        for i, vector in enumerate(floats_of(code, rows, dim)):
            weighted = vector * weights[i] if has_weights else vector
            wanted = weighted if begins and i == 0 else wanted + weighted
    sources = np.array([row.ctypes.data for row in rows], np.int64)
    of_weights = weights.ctypes.data if has_weights else 0
    sum_vectors(total.ctypes.data, sources.ctypes.data, of_weights, num, int(code), dim, begins)
    np.testing.assert_array_equal(total[:dim], wanted)
    assert not (np.signbit(total[:dim]) ^ np.signbit(wanted))[~np.isnan(wanted)].any()
    assert total[dim] == 7


def stored_rows(code: VectorCode, floats: NDArray[np.float32], generator: np.random.Generator) -> list[NDArray[Any]]:
    """Vectors as tables of a type hold them."""
    if code == VectorCode.FLOAT32:
        return list(floats)
    if code == VectorCode.FLOAT16:
        with np.errstate(over="ignore"):
            return list(floats.astype(np.float16))
    elements = generator.integers(-128, 128, floats.shape).astype(np.int8)
    scales_and_biases = generator.choice(ODD_FLOATS, (len(floats), 2))
    return [np.frombuffer(e.tobytes() + s.tobytes(), np.int8) for e, s in zip(elements, scales_and_biases, strict=True)]


def floats_of(code: VectorCode, rows: list[NDArray[Any]], dim: int) -> Iterator[NDArray[np.float32]]:
    """What they stand for."""
    for row in rows:
        if code == VectorCode.INT8:
            scale, bias = row[dim:].view(np.float32)
            yield row[:dim].astype(np.float32) * scale + bias
        else:
            yield row.astype(np.float32)
