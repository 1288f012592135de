"""Values in real stores that are no rows: each concerns the requests for its own key, and not even those where another
tier has the row.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from inference_session import InferenceSession, Request
from inference_session.parameter_server.base import EmbeddingStore
from inference_session.parameter_server.create import create_store
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.redis import layout
from inference_session.parameter_server.rocksdb.store import RocksDbStore
from tests.testing import small_model
from tests.testing.servers import PATIENCE_MS, RedisServer, wait_until
from tests.testing.store_contract import packed
from tests.testing.stored_model import DIMS, push

NAMESPACE = Namespace("small", "1")
BAD_KEY = 7
EVERY = np.arange(50)


def opened_store(url: str) -> EmbeddingStore:
    return create_store(url, NAMESPACE, DIMS, writable=True, timeout_ms=PATIENCE_MS)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "repository" / "small" / "1"


@pytest.fixture
def tables(directory: Path) -> small_model.Arrays:
    return small_model.write(directory)


@pytest.fixture
def server(directory: Path, tables: small_model.Arrays) -> Iterator[RedisServer]:
    """A Redis that has the rows, but for one key whose value is short."""
    assert tables
    with RedisServer() as server:
        push(directory, server.url)
        with server.client() as client:
            for partition in range(8):
                name = layout.rows_name(NAMESPACE.tag("user_weight"), partition)
                if client.hexists(name, packed(BAD_KEY)):
                    client.hset(name, packed(BAD_KEY), b"short")
        yield server


def inputs_of(*users: int) -> small_model.Arrays:
    inputs = small_model.random_inputs(len(users), np.random.default_rng(0))
    return inputs | {"user": np.array(users)[:, None]}


@pytest.mark.parametrize("on_store_failure", ["default_vector", "error"])
@pytest.mark.parametrize("cache_bytes", [0, 1 << 20], ids=["no cache", "all cached"])
def test_requests_joined_with_one_for_a_malformed_value_are_right(
    directory: Path, tables: small_model.Arrays, server: RedisServer, cache_bytes: int, on_store_failure: str
) -> None:
    """Redis is the only store: the key is answered by its default vector, counted, and every other one by its row."""
    shutil.rmtree(directory / "tables")
    settings = {"cache_bytes": cache_bytes, "on_store_failure": on_store_failure}
    with InferenceSession.open(directory, volatile_store=server.url, **settings) as session:
        good, bad = inputs_of(1, 2, 3), inputs_of(4, BAD_KEY, 5)
        tables["user_weight"][BAD_KEY] = 0
        for inputs, answer in zip((good, bad), session.run_many([Request(good), Request(bad)]), strict=True):
            assert isinstance(answer, dict), answer
            for name, expected in small_model.expected(tables, inputs).items():
                np.testing.assert_allclose(answer[name], expected, atol=1e-5, rtol=1e-5)
        tier = session.stats()["tiers"]["volatile"]
        assert tier["failure"] is None
        assert tier["failures"] == 0
        assert tier["malformed"] >= 1


def test_the_next_tier_answers_for_a_malformed_value(
    directory: Path, tables: small_model.Arrays, server: RedisServer, tmp_path: Path
) -> None:
    """In Redis with a RocksDB below, and in a RocksDB with the files below: no answer differs."""
    database = f"rocksdb://{tmp_path}/db"
    push(directory, database)
    with InferenceSession.open(
        directory, volatile_store=server.url, persistent_store=database, cache_bytes=0
    ) as session:
        np.testing.assert_array_equal(session.lookup("user.weight", EVERY), tables["user_weight"])
        assert session.stats()["tiers"]["volatile"]["malformed"] == 1

    with opened_store(database) as store:
        assert isinstance(store, RocksDbStore)
        store.family("user_weight").put(packed(BAD_KEY), b"short")
    with InferenceSession.open(directory, persistent_store=database, cache_bytes=0) as session:
        np.testing.assert_array_equal(session.lookup("user.weight", EVERY), tables["user_weight"])
        assert session.stats()["tiers"]["persistent"]["malformed"] == 1


def test_refreshes_go_on_behind_a_malformed_value(
    directory: Path, tables: small_model.Arrays, server: RedisServer
) -> None:
    """Rows that somebody else writes after the damage reach the cache."""
    shutil.rmtree(directory / "tables")
    with InferenceSession.open(
        directory, volatile_store=server.url, cache_bytes=1 << 20, refresh_interval_s=0.1
    ) as session:
        good = EVERY[EVERY != BAD_KEY]
        np.testing.assert_array_equal(session.lookup("user.weight", good), tables["user_weight"][good])
        session.lookup("user.weight", EVERY)
        with opened_store(server.url) as other:
            other.insert("user_weight", good, np.full((49, 4), 9, np.float32))
            wait_until(lambda: bool((session.lookup("user.weight", good) == 9).all()), "the rows to be refreshed")


def test_updates_go_on_beside_a_name_of_another_type(
    directory: Path, tables: small_model.Arrays, server: RedisServer, tmp_path: Path
) -> None:
    """A list instead of a hash: its rows are updated in the tier below, others also in Redis, which stays in use."""
    push(directory, f"rocksdb://{tmp_path}/db")
    name = layout.rows_name(NAMESPACE.tag("user_weight"), 3)
    with server.client() as client:
        client.delete(name)
        client.rpush(name, "a", "b")
    with InferenceSession.open(
        directory, volatile_store=server.url, persistent_store=f"rocksdb://{tmp_path}/db", cache_bytes=0
    ) as session:
        for value in (1, 2):
            new = np.full((50, 4), value, np.float32)
            session.update("user.weight", EVERY, new)
            np.testing.assert_array_equal(session.lookup("user.weight", EVERY), new)
        assert session.stats()["tiers"]["volatile"]["failure"] is None
        assert session.stats()["tiers"]["volatile"]["outages"] == 0
    assert tables
