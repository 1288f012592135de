"""A slow, real Redis: a late answer affects only its own call, and calls that make progress may finish."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import redis

from inference_session import InferenceSession
from inference_session.errors import UnavailableError
from inference_session.parameter_server.base import LateError
from inference_session.parameter_server.create import create_store
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.redis import client as redis_client
from inference_session.parameter_server.redis.connection import Deadline, DisconnectedError, Login, RedisConnection
from inference_session.urls.store_url import StoreUrl
from tests.testing import small_model
from tests.testing.proxy import Proxy
from tests.testing.servers import PATIENCE_MS, PATIENCE_S, RedisServer, wait_until
from tests.testing.store_contract import assert_same_bits, fetch, random_keys, random_vectors
from tests.testing.stored_model import push

EVERY = np.arange(50)
LARGE_BYTES = 1000
"""The 50 rows take 1150 bytes in an answer of Redis, and what it says of itself some 650."""


@contextlib.contextmanager
def opened(tmp_path: Path, server: RedisServer, port: int, **settings: object) -> Iterator[InferenceSession]:
    """The small model over a Redis behind a port, and a RocksDB, both of which have its rows."""
    directory = tmp_path / "repository" / "small" / "1"
    small_model.write(directory)
    database = f"rocksdb://{tmp_path}/db"
    push(directory, server.url)
    push(directory, database)
    shutil.rmtree(directory / "tables")
    stores = {"volatile_store": f"redis://127.0.0.1:{port}", "persistent_store": database}
    with InferenceSession.open(directory, cache_bytes=0, **stores, **settings) as session:
        yield session


def test_work_may_take_longer_than_the_timeout_as_long_as_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece of a large call has its own deadline, however many pieces there are."""
    monkeypatch.setattr(redis_client, "BYTES_PER_BATCH", 16 << 10)
    monkeypatch.setattr("inference_session.parameter_server.redis.store.BYTES_PER_BATCH", 16 << 10)
    monkeypatch.setattr(redis_client, "BYTES_UNDER_WAY", 16 << 10)
    keys, vectors = random_keys(2000), random_vectors(2000, 64)

    def delay(data: bytes, is_answer: bool) -> None:
        time.sleep(0.05 if is_answer and len(data) > 1000 else 0.0)

    with RedisServer() as server, Proxy(server.port, delay) as network:
        namespace, dims = Namespace("large", "1"), {"user": 64}
        url = f"redis://127.0.0.1:{network.port}?partitions=1"
        with create_store(server.url + "?partitions=1", namespace, dims, timeout_ms=PATIENCE_MS) as patient:
            patient.insert("user", keys, vectors)
        with create_store(url, namespace, dims, timeout_ms=3000) as store:
            found, out = fetch(store, "user", keys)
            assert found.all()
            assert_same_bits(out, vectors)


def test_a_late_request_concerns_itself(tmp_path: Path) -> None:
    """Large answers never come, small ones do: requests for few rows are still answered from Redis."""
    stalled = threading.Event()

    def delay(data: bytes, is_answer: bool) -> None:
        time.sleep(3.0 if is_answer and len(data) >= LARGE_BYTES and stalled.is_set() else 0.0)

    with (
        RedisServer() as server,
        Proxy(server.port, delay) as network,
        opened(tmp_path, server, network.port, store_timeout_ms=1000) as session,
    ):
        expected = session.lookup("user_weight", EVERY)
        stalled.set()
        for _ in range(4):
            np.testing.assert_array_equal(session.lookup("user_weight", EVERY), expected)  # from the RocksDB
            np.testing.assert_array_equal(session.lookup("user_weight", EVERY[:2]), expected[:2])
        tier = session.stats()["tiers"]["volatile"]
        assert tier["failures"] >= 4
        assert tier["outages"] == 0
        assert tier["hits"] >= 50 + 4 * 2


def test_a_redis_that_has_missed_many_updates_comes_back(tmp_path: Path) -> None:
    """Rows missed while it hung are dropped in pieces, during further updates; then it answers the newest rows."""
    with RedisServer() as server, opened(tmp_path, server, server.port, store_timeout_ms=500) as session:
        session.lookup("user_weight", EVERY)
        server.send_signal(signal.SIGSTOP)
        newest = np.zeros((50, 4), np.float32)
        for value in range(200):
            newest[:] = value
            session.update("user_weight", EVERY, newest)
        assert session.stats()["tiers"]["volatile"]["failure"] is not None
        session.update("user_weight", np.arange(50, 30_000), np.zeros((29_950, 4), np.float32))
        server.send_signal(signal.SIGCONT)

        def is_back() -> bool:
            newest[:] += 1
            session.update("user_weight", EVERY, newest)
            np.testing.assert_array_equal(session.lookup("user_weight", EVERY), newest)
            return session.stats()["tiers"]["volatile"]["failure"] is None

        wait_until(is_back, "Redis to be used again")
        hits = session.stats()["tiers"]["volatile"]["hits"]
        session.update("user_weight", EVERY, newest)
        np.testing.assert_array_equal(session.lookup("user_weight", EVERY), newest)
        assert session.stats()["tiers"]["volatile"]["hits"] > hits


def hold_back(held: threading.Event, let_go: threading.Event, data: bytes, is_answer: bool) -> None:
    """Once `held` is set, pass large pieces of commands on only after `let_go`."""
    if held.is_set() and len(data) >= LARGE_BYTES and not is_answer:
        assert let_go.wait(PATIENCE_S)


def test_a_late_write_never_follows_a_newer_one() -> None:
    """The network held the older one back, and passed it on after its sender had given it up and written again."""
    held, let_go = threading.Event(), threading.Event()
    keys, namespace, dims = np.arange(3), Namespace("late", "1"), {"user": 256}
    rows = [np.full((3, 256), value, np.float32) for value in range(3)]
    with (
        RedisServer() as server,
        Proxy(server.port, partial(hold_back, held, let_go)) as network,
        server.client() as client,
        create_store(server.url + "?partitions=1", namespace, dims) as other,
        create_store(f"redis://127.0.0.1:{network.port}?partitions=1", namespace, dims, timeout_ms=3000) as store,
    ):
        store.insert("user", keys, rows[0])
        held.set()
        for write in (store.insert, store.insert_absent):
            with pytest.raises(LateError):
                write("user", keys, rows[1])
        store.erase("user", keys[2:])
        other.insert("user", keys[:2], rows[2][:2])
        let_go.set()
        wait_until(lambda: len(client.client_list()) <= 3, "the late connections to be gone")
        found, out = fetch(other, "user", keys)

    assert found.tolist() == [True, True, False]
    assert_same_bits(out[:2], rows[2][:2])


def test_a_write_that_ended_with_its_server_takes_nobody_elses_connection() -> None:
    """A server that was started again counts connections from 1: a number of before may be that of another client."""
    namespace, dims = Namespace("restarted", "1"), {"user": 256}
    keys, rows = np.arange(3), np.ones((3, 256), np.float32)
    held, let_go = threading.Event(), threading.Event()
    with (
        RedisServer() as server,
        Proxy(server.port, partial(hold_back, held, let_go)) as network,
        create_store(f"redis://127.0.0.1:{network.port}?partitions=1", namespace, dims, timeout_ms=3000) as store,
    ):
        store.insert("user", keys, rows)
        held.set()
        with pytest.raises(LateError):
            store.insert("user", keys, rows)
        server.stop()
        held.clear()
        let_go.set()
        server.start()
        with contextlib.ExitStack() as stack:
            others = [stack.enter_context(server.client(single_connection_client=True)) for _ in range(30)]
            numbers = [other.client_id() for other in others]
            store.insert("user", keys, rows)
            assert [other.client_id() for other in others] == numbers


def test_late_writes_are_not_forgotten_while_the_server_is_busy() -> None:
    """It answers that it drops no connection now, so another one may not be used for newer writes yet."""
    with RedisServer() as server, server.client() as client, server.client() as script:
        client.config_set("lua-time-limit", 10)
        login, address = Login.of(StoreUrl.parse(server.url)), ("127.0.0.1", server.port)
        first, second = (RedisConnection(login, address, Deadline(PATIENCE_MS)) for _ in range(2))
        with contextlib.closing(first), contextlib.closing(second), ThreadPoolExecutor(1) as pool:
            first.expect_writes(Deadline(PATIENCE_MS))
            second.run_id(Deadline(PATIENCE_MS))
            assert first.writer is not None
            running = pool.submit(script.eval, "while true do end", 0)
            wait_until(lambda: _is_busy(client), "the script to run")
            with pytest.raises(UnavailableError, match="BUSY"):
                second.withdraw([first.writer], Deadline(PATIENCE_MS))
            with pytest.raises(UnavailableError, match="BUSY"):
                second.expect_writes(Deadline(PATIENCE_MS))
            assert second.writer is None
            client.script_kill()
            assert running.exception() is not None
            second.withdraw([first.writer], Deadline(PATIENCE_MS))
            with pytest.raises(DisconnectedError):
                first.call([("PING",)], Deadline(PATIENCE_MS))


def _is_busy(client: redis.Redis) -> bool:
    try:
        client.get("key")
    except redis.ResponseError as error:
        return "BUSY" in str(error)
    return False
