"""What goes into caches: each row under one key, and none that was written since it was fetched."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_session.embedding_cache.cpu import CpuEmbeddingCache
from inference_session.embedding_cache.missing_rows import MissingRows
from inference_session.errors import StoreError
from inference_session.kernels.records import SEGMENT, address_of
from inference_session.model_spec import TableSpec
from inference_session.parameter_server.server import ParameterServer
from inference_session.parameter_server.tier import Tier
from inference_session.rows.stored_writer import StoredWriter
from tests.testing.cache_lookups import look_up
from tests.testing.faulty_stores import FaultStore
from tests.testing.memory_store import MemoryStore
from tests.testing.servers import wait_until

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


def missed(writer: StoredWriter, keys: NDArray[np.int64]) -> MissingRows:
    """What a look-up of these keys has fetched, as from a GPU's cache: the keys are those that were asked for."""
    segments = np.zeros(1, SEGMENT)
    segments["keys_address"], segments["key_bytes"] = address_of(keys), 8
    segments["row_stride"] = segments["key_stride"] = 8
    segments["num_rows"], segments["keys_per_row"] = len(keys), 1
    rows = MissingRows(np.array([DIM]), segments, np.array([len(keys)]), np.arange(len(keys)))
    rows.moment = writer.log.moment
    part = rows.by_table[0]
    part.vectors[:], part.found[:] = OLD[part.keys], True
    return rows


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
