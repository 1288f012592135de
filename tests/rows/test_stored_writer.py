"""What goes into caches: each row under one key, and none that was written since it was fetched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_session.embedding_cache.cpu import CpuEmbeddingCache
from inference_session.embedding_cache.missing_rows import MissingRows
from inference_session.errors import StoreError
from inference_session.model_spec import TableSpec
from inference_session.parameter_server.server import ParameterServer
from inference_session.parameter_server.tier import Tier
from inference_session.rows import stored_writer
from inference_session.rows.stored_writer import StoredWriter
from tests.testing.cache_lookups import look_up
from tests.testing.memory_store import MemoryStore
from tests.testing.missed_rows import missed_rows
from tests.testing.servers import wait_until
from tests.testing.wrapper_store import FaultStore

NUM_ROWS, DIM = 10, 2
SPEC = TableSpec("t", "t", NUM_ROWS, DIM, keys="row_number")
OLD = np.arange(NUM_ROWS * DIM, dtype=np.float32).reshape(NUM_ROWS, DIM)


@pytest.fixture
def cache() -> CpuEmbeddingCache:
    return CpuEmbeddingCache({"t": DIM}, 1 << 16)


@pytest.fixture
def writer(cache: CpuEmbeddingCache) -> Iterator[StoredWriter]:
    """Over a store that has all rows."""
    store = MemoryStore({"t": DIM})
    store.insert("t", np.arange(NUM_ROWS), OLD)
    server = ParameterServer([Tier("memory", store)])
    yield StoredWriter([SPEC], [cache], server)
    server.close()


def missed(writer: StoredWriter, keys: NDArray[np.int64], num_tables: int = 1) -> MissingRows:
    """What a look-up of these keys in each table has fetched, as from a GPU's cache: the keys are those asked for."""
    rows = missed_rows([DIM] * num_tables, [keys] * num_tables)
    rows.moment = writer.log.moment
    for part in rows.by_table.values():
        part.vectors[:], part.found[:] = OLD[part.keys], True
    return rows


class RefusingCache(CpuEmbeddingCache):
    """Has three tables, and may refuse one of them."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys("abc", DIM), 1 << 16)
        self.refused = ""

    def _write_checked(self, table: str, keys: NDArray[np.int64], rows: NDArray[np.uint8], *, may_insert: bool) -> None:
        if table == self.refused:
            raise MemoryError
        super()._write_checked(table, keys, rows, may_insert=may_insert)


@pytest.fixture
def three_tables() -> Iterator[tuple[RefusingCache, StoredWriter]]:
    """A cache of three tables, and what writes to it."""
    cache = RefusingCache()
    server = ParameterServer([Tier("memory", MemoryStore(cache.dims))])
    yield cache, StoredWriter([TableSpec(name, name, NUM_ROWS, DIM) for name in "abc"], [cache], server)
    server.close()


def test_a_row_is_cached_under_the_number_from_the_start(cache: CpuEmbeddingCache, writer: StoredWriter) -> None:
    """Whatever numbers were asked for, also both of one row."""
    writer.keep(cache, [missed(writer, np.array([3, -7, -1]))])
    writer.bring_in(cache, "t", np.array([-2, 8, 0]))

    assert sorted(cache.dump("t").tolist()) == [0, 3, 8, 9]
    np.testing.assert_array_equal(look_up(cache, {"t": np.array([0, 3, 8, 9])}).vectors["t"], OLD[[0, 3, 8, 9]])


def test_a_row_that_was_written_since_is_not_cached(cache: CpuEmbeddingCache, writer: StoredWriter) -> None:
    """Nor where it was asked for by its number from the end; the others are."""
    fetched = missed(writer, np.array([-7, -1, 5]))
    writer.update("t", np.array([3]), np.full((1, DIM), 99, np.float32))
    writer.erase("t", np.array([9]))
    writer.keep(cache, [fetched])

    assert cache.dump("t").tolist() == [5]


def test_rows_of_many_look_ups_are_cached_some_at_a_time(
    cache: CpuEmbeddingCache, writer: StoredWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that updates need not wait for all of them; a look-up's own rows stay together."""
    groups: list[list[list[int]]] = []

    def insert_missing(missing: Sequence[MissingRows]) -> None:
        groups.append([rows.by_table[0].keys.tolist() for rows in missing])
        CpuEmbeddingCache.insert_missing(cache, missing)

    monkeypatch.setattr(stored_writer, "_BYTES_PER_INSERT", 5 * 4 * DIM)
    monkeypatch.setattr(cache, "insert_missing", insert_missing)
    writer.keep(cache, [missed(writer, np.array(keys)) for keys in ([3, 5], [4, 6], [1, 2, 7])])

    assert groups == [[[3, 5], [4, 6]], [[1, 2, 7]]]
    assert sorted(cache.dump("t").tolist()) == [1, 2, 3, 4, 5, 6, 7]


def test_rows_that_cannot_be_cached_harm_no_others(three_tables: tuple[RefusingCache, StoredWriter]) -> None:
    """The tables before them are whole. Later rows are cached, and updates written, as before."""
    cache, writer = three_tables
    cache.refused = "b"
    keys = np.array([3, 5])
    with pytest.raises(MemoryError):
        writer.keep(cache, [missed(writer, keys, 3)])
    assert [sorted(cache.dump(table).tolist()) for table in "abc"] == [[3, 5], [], []]

    cache.refused = ""
    writer.keep(cache, [missed(writer, keys, 3)])
    writer.update("a", np.array([3]), np.full((1, DIM), 99, np.float32))
    found = look_up(cache, dict.fromkeys("abc", keys)).vectors
    np.testing.assert_array_equal(found["a"], [[99] * DIM, OLD[5]])
    for table in "bc":
        np.testing.assert_array_equal(found[table], OLD[keys])


def test_a_row_that_was_not_found_is_not_cached(cache: CpuEmbeddingCache, writer: StoredWriter) -> None:
    """Its vector is the default one, and the store may get the row later."""
    fetched = missed(writer, np.array([1, 2, 4, 7]))
    fetched.by_table[0].found[[0, 2]] = False
    writer.keep(cache, [fetched])

    assert sorted(cache.dump("t").tolist()) == [2, 7]
    np.testing.assert_array_equal(look_up(cache, {"t": np.array([2, 7])}).vectors["t"], OLD[[2, 7]])


def test_refreshes_go_on_after_any_error(cache: CpuEmbeddingCache) -> None:
    """A round that runs out of memory, say, must not be the last: the cache would answer old rows without end."""
    store = MemoryStore({"t": DIM})
    store.insert("t", np.arange(NUM_ROWS), OLD)
    errors: list[Exception] = [
        MemoryError(),
        StoreError("an answer that cannot be read"),
        ValueError("a fault of ours"),
    ]
    faulty = FaultStore(store, lambda verb: errors.pop() if verb == "fetch_many" and errors else None)
    server = ParameterServer([Tier("memory", faulty)])
    writer = StoredWriter([SPEC], [cache], server, refresh_interval_s=0.01)
    try:
        cache.insert("t", np.array([3]), np.zeros((1, DIM), np.float32))
        wait_until(lambda: bool((look_up(cache, {"t": np.array([3])}).vectors["t"] == OLD[3]).all()), "the refresh")
    finally:
        writer.close()
        server.close()
    assert errors == []
