"""The look-up kernel against a dict and NumPy, over any tables, key layouts and poolings."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inference_session.kernels.cpu import lookup as cpu
from inference_session.kernels.records import TABLE, PoolingCode
from inference_session.tables.table_file import TableFile
from tests.testing.known_tables import KnownTable, make_table, segment

INT64 = np.iinfo(np.int64)
NO_POSITIONS = np.empty(0, np.int64)


def pooled(vectors: NDArray[np.float64], weights: NDArray[np.float64], pooling: PoolingCode) -> NDArray[np.float64]:
    """The pooled vector of a bag."""
    if len(vectors) == 0:
        return np.zeros(vectors.shape[1])
    if pooling == PoolingCode.MAX:
        return vectors.max(axis=0)
    total = (vectors * weights[:, None]).sum(axis=0)
    return total / len(vectors) if pooling == PoolingCode.MEAN else total


def expected_vectors(known: KnownTable, keys: NDArray[Any]) -> NDArray[np.float64]:
    """One row per key."""
    found = [known.rows.get(int(key), known.default) for key in keys.ravel()]
    return np.array(found).reshape(-1, len(known.default))


def run(tables: list[TableFile], segments: NDArray[np.void], positions: int = 0, threads: int = 1) -> Any:
    """Look up; returns (missing in all, missing per segment, positions)."""
    counts, noted = np.full(len(segments), -7, np.int64), np.full(positions, -7, np.int64)
    records = np.array([table.record() for table in tables], TABLE)
    return cpu.look_up(records, segments, counts, noted, threads), counts, noted


any_key = st.integers(INT64.min, INT64.max)
tricky_keys = st.one_of(
    any_key,
    st.sampled_from([INT64.min, INT64.max, -1, 0, 1]),
    st.integers(-40, 40),
    st.integers(0, 63).map(lambda bit: int(np.uint64(1 << bit).astype(np.int64))),
)
tables_of_keys = st.lists(tricky_keys, max_size=200, unique=True)


@settings(max_examples=60)
@given(
    data=st.data(),
    held=tables_of_keys,
    dim=st.integers(1, 37),
    dtype=st.sampled_from(["float32", "float16", "int8"]),
    row_numbers=st.booleans(),
)
def test_unpooled_lookup_equals_a_dict(  # noqa: PLR0917
    data: st.DataObject, held: list[int], dim: int, dtype: str, row_numbers: bool, tmp_path: Path
) -> None:
    """Every key gets its vector or the default vector, and unknown keys are counted and located."""
    vectors = np.random.default_rng(len(held)).normal(size=(len(held), dim)).astype(np.float32)
    known = make_table(tmp_path / f"t{data.draw(st.uuids())}", None if row_numbers else held, vectors, dtype)
    pool = st.one_of(tricky_keys, st.sampled_from(held)) if held else tricky_keys
    asked = data.draw(st.lists(pool, max_size=120))
    per_row = data.draw(st.integers(1, 4))
    asked = asked[: len(asked) // per_row * per_row]
    wide = np.zeros((len(asked) // per_row, 2 * per_row), np.int64)
    keys = wide[:, ::2]
    keys[:] = np.array(asked, np.int64).reshape(-1, per_row)
    output = np.full((len(keys), per_row * dim + 3), np.nan, np.float32)

    total, counts, positions = run([known.file], segment(keys, output), positions=keys.size)

    unknown = [i for i, key in enumerate(asked) if key not in known.rows]
    wanted = expected_vectors(known, keys).reshape(len(keys), per_row * dim)
    np.testing.assert_allclose(output[:, : per_row * dim], wanted, rtol=1e-6, atol=1e-6)
    assert np.isnan(output[:, per_row * dim :]).all()
    assert total == len(unknown) == counts[0]
    assert positions[:total].tolist() == unknown


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 50), max_size=20),
    pooling=st.sampled_from([PoolingCode.SUM, PoolingCode.MEAN, PoolingCode.MAX]),
    dtype=st.sampled_from(["float32", "float16", "int8"]),
    dim=st.sampled_from([1, 3, 16, 300]),
    weighted=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_pooled_bags_equal_numpy(  # noqa: PLR0917
    lengths: list[int], pooling: PoolingCode, dtype: str, dim: int, weighted: bool, seed: int, tmp_path: Path
) -> None:
    """Bags of any length, empty ones included, become their sum, mean or maximum, weighted or not."""
    generator = np.random.default_rng(seed)
    vectors = generator.normal(size=(30, dim)).astype(np.float32)
    known = make_table(tmp_path / f"{seed}{dtype}{dim}", list(range(0, 300, 10)), vectors, dtype)
    weighted = weighted and pooling != PoolingCode.MAX
    keys = generator.integers(0, 32, sum(lengths)).astype(np.int32) * 10
    weights = generator.normal(size=len(keys)).astype(np.float32)
    ends = np.cumsum(lengths, dtype=np.int64)
    begins = ends - np.array(lengths, np.int64)
    output = np.full((len(lengths), dim), np.nan, np.float32)
    record = segment(keys.reshape(1, -1), output, pooling=pooling, num_rows=len(lengths), key_stride=4)
    record["begins_address"], record["ends_address"] = begins.ctypes.data, ends.ctypes.data
    record["weights_address"] = weights.ctypes.data if weighted else 0

    total, _, _ = run([known.file], record)

    wide = expected_vectors(known, keys)
    factors = weights.astype(np.float64) if weighted else np.ones(len(keys))
    wanted = [pooled(wide[b:e], factors[b:e], pooling) for b, e in zip(begins, ends, strict=True)]
    np.testing.assert_allclose(output, np.array(wanted).reshape(-1, dim), rtol=1e-4, atol=1e-4)
    assert total == np.count_nonzero(keys >= 300)


@pytest.mark.parametrize("kind", ["row_number", "stored"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize(("dim", "per_row"), [(1, 1), (7, 3), (16, 1), (37, 1), (300, 1), (48, 2)])
def test_long_runs_of_keys_equal_a_dict(kind: str, dtype: str, dim: int, per_row: int, tmp_path: Path) -> None:
    """Hundreds of keys of one table, known or not, of 4 or 8 bytes, close together or apart."""
    generator = np.random.default_rng(dim)
    vectors = generator.normal(size=(150, dim)).astype(np.float32)
    held = None if kind == "row_number" else (generator.permutation(400)[:150] - 200).tolist()
    known = make_table(tmp_path, held, vectors, dtype)
    for key_gap, gap, key_type in ((0, 0, np.int64), (2, 2, np.int32), (0, 5, np.int64)):
        keys = generator.integers(-200, 200, (601, per_row + key_gap)).astype(key_type)[:, :per_row]
        output = np.full((601, per_row * dim + gap), np.nan, np.float32)

        total, counts, positions = run([known.file], segment(keys, output), positions=keys.size)

        wanted = expected_vectors(known, keys).reshape(601, -1)
        np.testing.assert_allclose(output[:, : per_row * dim], wanted, rtol=1e-6, atol=1e-6)
        assert np.isnan(output[:, per_row * dim :]).all()
        unknown = [i for i, key in enumerate(keys.ravel().tolist()) if key not in known.rows]
        assert total == counts[0] == len(unknown) > 0
        assert positions[:total].tolist() == unknown


@settings(max_examples=40)
@given(
    num_keys=st.integers(240, 900),
    dim=st.sampled_from([1, 3, 15, 16, 17, 31, 64, 100, 128, 131]),
    shift=st.integers(0, 64),
    gap=st.sampled_from([0, 1, 4, 16]),
    dtype=st.sampled_from(["float32", "float16", "int8"]),
    distinct=st.sampled_from([1, 5, 400]),
    seed=st.integers(0, 1000),
)
def test_streams_write_to_any_alignment_and_nowhere_else(  # noqa: PLR0917
    num_keys: int, dim: int, shift: int, gap: int, dtype: str, distinct: int, seed: int, tmp_path: Path
) -> None:
    """Many keys, most of them duplicates or all different, known or not, to outputs at any byte, with gaps or not."""
    generator = np.random.default_rng(seed)
    held = (generator.permutation(400)[:200] - 100).tolist()
    vectors = generator.normal(size=(200, dim)).astype(np.float32)
    known = make_table(tmp_path / f"{num_keys}{dim}{shift}{gap}{dtype}{distinct}{seed}", held, vectors, dtype)
    keys = generator.choice(np.arange(-100, 300), distinct, replace=False)[generator.integers(0, distinct, num_keys)]
    row_bytes = 4 * (dim + gap)
    memory = np.full(num_keys * row_bytes + 65, 0xEE, np.uint8)
    record = segment(keys[:, None], memory, output_address=memory.ctypes.data + shift, output_stride=row_bytes)

    total, _, positions = run([known.file], record, positions=num_keys)

    written = memory[shift : shift + num_keys * row_bytes].reshape(num_keys, row_bytes)
    answers = np.ascontiguousarray(written[:, : 4 * dim]).view(np.float32)
    np.testing.assert_allclose(answers, expected_vectors(known, keys), rtol=1e-6, atol=1e-6)
    assert (written[:, 4 * dim :] == 0xEE).all()
    assert (memory[:shift] == 0xEE).all()
    assert (memory[shift + num_keys * row_bytes :] == 0xEE).all()
    assert positions[:total].tolist() == [i for i, key in enumerate(keys.tolist()) if key not in known.rows]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("ragged", [False, True])
def test_many_segments_split_over_threads_give_the_same_answers(threads: int, ragged: bool, tmp_path: Path) -> None:
    """However a large request is split, outputs, counts and positions are those of one thread."""
    generator = np.random.default_rng(3)
    files, dim = [], 32
    for t in range(3):
        vectors = generator.random((500, dim), np.float32)
        files.append(make_table(tmp_path / f"{t}", generator.permutation(1000)[:500].tolist(), vectors).file)
    keys = [generator.integers(0, 1000, (rows, 4)) for rows in (3000, 1, 0, 5000, 77)]
    outputs = [np.full((len(k), 4 * dim), np.nan, np.float32) for k in keys]
    begins = np.arange(0, 4 * 5000, 4)
    ends = begins + 4
    segments = np.concatenate([segment(k, o, table=i % 3) for i, (k, o) in enumerate(zip(keys, outputs, strict=True))])
    if ragged:
        segments["begins_address"], segments["ends_address"] = begins.ctypes.data, ends.ctypes.data

    total, counts, positions = run(files, segments, positions=sum(k.size for k in keys), threads=threads)

    wanted_positions = []
    for i, (k, o) in enumerate(zip(keys, outputs, strict=True)):
        file = files[i % 3]
        unknown = ~np.isin(k.ravel(), file.keys())
        rows = {int(key): vector for key, vector in zip(file.keys(), file.vectors, strict=True)}
        default = np.arange(dim) + 0.5
        wanted = np.array([rows.get(int(key), default) for key in k.ravel()], np.float32)
        np.testing.assert_array_equal(o.reshape(-1, dim), wanted.reshape(-1, dim))
        assert counts[i] == unknown.sum()
        wanted_positions += np.flatnonzero(unknown).tolist()
    assert positions[:total].tolist() == wanted_positions


def test_a_key_not_in_a_table_is_searched_in_the_next(tmp_path: Path) -> None:
    """Tables chain: the first that holds a key answers; one of another type does too; a circle ends."""
    first = make_table(tmp_path / "a", [1, 2], np.array([[1.0], [2.0]], np.float32))
    second = make_table(tmp_path / "b", [2, 3], np.array([[20.0], [30.0]], np.float32), "float16")
    records = np.array([first.file.record(), second.file.record()], TABLE)
    records["next_table"] = [1, 0]
    keys = np.array([[1], [2], [3], [4]])
    output = np.zeros((4, 1), np.float32)

    missing = cpu.look_up(records, segment(keys, output), np.zeros(1, np.int64), NO_POSITIONS)

    assert output[:, 0].tolist() == [1, 2, 30, 0.5]
    assert missing == 1


def test_without_a_default_vector_unknown_keys_leave_the_output_alone(tmp_path: Path) -> None:
    """Address 0 for the default vector: unpooled outputs keep what they held, pooled ones count zeros."""
    known = make_table(tmp_path, [1], np.array([[1.0, -1.0]], np.float32))
    records = np.array([known.file.record()], TABLE)
    records["default_address"] = 0
    keys = np.array([[9, 1]])
    output = np.full((1, 4), 5, np.float32)
    cpu.look_up(records, segment(keys, output), np.zeros(1, np.int64), NO_POSITIONS)
    assert output.tolist() == [[5, 5, 1, -1]]
    cpu.look_up(records, segment(keys, output, pooling=PoolingCode.MAX), np.zeros(1, np.int64), NO_POSITIONS)
    assert output.tolist() == [[1, 0, 1, -1]]


def test_not_a_number_passes_through_a_maximum(tmp_path: Path) -> None:
    """A NaN in any vector of a bag is the bag's maximum, as in NumPy, wherever it stands."""
    known = make_table(tmp_path, [0, 1], np.array([[np.nan], [1.0]], np.float32))
    keys, output = np.array([[0, 1], [1, 0]]), np.zeros((2, 1), np.float32)
    run([known.file], segment(keys, output, pooling=PoolingCode.MAX))
    assert np.isnan(output).all()


def test_threads_look_up_at_the_same_time(tmp_path: Path) -> None:
    """Requests of several threads, each split over threads itself, do not disturb one another."""
    vectors = np.random.default_rng(1).random((2000, 64), np.float32)
    known = make_table(tmp_path, list(range(0, 4000, 2)), vectors)

    def one(seed: int) -> bool:
        keys = np.random.default_rng(seed).integers(0, 2000, (4096, 1)) * 2
        output = np.full((4096, 64), np.nan, np.float32)
        total, _, _ = run([known.file], segment(keys, output), threads=2)
        return total == 0 and bool((output == vectors[keys[:, 0] // 2]).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(40)))
