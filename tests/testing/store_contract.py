"""The contract of every EmbeddingStore. A store's tests subclass these, and define how to make and bypass the store.

`put` and `get` access the medium without the store's code: the store must read rows that other programs wrote,
and other programs must be able to read the rows that it writes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inference_session.errors import InvalidRequestError, SessionClosedError, TableNotFoundError
from inference_session.parameter_server.base import EmbeddingStore, FetchRequest

DIMS = {"user": 4, "wide": 128, "odd": 1}
INT64 = np.iinfo(np.int64)
EXTREMES = np.array([INT64.min, INT64.min + 1, -1, 0, 1, INT64.max - 1, INT64.max])

Rows = Mapping[str, tuple[NDArray[np.int64], NDArray[np.float32]]]


def keys_of(*keys: int) -> NDArray[np.int64]:
    return np.array(keys, np.int64)


def random_keys(count: int, seed: int = 0) -> NDArray[np.int64]:
    """Distinct keys over the whole range of int64, the extremes among them."""
    drawn = np.random.default_rng(seed).integers(INT64.min, INT64.max, 2 * count + 8, endpoint=True)
    return np.unique(np.concatenate([EXTREMES, drawn]))[:: 2 if count > 10 else 1][:count].copy()


def random_vectors(count: int, dim: int, seed: int = 1) -> NDArray[np.float32]:
    """Random bits: NaN, infinities, subnormal numbers and signed zeros included."""
    bits = np.random.default_rng(seed).integers(0, 2**32, (count, dim), dtype=np.uint32)
    return bits.view(np.float32)


def fetch(store: EmbeddingStore, table: str, keys: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
    """Fetch into a poisoned array."""
    out = np.full((len(keys), store.embedding_dim(table)), -7777, np.float32)
    return store.fetch(table, keys, out), out


def assert_same_bits(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    np.testing.assert_array_equal(
        np.ascontiguousarray(found).view(np.uint32), np.ascontiguousarray(expected).view(np.uint32)
    )


class ReadContract:
    """The contract of reads. The fixture `filled` gives a store that holds `ROWS`."""

    ROWS: ClassVar[Rows] = {
        "user": (random_keys(150), random_vectors(150, 4)),
        "wide": (random_keys(60, seed=5), random_vectors(60, 128)),
        "odd": (EXTREMES, random_vectors(len(EXTREMES), 1)),
    }

    def test_tables_and_their_widths_are_known(self, filled: EmbeddingStore) -> None:
        """The store reports its tables, and the width and the number of rows of each."""
        assert set(filled.tables) == set(DIMS)
        assert {table: filled.embedding_dim(table) for table in filled.tables} == DIMS
        assert {table: filled.num_rows(table) for table in filled.tables} == {
            t: len(k) for t, (k, _) in self.ROWS.items()
        }

    def test_every_row_is_found_bit_by_bit(self, filled: EmbeddingStore) -> None:
        """Rows come back with the bits they were stored with, in the order of the keys asked for."""
        for table, (keys, vectors) in self.ROWS.items():
            order = np.random.default_rng(2).permutation(len(keys))
            found, out = fetch(filled, table, keys[order])
            assert found.all()
            assert_same_bits(out, vectors[order])

    def test_rows_that_are_not_held_stay_as_they_are(self, filled: EmbeddingStore) -> None:
        """A missing key is reported as missing, and its row of the output is not written to."""
        held, vectors = self.ROWS["user"]
        asked = np.concatenate([held[:3], keys_of(12345, -54321), held[3:5]])
        found, out = fetch(filled, "user", asked)
        np.testing.assert_array_equal(found, [True] * 3 + [False] * 2 + [True] * 2)
        assert_same_bits(out[found], vectors[:5])
        assert (out[~found] == -7777).all()

    def test_a_key_asked_for_twice_is_answered_twice(self, filled: EmbeddingStore) -> None:
        """Duplicates in one call are no error."""
        keys, vectors = self.ROWS["user"]
        asked = np.repeat(keys[:10], 3)
        found, out = fetch(filled, "user", asked)
        assert found.all()
        assert_same_bits(out, np.repeat(vectors[:10], 3, axis=0))

    def test_a_scan_gives_every_row(self, filled: EmbeddingStore) -> None:
        """All rows of a table come, each with its bits, and none of another's."""
        for table, (keys, vectors) in self.ROWS.items():
            scanned = {k: row.tobytes() for part, rows in filled.scan(table) for k, row in zip(part, rows, strict=True)}
            assert scanned == {key: row.tobytes() for key, row in zip(keys, vectors, strict=True)}

    def test_no_keys_give_no_rows(self, filled: EmbeddingStore) -> None:
        """An empty fetch is no error."""
        found, out = fetch(filled, "user", keys_of())
        assert found.shape == (0,)
        assert out.shape == (0, 4)

    def test_the_output_may_be_part_of_a_larger_array(self, filled: EmbeddingStore) -> None:
        """Rows and keys may have any strides; the memory between them is not touched."""
        keys, vectors = self.ROWS["user"]
        whole = np.full((40, 11), -7777, np.float32)
        found = filled.fetch("user", np.repeat(keys[:20], 2)[::2], whole[::2, 3:7])
        assert found.all()
        assert_same_bits(whole[::2, 3:7], vectors[:20])
        whole[::2, 3:7] = -7777
        assert (whole == -7777).all()

    def test_several_tables_are_fetched_in_one_call(self, filled: EmbeddingStore) -> None:
        """fetch_many answers as as many fetches."""
        requests = [FetchRequest(t, k, np.zeros((len(k), DIMS[t]), np.float32)) for t, (k, _) in self.ROWS.items()]
        requests.append(FetchRequest("user", keys_of(777), np.zeros((1, 4), np.float32)))
        found = filled.fetch_many(requests)
        assert [hits.all() for hits in found] == [True, True, True, False]
        for request, (_, vectors) in zip(requests[:3], self.ROWS.values(), strict=True):
            assert_same_bits(request.out, vectors)

    def test_an_unknown_table_is_named(self, filled: EmbeddingStore) -> None:
        """Every call on a table that the store was not opened for is an error."""
        out = np.zeros((1, 4), np.float32)
        for ask in (
            lambda: filled.fetch("nobody", keys_of(1), out),
            lambda: filled.embedding_dim("nobody"),
            lambda: filled.num_rows("nobody"),
        ):
            with pytest.raises(TableNotFoundError, match="'nobody'"):
                ask()

    @pytest.mark.parametrize(
        ("keys", "out"),
        [
            (np.zeros(2, np.int32), np.zeros((2, 4), np.float32)),
            (np.zeros(2, np.int64), np.zeros((2, 3), np.float32)),
            (np.zeros(2, np.int64), np.zeros((3, 4), np.float32)),
            (np.zeros(2, np.int64), np.zeros((2, 4), np.float64)),
            (np.zeros(2, np.int64), np.zeros((2, 8), np.float32)[:, ::2]),
        ],
    )
    def test_wrong_arguments_are_refused(
        self, filled: EmbeddingStore, keys: NDArray[np.int64], out: NDArray[np.float32]
    ) -> None:
        """Arrays of a wrong type or shape never reach the store."""
        with pytest.raises(InvalidRequestError):
            filled.fetch("user", keys, out)

    def test_threads_may_fetch_at_once(self, filled: EmbeddingStore) -> None:
        """Calls from several threads answer as if they came one after the other."""
        keys, vectors = self.ROWS["wide"]

        def work(seed: int) -> None:
            for n in range(20):
                order = np.random.default_rng(100 * seed + n).integers(0, len(keys), 50)
                found, out = fetch(filled, "wide", keys[order])
                assert found.all()
                assert_same_bits(out, vectors[order])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))

    def test_a_closed_store_refuses(self, filled: EmbeddingStore) -> None:
        """After close, which may be called twice, a fetch is an error."""
        filled.close()
        filled.close()
        with pytest.raises(SessionClosedError):
            fetch(filled, "user", keys_of(1))


class StoreContract(ReadContract):
    """The contract of reads and writes. The fixture `store` gives a store without rows."""

    def put(self, table: str, key: int, row: bytes) -> None:
        """Write a row without the store."""
        raise NotImplementedError

    def get(self, table: str, key: int) -> bytes | None:
        """Read a row without the store."""
        raise NotImplementedError

    @pytest.fixture
    def filled(self, store: EmbeddingStore) -> EmbeddingStore:
        for table, (keys, vectors) in self.ROWS.items():
            for key, vector in zip(keys.tolist(), vectors, strict=True):
                self.put(table, key, vector.tobytes())
        store.refresh()
        return store

    def test_a_store_without_rows_is_in_order(self, store: EmbeddingStore) -> None:
        """It answers, and has nothing to complain of."""
        store.check()

    def test_what_is_inserted_lies_as_promised(self, store: EmbeddingStore) -> None:
        """Another program finds the rows inserted: key by 8 bytes, row by float32, little endian."""
        keys, vectors = EXTREMES, random_vectors(len(EXTREMES), 4)
        store.insert("user", keys, vectors)
        for key, vector in zip(keys.tolist(), vectors, strict=True):
            assert self.get("user", key) == vector.tobytes()
        assert self.get("user", 5) is None
        assert self.get("wide", 0) is None

    def test_a_later_insert_replaces(self, store: EmbeddingStore) -> None:
        """Of two rows with the same key the later one stays; rows are not counted twice."""
        keys, vectors = random_keys(200), random_vectors(200, 4)
        store.insert("user", keys, vectors)
        store.insert("user", keys[:100], -vectors[:100])
        found, out = fetch(store, "user", keys)
        assert found.all()
        assert_same_bits(out, np.concatenate([-vectors[:100], vectors[100:]]))
        assert store.num_rows("user") == 200

    def test_of_equal_keys_in_one_insert_the_last_wins(self, store: EmbeddingStore) -> None:
        """Duplicates within a call have the same effect as one after the other."""
        keys = np.tile(random_keys(50), 3)
        vectors = random_vectors(150, 4)
        store.insert("user", keys, vectors)
        found, out = fetch(store, "user", keys[:50])
        assert found.all()
        assert_same_bits(out, vectors[100:])

    def test_the_last_of_many_equal_keys_wins_as_well(self, store: EmbeddingStore) -> None:
        """Order holds beyond the batches and connections that a large insert is spread over."""
        keys = np.tile(random_keys(1000), 6)
        vectors = random_vectors(6000, 128)
        store.insert("wide", keys, vectors)
        assert_same_bits(fetch(store, "wide", keys[:1000])[1], vectors[5000:])

    def test_a_scan_comes_in_batches(self, store: EmbeddingStore) -> None:
        """Every key of a large table comes, in arrays as promised; a table without rows has no batch."""
        keys, vectors = random_keys(20_000), random_vectors(20_000, 128)
        store.insert("wide", keys, vectors)
        batches = list(store.scan("wide"))
        assert sorted(set(np.concatenate([part for part, _ in batches]).tolist())) == keys.tolist()
        assert all(part.dtype == np.int64 and rows.shape == (len(part), 128) for part, rows in batches)
        assert list(store.scan("odd")) == []

    def test_many_rows_at_once(self, store: EmbeddingStore) -> None:
        """More rows than any batch, window or buffer holds, with gaps among the keys asked for."""
        keys, vectors = random_keys(20_000), random_vectors(20_000, 128)
        store.insert("wide", keys[::2], vectors[::2])
        found, out = fetch(store, "wide", keys)
        np.testing.assert_array_equal(found, np.arange(20_000) % 2 == 0)
        assert_same_bits(out[::2], vectors[::2])
        assert (out[1::2] == -7777).all()

    def test_tables_are_apart(self, store: EmbeddingStore) -> None:
        """A row of one table is not one of another's."""
        store.insert("user", keys_of(1, 2), random_vectors(2, 4))
        assert not fetch(store, "wide", keys_of(1, 2))[0].any()
        assert store.num_rows("odd") == 0

    def test_rows_that_are_held_can_be_left_alone(self, store: EmbeddingStore) -> None:
        """insert_absent writes the rows whose keys are not held, and changes none that is; the first of equals wins."""
        keys, vectors = random_keys(300), random_vectors(300, 128)
        store.insert("wide", keys[::3], vectors[::3])
        store.insert_absent("wide", np.concatenate([keys, keys]), np.concatenate([-vectors, vectors]))
        expected = -vectors
        expected[::3] = vectors[::3]
        found, out = fetch(store, "wide", keys)
        assert found.all()
        assert_same_bits(out, expected)
        assert store.num_rows("wide") == 300
        store.insert_absent("wide", keys_of(), np.zeros((0, 128), np.float32))

    def test_erased_rows_are_gone(self, store: EmbeddingStore) -> None:
        """Erase drops the rows of these keys, and takes keys that are not held, and none, without complaint."""
        keys, vectors = random_keys(100), random_vectors(100, 4)
        store.erase("user", keys)
        store.insert("user", keys, vectors)
        store.erase("user", np.concatenate([keys[:40], keys_of(31, 32), keys[:2]]))
        store.erase("user", keys_of())
        np.testing.assert_array_equal(fetch(store, "user", keys)[0], np.arange(100) >= 40)
        assert store.num_rows("user") == 60
        assert self.get("user", int(keys[0])) is None

    def test_a_cleared_table_is_empty_and_can_be_filled_again(self, store: EmbeddingStore) -> None:
        """Clear drops all rows and the note of one table only."""
        store.insert("user", keys_of(1, 2), random_vectors(2, 4))
        store.insert("odd", keys_of(1), random_vectors(1, 1))
        store.set_note("user", "half way")
        store.clear("user")
        assert store.num_rows("user") == 0
        assert store.note("user") is None
        assert not fetch(store, "user", keys_of(1))[0].any()
        assert store.num_rows("odd") == 1
        store.insert("user", keys_of(2), random_vectors(1, 4))
        assert fetch(store, "user", keys_of(1, 2))[0].tolist() == [False, True]

    def test_a_note_is_kept_beside_each_table(self, store: EmbeddingStore) -> None:
        """A note is no row; a new one replaces the old."""
        assert store.note("user") is None
        store.set_note("user", '{"rows": 1}')
        store.set_note("user", '{"rows": 2, "é": 1}')
        assert store.note("user") == '{"rows": 2, "é": 1}'
        assert store.note("wide") is None
        assert store.num_rows("user") == 0

    def test_touching_changes_no_row(self, store: EmbeddingStore) -> None:
        """Touch is about time alone."""
        vectors = random_vectors(2, 4)
        store.insert("user", keys_of(1, 2), vectors)
        store.touch("user", keys_of(1, 2))
        assert store.num_rows("user") == 2
        assert_same_bits(fetch(store, "user", keys_of(1, 2))[1], vectors)

    @pytest.mark.parametrize(("num_keys", "shape"), [(2, (2, 3)), (2, (3, 4)), (1, (1, 1, 4))])
    def test_an_insert_of_a_wrong_shape_changes_nothing(
        self, store: EmbeddingStore, num_keys: int, shape: tuple[int, ...]
    ) -> None:
        """Vectors that are not [n, embedding_dim] are refused before anything is written."""
        with pytest.raises(InvalidRequestError):
            store.insert("user", np.arange(num_keys), np.zeros(shape, np.float32))
        assert store.num_rows("user") == 0

    def test_inserting_nothing_is_no_error(self, store: EmbeddingStore) -> None:
        """An empty insert leaves an empty table."""
        store.insert("user", keys_of(), np.zeros((0, 4), np.float32))
        assert store.num_rows("user") == 0

    def test_an_insert_keeps_no_hold_on_the_callers_arrays(self, store: EmbeddingStore) -> None:
        """Later changes of the caller's array change no row."""
        vectors = np.ones((1, 4), np.float32)
        store.insert("user", keys_of(1), vectors)
        vectors[:] = 2
        assert (fetch(store, "user", keys_of(1))[1] == 1).all()

    def test_slices_are_stored_as_they_look(self, store: EmbeddingStore) -> None:
        """Arrays that are not contiguous are taken as well."""
        keys, vectors = random_keys(60), random_vectors(60, 8)
        store.insert("user", keys[::3], vectors[::3, ::2])
        found, out = fetch(store, "user", keys[::3])
        assert found.all()
        assert_same_bits(out, vectors[::3, ::2])

    def test_any_sequence_of_calls_answers_as_a_dictionary(self, store: EmbeddingStore) -> None:
        """Insert, erase and fetch in any order have the same effect as on a dict."""

        @settings(max_examples=25)
        @given(CALLS)
        def check(calls: list[tuple[str, list[int], int]]) -> None:
            store.clear("odd")
            compare_with_dictionary(store, calls)

        check()


class SharedStoreContract(StoreContract):
    """The contract of a store to which other programs write: they may put any value under a key."""

    ODD_BYTES = (0, 1, 12, 15, 17, 20, 512, 3_000_000)
    """Lengths of values that are no rows of `user`, whose rows have 16 bytes."""

    def put_odd(self) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.bool_]]:
        """Put rows of `user`, some of them malformed; gives keys, rows, and which of them are well."""
        keys, vectors = random_keys(300), random_vectors(300, 4)
        is_good = np.ones(300, np.bool_)
        is_good[np.random.default_rng(7).choice(300, 3 * len(self.ODD_BYTES), replace=False)] = False
        lengths = iter(self.ODD_BYTES * 3)
        for key, vector, good in zip(keys.tolist(), vectors, is_good, strict=True):
            self.put("user", key, vector.tobytes() if good else b"x" * next(lengths))
        return keys, vectors, is_good

    def test_a_malformed_value_concerns_its_key_only(
        self, store: EmbeddingStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It counts as missing and as malformed; the log names table and key, once. All other rows are found."""
        keys, vectors, is_good = self.put_odd()
        self.put("odd", 1, np.float32(3).tobytes())
        store.refresh()

        requests = [FetchRequest("user", keys, np.full((300, 4), -7777, np.float32))]
        requests.append(FetchRequest("odd", keys_of(1), np.zeros((1, 1), np.float32)))
        found, other = store.fetch_many(requests)

        np.testing.assert_array_equal(found, is_good)
        assert_same_bits(requests[0].out[is_good], vectors[is_good])
        assert (requests[0].out[~is_good] == -7777).all()
        assert other.all()
        assert store.num_malformed == (~is_good).sum()
        [said] = [record.message for record in caplog.records if "counts as missing" in record.message]
        assert "'user'" in said
        assert any(f"key {key} has a row of" in said for key in keys[~is_good].tolist())
        fetch(store, "user", keys)
        assert store.num_malformed == 2 * (~is_good).sum()
        assert caplog.text.count("counts as missing") == 1

    def test_a_scan_passes_over_malformed_values(self, store: EmbeddingStore) -> None:
        """All other rows are returned, and no part of a malformed value."""
        keys, vectors, is_good = self.put_odd()
        store.refresh()

        batches = list(store.scan("user"))

        rows = {key: row.tobytes() for part, some in batches for key, row in zip(part.tolist(), some, strict=True)}
        assert rows == {key: row.tobytes() for key, row in zip(keys[is_good].tolist(), vectors[is_good], strict=True)}
        assert store.num_malformed == (~is_good).sum()

    def test_a_malformed_value_is_replaced_by_a_row(self, store: EmbeddingStore) -> None:
        """A row written to its key is found from then on."""
        self.put("user", 5, b"short")
        store.refresh()
        assert not fetch(store, "user", keys_of(5))[0].any()
        vectors = random_vectors(1, 4)
        store.insert("user", keys_of(5), vectors)
        found, out = fetch(store, "user", keys_of(5))
        assert found.all()
        assert_same_bits(out, vectors)


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "erase", "fetch"]),
        st.lists(st.integers(INT64.min, INT64.max) | st.integers(-3, 3), max_size=12),
        st.integers(0, 2**20),
    ),
    max_size=12,
)


def compare_with_dictionary(store: EmbeddingStore, calls: list[tuple[str, list[int], int]]) -> None:
    """Make these calls on the empty table `odd`, and the same on a dict."""
    rows: dict[int, float] = {}
    for verb, keys, value in calls:
        array = np.array(keys, np.int64)
        if verb == "insert":
            vectors = (np.float32(value) + np.arange(len(keys), dtype=np.float32)).reshape(-1, 1)
            store.insert("odd", array, vectors)
            rows.update(zip(keys, vectors[:, 0].tolist(), strict=True))
        elif verb == "erase":
            store.erase("odd", array)
            rows = {key: row for key, row in rows.items() if key not in set(keys)}
        found, out = fetch(store, "odd", array)
        assert found.tolist() == [key in rows for key in keys]
        assert out[:, 0].tolist() == [rows.get(key, -7777.0) for key in keys]
    assert store.num_rows("odd") == len(rows)


def packed(key: int) -> bytes:
    """A key as stores hold it."""
    return struct.pack("<q", key)
