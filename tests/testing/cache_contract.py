"""What every embedding cache must do; each implementation's tests subclass `EmbeddingCacheContract`."""

from __future__ import annotations

import threading
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inference_session.embedding_cache.base import EmbeddingCache
from inference_session.embedding_cache.missing_rows import MissingRows
from inference_session.errors import ConfigurationError, InvalidRequestError, SessionClosedError, TableNotFoundError
from tests.testing.cache_lookups import look_up
from tests.testing.missed_rows import missed_rows

LOWEST, HIGHEST = -(2**63), 2**63 - 1
AMPLE_BYTES = 1 << 18
KEYS = st.sampled_from([LOWEST, LOWEST + 1, -1, 0, 1, 2, 3, 255, 256, HIGHEST - 1, HIGHEST]) | st.integers(
    LOWEST, HIGHEST
)
KEY_LISTS = st.lists(KEYS, max_size=40)
TABLES = st.sampled_from(["narrow", "wide"])
DIMS = {"narrow": 1, "wide": 5}
SHARED = settings(max_examples=40)
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["insert", "update", "erase", "clear", "lookup"]), TABLES, KEY_LISTS), max_size=12
)


Held: TypeAlias = dict[str, dict[int, NDArray[Any]]]
"""Vectors by table and key."""


def vectors_of(keys: NDArray[np.int64], dim: int, version: int = 0) -> NDArray[np.float32]:
    """Rows that encode their key and version; all elements of one are equal, and small enough for float16."""
    numbers = (np.asarray(keys, np.int64) % 1000).astype(np.float32) + version
    return np.repeat(numbers[:, None], dim, axis=1)


class EmbeddingCacheContract:
    """Subclass it, say how to create a cache, and whether it holds rows at all."""

    holds_rows = True
    least_bytes = 2_000
    """A budget that is enough for two small tables."""

    def create(self, dims: dict[str, int], cache_bytes: int = AMPLE_BYTES) -> EmbeddingCache:
        """A cache to test."""
        raise NotImplementedError

    @SHARED
    @given(operations=OPERATIONS)
    def test_it_answers_as_a_dict(self, operations: list[tuple[str, str, list[int]]]) -> None:
        """With room for all rows, any sequence of operations has the same result as in a dict, and counts exactly."""
        oracle: dict[str, dict[int, float]] = {table: {} for table in DIMS}
        hits = misses = 0
        with self.create(DIMS) as cache:
            for version, (what, table, keys) in enumerate(operations):
                array, held = np.array(keys, np.int64), oracle[table]
                vectors = vectors_of(array, DIMS[table], version)
                if what == "lookup":
                    expected = [i for i, key in enumerate(keys) if key not in held]
                    hits, misses = hits + len(keys) - len(expected), misses + len(expected)
                    self._check_lookup(cache, table, array, held)
                elif what == "clear":
                    cache.clear(table)
                    held.clear()
                elif what == "erase":
                    cache.erase(table, array)
                    for key in keys:
                        held.pop(key, None)
                else:
                    getattr(cache, what)(table, array, vectors)
                    for key, vector in zip(keys, vectors, strict=True):
                        if self.holds_rows and (what == "insert" or key in held):
                            held[key] = float(vector[0])
            stats = cache.stats()
            assert (stats.hits, stats.misses) == (hits, misses)
            for table, held in oracle.items():
                assert sorted(cache.dump(table).tolist()) == sorted(held)
                assert stats.tables[table].rows == len(held)

    @staticmethod
    def _check_lookup(cache: EmbeddingCache, table: str, keys: NDArray[np.int64], held: dict[int, float]) -> None:
        result = look_up(cache, {table: keys})
        missing = [i for i, key in enumerate(keys.tolist()) if key not in held]
        numbers = np.array([held.get(key, 0.0) for key in keys.tolist()], np.float32)
        assert result.missing[table].dtype == np.int64
        assert result.missing[table].tolist() == missing
        assert result.vectors[table].dtype == np.float32
        assert np.allclose(result.vectors[table], numbers[:, None], rtol=1e-6)
        assert result.vectors[table].shape == (len(keys), DIMS[table])

    def test_all_tables_are_looked_up_in_one_call(self) -> None:
        """Tables of different dims are answered together; equal keys of two tables are different rows."""
        with self.create(DIMS) as cache:
            cache.insert("narrow", [1, 2], vectors_of(np.array([1, 2]), 1))
            cache.insert("wide", [2], vectors_of(np.array([2]), 5, version=7))
            result = look_up(cache, {"wide": [2, 1], "narrow": [2, 1, 3]})

        if self.holds_rows:
            assert result.vectors["wide"].tolist() == [[9.0] * 5, [0.0] * 5]
            assert result.vectors["narrow"].tolist() == [[2.0], [1.0], [0.0]]
            assert {t: m.tolist() for t, m in result.missing.items()} == {"wide": [1], "narrow": [2]}

    @SHARED
    @given(sizes=st.lists(st.integers(0, 90), min_size=1, max_size=70), seed=st.integers(0, 2**32 - 1))
    def test_rows_that_look_ups_missed_are_inserted_at_once(self, sizes: list[int], seed: int) -> None:
        """Those of all tables, except dropped ones: tables do not mix, and of a key's rows the last wins."""
        generator = np.random.default_rng(seed)
        dims = {f"t{i}": int(generator.integers(1, 20)) for i in range(len(sizes))}
        held: Held = {name: dict.fromkeys(range(20), np.zeros(dim)) for name, dim in dims.items()}
        with self.create(dims, 1 << 25) as cache:
            for name, dim in dims.items():
                cache.insert(name, np.arange(20), np.zeros((20, dim), np.float32))
            cache.insert_missing([self._missed(held, sizes, generator) for _ in range(seed % 3 + 1)])
            for name, rows in held.items():
                found = look_up(cache, {name: np.array([*rows], np.int64)})
                if self.holds_rows:
                    assert not len(found.missing[name])
                    np.testing.assert_array_equal(found.vectors[name], np.array([*rows.values()], np.float32))
                    assert set(cache.dump(name).tolist()) == set(rows)

    def _missed(self, held: Held, sizes: list[int], generator: np.random.Generator) -> MissingRows:
        """The rows that a look-up of so many keys of each table has missed; they are added to those that are held."""
        dims = [len(rows[0]) for rows in held.values()]
        rows = missed_rows(dims, [generator.integers(-30, 30, size) for size in sizes])
        rows.vectors[:] = generator.random(len(rows.vectors), np.float32)
        for t, part in [*rows.by_table.items()]:
            if t % 3 == 0:
                rows.drop(t, generator.random(len(part.keys)) < (1.0 if t % 2 else 0.3))
        for t, name in enumerate(held):
            if t in rows.by_table:
                held[name].update(zip(rows.by_table[t].keys.tolist(), rows.by_table[t].vectors, strict=True))
        return rows

    def test_the_outputs_of_missing_keys_stay_as_they_are(self) -> None:
        """Only vectors that are cached are written."""
        with self.create(DIMS) as cache:
            cache.insert("wide", [10, 20], vectors_of(np.array([10, 20]), 5))
            result = look_up(cache, {"wide": [20, 5, 10]}, fill=-1)

        filled = [20, -1, 10] if self.holds_rows else [-1, -1, -1]
        assert result.vectors["wide"].tolist() == [[number] * 5 for number in filled]

    def test_arrays_need_not_be_contiguous(self) -> None:
        """Keys and vectors may be views with any strides, keys also of narrower types."""
        keys = np.arange(20, dtype=np.int32)[::-3]
        vectors = np.asfortranarray(vectors_of(keys.astype(np.int64), 5))[:, ::-1]
        with self.create(DIMS) as cache:
            cache.insert("wide", keys, vectors)
            result = look_up(cache, {"wide": np.repeat(keys, 2)[::2]})

        assert result.missing["wide"].tolist() == ([] if self.holds_rows else list(range(len(keys))))
        if self.holds_rows:
            assert np.array_equal(result.vectors["wide"], vectors)

    def test_nothing_may_be_asked(self) -> None:
        """A look-up without tables, or without keys, is valid."""
        with self.create(DIMS) as cache:
            cache.insert("wide", [], np.zeros((0, 5), np.float32))
            assert look_up(cache, {}) == ({}, {})
            result = look_up(cache, {"wide": []})

        assert result.vectors["wide"].shape == (0, 5)
        assert result.missing["wide"].shape == (0,)

    @pytest.mark.parametrize(
        "call",
        [
            lambda cache: cache.insert("other", [1], [[1.0]]),
            lambda cache: cache.update("other", [1], [[1.0]]),
            lambda cache: cache.erase("other", [1]),
            lambda cache: cache.clear("other"),
            lambda cache: cache.dump("other"),
        ],
    )
    def test_an_unknown_table_is_named(self, call: Any) -> None:
        """A table that the cache does not have is an error that names it and the cache's tables."""
        with self.create(DIMS) as cache, pytest.raises(TableNotFoundError, match=r"no table 'other'.*'narrow', 'wide'"):
            call(cache)

    @pytest.mark.parametrize("keys", [[[1]], [1.5], ["a"], np.array([1], np.uint64), 1])
    def test_keys_of_another_type_or_shape_are_refused(self, keys: Any) -> None:
        """Keys are one-dimensional integers that int64 can hold."""
        refused = pytest.raises(InvalidRequestError, match=r"table 'wide': keys are .*, expected int64")
        with self.create(DIMS) as cache, refused:
            cache.erase("wide", keys)

    @pytest.mark.parametrize("vectors", [[[1.0] * 4], [[1.0] * 5] * 2, [1.0] * 5, [[1] * 5], [["a"] * 5]])
    def test_vectors_of_another_type_or_shape_are_refused(self, vectors: Any) -> None:
        """Vectors are floats, one row of embedding_dim for each key."""
        with self.create(DIMS) as cache:
            for write in (cache.insert, cache.update):
                with pytest.raises(InvalidRequestError, match=r"'wide': vectors are .*expected floats \[1, 5\]"):
                    write("wide", [1], vectors)

    def test_a_dim_must_be_positive(self) -> None:
        """A table without elements is refused when the cache is created."""
        with pytest.raises(
            ConfigurationError, match="table 'flat': embedding_dim must be a whole number of at least 1"
        ):
            self.create({"flat": 0})

    def test_a_closed_cache_refuses_everything(self) -> None:
        """Closing twice is fine; any use afterwards is an error that says so."""
        cache = self.create(DIMS)
        cache.close()
        cache.close()

        for call in (
            lambda: look_up(cache, {"wide": [1]}),
            lambda: cache.insert("wide", [1], np.zeros((1, 5), np.float32)),
            lambda: cache.dump("wide"),
            lambda: cache.clear("wide"),
            cache.stats,
        ):
            with pytest.raises(SessionClosedError, match="embedding cache has been closed"):
                call()

    @SHARED
    @given(spare_bytes=st.integers(0, 38_000), seed=st.integers(0, 2**32 - 1))
    def test_rows_are_evicted_to_stay_within_the_budget(self, spare_bytes: int, seed: int) -> None:
        """With any number of inserts, bytes and rows stay in bounds, and the rows held are those inserted."""
        generator = np.random.default_rng(seed)
        cache_bytes = self.least_bytes + spare_bytes
        with self.create(DIMS, cache_bytes) as cache:
            for _ in range(5):
                keys = generator.integers(-2000, 2000, generator.integers(0, 1500))
                cache.insert("wide", keys, vectors_of(keys, 5))
                held, counts = cache.dump("wide"), cache.stats().tables["wide"]
                result = look_up(cache, {"wide": held})

                assert cache.stats().bytes <= cache_bytes
                assert len(set(held.tolist())) == len(held) == counts.rows <= counts.capacity
                assert counts.rows == counts.inserts - counts.evictions - counts.erases
                assert result.missing["wide"].size == 0
                assert np.array_equal(result.vectors["wide"], vectors_of(held, 5))
                assert set(held.tolist()) <= set(range(-2000, 2000))

    def test_readers_see_whole_rows_while_others_write(self) -> None:
        """While rows are inserted, updated, evicted and erased, a look-up finds complete rows, none of them older than
        the last write that had returned.
        """
        dim, num_keys, rounds = 64, 300, 150
        cache = self.create({"t": dim}, 40_000)
        keys, done, broken = np.arange(num_keys), threading.Event(), []
        returned = [0]

        def read() -> None:
            generator = np.random.default_rng(threading.get_ident())
            while not done.is_set():
                asked, oldest = generator.integers(0, num_keys, 256), returned[-1]
                result = look_up(cache, {"t": asked})
                found = np.delete(np.arange(len(asked)), result.missing["t"])
                rows = result.vectors["t"][found]
                versions = rows[:, 0] - asked[found]
                if (rows != rows[:, :1]).any() or not np.isin(versions, 1000 * np.arange(oldest, rounds)).all():
                    broken.append(rows)

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        try:
            for version in range(rounds):
                write = cache.insert if version % 2 else cache.update
                write("t", keys, vectors_of(keys, dim, version * 1000))
                returned.append(version)
                cache.erase("t", keys[version % 7 :: 7])
        finally:
            done.set()
            for reader in readers:
                reader.join()
            cache.close()

        assert not broken
