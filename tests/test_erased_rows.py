"""Rows that were erased, over each kind of store: they stay erased for as long as docs/how-to/use-stores.md says."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from inference_session import InferenceSession
from inference_session.config import SessionConfig
from inference_session.errors import UnavailableError
from inference_session.parameter_server.base import ERASED_SUFFIX
from inference_session.parameter_server.create import create_parameter_server
from inference_session.version_directory.version import VersionDirectory
from tests.testing import small_model
from tests.testing.servers import RedisServer, wait_until
from tests.testing.stored_model import push

EVERY, ERASED = np.arange(50), np.arange(0, 50, 3)


def assert_erased(session: InferenceSession, rows: np.ndarray) -> None:
    """The rows that were erased are answered by zeros, the table's default vector, all others by their vectors."""
    expected = rows.copy()
    expected[ERASED] = 0
    np.testing.assert_array_equal(session.lookup("user.weight", EVERY), expected)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "repository" / "small" / "1"


@contextlib.contextmanager
def stores_of(kind: str, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The settings of a version over these stores."""
    database = {"persistent_store": f"rocksdb://{tmp_path}/db"}
    if kind == "RocksDB":
        yield database
        return
    with RedisServer() as server:
        options = "?overflow_margin=2&partitions=8" if kind == "small Redis" else ""
        yield {"volatile_store": server.url + options} | (database if kind == "Redis over RocksDB" else {})


@pytest.mark.parametrize("has_files", [True, False], ids=["files", "no files"])
@pytest.mark.parametrize("cache_bytes", [0, 1 << 20], ids=["no cache", "all cached"])
@pytest.mark.parametrize("kind", ["RocksDB", "Redis over RocksDB", "Redis"])
def test_erased_rows_stay_erased(tmp_path: Path, directory: Path, kind: str, cache_bytes: int, has_files: bool) -> None:
    """At once, after a refresh, and in another session; an update brings a row back."""
    rows = small_model.write(directory)["user_weight"]
    with stores_of(kind, tmp_path) as stores:
        for url in stores.values():
            push(directory, url)
        if not has_files:
            shutil.rmtree(directory / "tables")
        with InferenceSession.open(directory, cache_bytes=cache_bytes, **stores) as session:
            np.testing.assert_array_equal(session.lookup("user.weight", EVERY), rows)
            session.erase("user.weight", ERASED)
            assert_erased(session, rows)
            session.refresh()
            assert_erased(session, rows)
        with InferenceSession.open(directory, cache_bytes=cache_bytes, **stores) as session:
            assert_erased(session, rows)
            session.update("user.weight", ERASED, rows[ERASED])
            np.testing.assert_array_equal(session.lookup("user.weight", EVERY), rows)


def test_what_remembers_erased_rows_is_not_evicted(tmp_path: Path, directory: Path) -> None:
    """A Redis that may hold few rows evicts rows, which the files also have, but no erasure."""
    rows = small_model.write(directory)["user_weight"]
    with (
        stores_of("small Redis", tmp_path) as stores,
        InferenceSession.open(directory, cache_bytes=0, **stores) as session,
    ):
        session.erase("user.weight", ERASED)
        session.update("code", np.arange(40), np.ones((40, 3), np.float32))
        session.refresh()
        assert_erased(session, rows)


def test_what_an_empty_redis_has_lost_is_there_again(directory: Path) -> None:
    """Redis alone remembers what was erased: while it is away, and once it is empty, the files answer."""
    rows = small_model.write(directory)["user_weight"]
    with RedisServer() as server, InferenceSession.open(directory, cache_bytes=0, volatile_store=server.url) as session:
        session.erase("user.weight", ERASED)
        assert_erased(session, rows)
        server.stop()
        session.refresh()  # fetches keys again that were unknown a moment ago
        np.testing.assert_array_equal(session.lookup("user.weight", EVERY), rows)
        with pytest.raises(UnavailableError):
            session.erase("user.weight", ERASED)
        with pytest.raises(UnavailableError):
            session.update("user.weight", EVERY, rows)
        server.start()
        wait_until(lambda: session.stats()["tiers"]["volatile"]["failure"] is None, "Redis to be used again")
        np.testing.assert_array_equal(session.lookup("user.weight", EVERY), rows)
        session.erase("user.weight", ERASED)
        assert_erased(session, rows)


def test_rows_of_files_that_another_follower_of_the_stream_erased_stay_erased(directory: Path) -> None:
    """Before this process has followed; while Redis is out, the files answer, and do not wait for it."""
    rows = small_model.write(directory)["user_weight"]
    version, table = VersionDirectory.read(directory), "user_weight"
    with RedisServer() as redis:
        config = SessionConfig(volatile_store=redis.url, update_stream="kafka://127.0.0.1:1")
        server = create_parameter_server(version, config)
        redis_tier, files_tier = server.tiers
        with contextlib.closing(server):
            redis_tier.store.insert(table + ERASED_SUFFIX, ERASED, np.ones((len(ERASED), 1), np.float32))
            found = files_tier.store.fetch(table, EVERY, np.empty_like(rows))
            np.testing.assert_array_equal(EVERY[~found], ERASED)

            redis_tier.health.begin_outage("it is tried out")
            assert files_tier.store.fetch(table, EVERY, np.empty_like(rows)).all()
