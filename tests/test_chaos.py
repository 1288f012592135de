"""Stores that crash, hang, fail over, fill up or come back with old rows during reads and writes.

Each row of one table holds its own version number. Writers count it up, readers check that an answer is
no older than the last update that had returned before the request, and no newer than the last that has begun.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import redis
from numpy.typing import NDArray

from inference_session import InferenceSession
from inference_session.errors import UnavailableError
from inference_session.parameter_server import upkeep as upkeep_module
from inference_session.parameter_server.create import create_store
from inference_session.parameter_server.namespace import Namespace
from tests.testing import small_model
from tests.testing.proxy import Network, Proxy
from tests.testing.servers import PATIENCE_MS, RedisClusterServers, RedisServer, free_port, wait_until
from tests.testing.stored_model import DIMS, push

pytestmark = pytest.mark.slow

NUM_ROWS, NUM_READERS = 50, 3
PAUSE_S = 0.02
"""Between two reads, or writes, of a thread, so that waiting for a fail-over costs little processor time."""
EVERY = np.arange(NUM_ROWS)


@contextlib.contextmanager
def opened(tmp_path: Path, url: str, *, keep_files: bool = False, **settings: object) -> Iterator[InferenceSession]:
    """The small model over a Redis and a RocksDB that have its rows, its files gone unless they are to be kept."""
    directory = tmp_path / "repository" / "small" / "1"
    small_model.write(directory)
    database = f"rocksdb://{tmp_path}/db"
    push(directory, database)
    push(directory, url)
    if not keep_files:
        shutil.rmtree(directory / "tables")
    stores = {"volatile_store": url, "persistent_store": database}
    with InferenceSession.open(directory, **stores, **{"store_timeout_ms": 400, **settings}) as session:
        yield session


class WrittenRows:
    """Readers and a writer of `user_weight`."""

    def __init__(self, session: InferenceSession) -> None:
        self._session = session
        self._begun, self._done = np.zeros(NUM_ROWS), np.zeros(NUM_ROWS)
        self._ending = threading.Event()
        self.faults: list[BaseException] = []
        self.num_reads = self.num_writes = 0
        self.write(EVERY)

    def write(self, keys: NDArray[np.int64]) -> None:
        """Count rows up."""
        self._begun[keys] += 1
        vectors = np.repeat(self._begun[keys].astype(np.float32), 4).reshape(-1, 4)
        self._session.update("user_weight", keys, vectors)
        self._done[keys] = self._begun[keys]
        self.num_writes += 1

    def read(self, keys: NDArray[np.int64]) -> None:
        """Compare rows."""
        oldest = self._done[keys]
        vectors = self._session.lookup("user_weight", keys)
        assert (vectors == vectors[:, :1]).all(), "a row of two updates"
        assert (vectors[:, 0] >= oldest).all(), "a row older than its last update"
        assert (vectors[:, 0] <= self._begun[keys]).all(), "a row of no update"
        self.num_reads += 1

    def assert_settled(self) -> None:
        """Every row is its last one, in each of the stores that has it."""
        self.read(EVERY)
        server = self._session.rows.server  # type: ignore[attr-defined]
        for tier in server.tiers:
            vectors = np.empty((NUM_ROWS, 4), np.float32)
            found = tier.store.fetch("user_weight", EVERY, vectors)
            assert (vectors[found, 0] == self._done[found]).all(), f"old rows in {tier.store!r}"
            assert tier.volatile or found.all()

    def pass_on(self, count: int = 30) -> None:
        """Wait until this many more reads and writes have happened."""
        reads, writes = self.num_reads + 4 * count, self.num_writes + count
        wait_until(lambda: self.num_reads >= reads and self.num_writes >= writes, "reads and writes")

    @contextlib.contextmanager
    def under_load(self) -> Iterator[None]:
        works = [self.write, *[self.read] * NUM_READERS]
        threads = [threading.Thread(target=self._repeat, args=(work, seed)) for seed, work in enumerate(works)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ending.set()
            for thread in threads:
                thread.join()
        assert not self.faults, self.faults[0]

    def _repeat(self, work: Callable[[NDArray[np.int64]], None], seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            while not self._ending.is_set() and not self.faults:
                work(rng.choice(NUM_ROWS, 8, replace=False))
                self._ending.wait(PAUSE_S)
        except BaseException as error:  # noqa: BLE001  raised in the test's own thread
            self.faults.append(error)


def is_up(session: InferenceSession) -> bool:
    return session.stats()["tiers"]["volatile"]["failure"] is None


def hits(session: InferenceSession) -> int:
    return session.stats()["tiers"]["volatile"]["hits"]


def outages(session: InferenceSession) -> int:
    return session.stats()["tiers"]["volatile"]["outages"]


def wait_for_redis(session: InferenceSession) -> None:
    wait_until(lambda: is_up(session), "Redis to be used again")
    before = hits(session)
    wait_until(lambda: hits(session) > before, "Redis to have rows again")


@pytest.mark.parametrize(
    ("number", "cache_bytes"), [(signal.SIGKILL, 2000), (signal.SIGSTOP, 0)], ids=["killed, cache", "stopped, no cache"]
)
def test_a_cluster_fails_over_while_it_is_written(tmp_path: Path, number: signal.Signals, cache_bytes: int) -> None:
    """Masters go and their replicas take over: no answer is old, none is an error, and no old row stays."""
    with (
        RedisClusterServers(node_timeout_ms=6000) as cluster,  # so that a slow machine notices the outage
        opened(tmp_path, cluster.url, cache_bytes=cache_bytes) as session,
    ):
        rows = WrittenRows(session)
        with rows.under_load():
            for master in cluster.masters[:2]:
                rows.pass_on()
                before = outages(session)
                master.send_signal(number)
                wait_until(lambda before=before: outages(session) > before, "the outage to be noticed")  # type: ignore[misc]
                rows.pass_on()
                wait_for_redis(session)
                master.send_signal(signal.SIGCONT) if number == signal.SIGSTOP else None
                rows.pass_on()
        rows.assert_settled()


def test_a_redis_comes_back_with_an_old_snapshot(tmp_path: Path) -> None:
    """Its old rows are not answered: rows written since are dropped from it first."""
    with RedisServer() as server, opened(tmp_path, server.url, cache_bytes=2000) as session:
        rows = WrittenRows(session)
        with rows.under_load():
            rows.pass_on()
            with server.client() as client:
                client.save()
            rows.pass_on()
            server.stop(signal.SIGKILL)
            wait_until(lambda: not is_up(session), "the outage to be noticed")
            rows.pass_on()
            server.start()
            wait_for_redis(session)
            rows.pass_on()
        rows.assert_settled()


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20], ids=["no cache", "all cached"])
def test_an_old_snapshot_is_not_believed(tmp_path: Path, cache_bytes: int) -> None:
    """No request came while Redis was restarted from it, right after the first writes: soon the rows written since are
    answered anyway.
    """
    with RedisServer() as server, opened(tmp_path, server.url, cache_bytes=cache_bytes) as session:
        rows = WrittenRows(session)
        with server.client() as client:
            client.save()
        rows.write(EVERY[:40])
        server.stop(signal.SIGKILL)
        server.start()

        wait_until(lambda: outages(session) > 0 and is_up(session), "the loss to be noticed")
        assert (session.lookup("user_weight", EVERY[:40])[:, 0] == 2).all()

        rows.assert_settled()


def test_a_redis_is_full(tmp_path: Path) -> None:
    """Rows that it refuses are answered from the tier below; its older ones are not answered."""
    with RedisServer() as server, opened(tmp_path, server.url, cache_bytes=0) as session, server.client() as client:
        rows = WrittenRows(session)
        with rows.under_load():
            rows.pass_on()
            before = outages(session)
            client.config_set("maxmemory", "1")
            wait_until(lambda: outages(session) > before + 1, "Redis to refuse rows")
            rows.pass_on()
            client.config_set("maxmemory", "0")
            wait_for_redis(session)
            rows.pass_on()
        rows.assert_settled()


def test_a_redis_becomes_read_only(tmp_path: Path) -> None:
    """A master that is made a replica of another answers nothing until it can be written to again."""
    with RedisServer() as other, RedisServer() as server, opened(tmp_path, server.url, cache_bytes=0) as session:
        rows = WrittenRows(session)
        with rows.under_load(), server.client() as client:
            rows.pass_on()
            before = outages(session)
            client.replicaof("127.0.0.1", other.port)
            wait_until(lambda: outages(session) > before, "Redis to refuse rows")
            rows.pass_on()
            client.replicaof("NO", "ONE")
            wait_for_redis(session)
            rows.pass_on()
        rows.assert_settled()


def test_the_only_redis_is_read_while_it_takes_no_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Full, then read-only: updates are errors, and answers stay as they are, deletions of rows of files included."""
    directory = tmp_path / "repository" / "small" / "1"
    small_model.write(directory)
    with RedisServer() as server, server.client() as client:
        stores = {"volatile_store": server.url, "store_timeout_ms": PATIENCE_MS}
        with InferenceSession.open(directory, cache_bytes=0, **stores) as session:
            session.update("user_weight", EVERY, np.ones((NUM_ROWS, 4), np.float32))
            session.erase("user_weight", EVERY[:5])
            expected = session.lookup("user_weight", EVERY)
            for change, error in (
                (lambda: client.config_set("maxmemory", "1"), "OOM"),
                (lambda: client.replicaof("127.0.0.1", free_port()), "READONLY"),
            ):
                change()
                for _ in range(3):
                    with pytest.raises(UnavailableError, match=error):
                        session.update("user_weight", EVERY, np.zeros((NUM_ROWS, 4), np.float32))
                    np.testing.assert_array_equal(session.lookup("user_weight", EVERY), expected)
                client.config_set("maxmemory", "0")
            assert outages(session) == 0
    assert len([text for text in caplog.messages if "failed: " in text and "OOM" in text]) == 1


@pytest.mark.parametrize("is_promoted", [False, True], ids=["stays a replica", "becomes a master again"])
def test_a_redis_takes_over_the_rows_of_another(tmp_path: Path, is_promoted: bool) -> None:
    """Its process and connections stay, but its rows are older, as after a backup is loaded into it in this way."""
    with RedisServer() as other, RedisServer() as server, opened(tmp_path, server.url, cache_bytes=0) as session:
        with other.client() as backup, server.client() as client:
            _replicate(backup, server)
            backup.replicaof("NO", "ONE")
            rows = WrittenRows(session)
            before = outages(session)
            _replicate(client, other)
            if is_promoted:
                client.replicaof("NO", "ONE")
        wait_until(lambda: outages(session) > before, "the loss to be noticed")
        rows.read(EVERY)
        if is_promoted:
            wait_until(lambda: is_up(session), "Redis to be used again")
            rows.assert_settled()


def _replicate(client: redis.Redis, master: RedisServer) -> None:
    client.replicaof("127.0.0.1", master.port)
    wait_until(lambda: client.info("replication").get("master_link_status") == "up", "the rows to be copied")


def test_a_rocksdb_is_damaged(tmp_path: Path) -> None:
    """Rows that Redis has are still answered; rows that only the damaged files have are UNAVAILABLE."""
    settings = {"cache_bytes": 0, "on_store_failure": "error", "store_timeout_ms": PATIENCE_MS}
    with RedisServer() as server, opened(tmp_path, server.url, **settings) as session:
        expected = session.lookup("code", [0, 1])
        for file in (tmp_path / "db").glob("*.sst"):
            content = bytearray(file.read_bytes())
            content[: len(content) // 2] = bytes(len(content) // 2)
            file.write_bytes(content)

        np.testing.assert_array_equal(session.lookup("code", [0, 1]), expected)
        with server.client() as client:
            client.flushall()
        with pytest.raises(UnavailableError, match="cannot be fetched while a store is unavailable"):
            session.lookup("code", [0, 1, 30])
        assert session.stats()["tiers"]["persistent"]["failures"] > 0
        assert is_up(session)


@pytest.mark.parametrize("is_writer", [False, True])
def test_a_rocksdb_is_gone_while_rows_are_updated(tmp_path: Path, is_writer: bool) -> None:
    """The updates are refused. Rows that are cached, or in Redis, are answered as before, and all once it is back."""
    with RedisServer() as server, opened(tmp_path, server.url, cache_bytes=2000) as session:
        if is_writer:
            session.update("code", [0], session.lookup("code", [0]))
        expected = session.lookup("code", np.arange(4))
        (tmp_path / "db").rename(tmp_path / "away")
        wait_until(lambda: session.stats()["tiers"]["persistent"]["failure"] is not None, "the loss to be noticed")
        for key in (1, 2):
            with pytest.raises(UnavailableError, match="does not exist any more"):
                session.update("code", [key], np.ones((1, 3), np.float32))
        np.testing.assert_array_equal(session.lookup("code", np.arange(4)), expected)
        (tmp_path / "away").rename(tmp_path / "db")
        session.update("code", [1], np.ones((1, 3), np.float32))
        np.testing.assert_array_equal(session.lookup("code", [1]), [[1, 1, 1]])


def test_a_rocksdb_has_another_writer(tmp_path: Path) -> None:
    """Updates wait for their turn with an error that says so; answers stay as they are in every tier."""
    with RedisServer() as server, opened(tmp_path, server.url, cache_bytes=2000) as session:
        with create_store(f"rocksdb://{tmp_path}/db", Namespace("other", "1"), DIMS, writable=True):
            before = session.lookup("code", [3])
            with pytest.raises(UnavailableError, match="being written by another store of this process"):
                session.update("code", [3], np.ones((1, 3), np.float32))
            np.testing.assert_array_equal(session.lookup("code", [3]), before)

        session.update("code", [3], np.ones((1, 3), np.float32))

        np.testing.assert_array_equal(session.lookup("code", [3]), [[1, 1, 1]])


def test_a_redis_that_came_back_older_is_never_believed(tmp_path: Path) -> None:
    """Not even by the first look-up afterwards, with or without look-ups meanwhile."""
    with RedisServer() as server, opened(tmp_path, server.url, cache_bytes=0) as session:
        rows = WrittenRows(session)
        with server.client() as client:
            client.save()
        for _ in range(5):
            rows.write(EVERY)
            server.stop(signal.SIGKILL)
            server.start()
            rows.read(EVERY)
        wait_until(lambda: is_up(session), "Redis to be used again")
        rows.assert_settled()


@pytest.mark.parametrize("keep_files", [True, False])
@pytest.mark.parametrize("is_written_meanwhile", [True, False])
def test_the_next_session_knows_what_redis_misses(tmp_path: Path, is_written_meanwhile: bool, keep_files: bool) -> None:
    """Redis came back from an old snapshot, or missed writes, and the session that knew it has ended."""
    with RedisServer() as server:
        settings = {"volatile_store": server.url, "persistent_store": f"rocksdb://{tmp_path}/db", "cache_bytes": 0}
        with (
            opened(tmp_path, server.url, keep_files=keep_files, cache_bytes=0) as session,
            server.client() as client,
        ):
            rows = WrittenRows(session)
            client.save()
            rows.write(EVERY)
            if is_written_meanwhile:
                client.replicaof("127.0.0.1", 1)
                rows.write(EVERY)
        if is_written_meanwhile:
            with server.client() as client:
                client.replicaof("NO", "ONE")
        else:
            server.stop(signal.SIGKILL)
            server.start()

        with InferenceSession.open(tmp_path / "repository" / "small" / "1", **settings) as session:
            expected = 3 if is_written_meanwhile else 2
            assert (session.lookup("user_weight", EVERY)[:, 0] == expected).all()
            session.update("user_weight", [0], np.full((1, 4), 9, np.float32))
            wait_until(lambda: is_up(session), "Redis to be used again")
            assert (session.lookup("user_weight", EVERY)[1:, 0] == expected).all()


def test_a_redis_that_was_away_from_the_beginning_is_used_once_it_is_there(tmp_path: Path) -> None:
    """Redis lacks all writes so far, and the session does not know which server process it was."""
    with RedisServer() as server:
        settings = {"volatile_store": server.url, "persistent_store": f"rocksdb://{tmp_path}/db", "cache_bytes": 0}
        with opened(tmp_path, server.url):
            server.stop()
        with InferenceSession.open(tmp_path / "repository" / "small" / "1", **settings) as session:
            rows = WrittenRows(session)
            server.start()
            wait_until(lambda: is_up(session), "Redis to be used")
            rows.assert_settled()


def test_two_sessions_in_a_row_miss_writes(tmp_path: Path) -> None:
    """Redis was down for both. It is used once the rows that either of them wrote are dropped from it."""
    with RedisServer() as server:
        settings = {"volatile_store": server.url, "persistent_store": f"rocksdb://{tmp_path}/db", "cache_bytes": 0}
        directory = tmp_path / "repository" / "small" / "1"
        with opened(tmp_path, server.url), server.client() as client:
            client.save()
        server.stop(signal.SIGKILL)
        for keys in (EVERY[:25], EVERY[25:]):
            with InferenceSession.open(directory, **settings) as session:
                session.update("user_weight", keys, np.full((25, 4), 7, np.float32))
                if keys[0]:
                    server.start()
                    wait_until(lambda session=session: is_up(session), "Redis to be used")  # type: ignore[misc]
                    assert (session.lookup("user_weight", EVERY) == 7).all()


def test_a_refresh_sees_what_redis_misses(tmp_path: Path) -> None:
    """Only the writer's way to Redis is cut: another process, which reaches it, answers the newer rows at once."""
    with RedisServer() as server, Proxy(server.port) as network, opened(tmp_path, server.url, cache_bytes=0) as reading:
        settings = {
            "volatile_store": f"redis://127.0.0.1:{network.port}",
            "persistent_store": f"rocksdb://{tmp_path}/db",
        }
        with InferenceSession.open(tmp_path / "repository" / "small" / "1", **settings) as writing:
            rows = WrittenRows(writing)
            reading.refresh()
            assert (reading.lookup("user_weight", EVERY) == 1).all()
            network.set(Network.CUT)
            rows.write(EVERY)
            reading.refresh()
            assert (reading.lookup("user_weight", EVERY) == 2).all()


def test_a_new_writer_does_not_vouch_for_what_redis_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes before it has seen that the previous writer could not reach Redis; then another session is opened."""
    with RedisServer() as server, Proxy(server.port) as network:
        directory, database = tmp_path / "repository" / "small" / "1", f"rocksdb://{tmp_path}/db"
        stores = {"volatile_store": server.url, "persistent_store": database, "cache_bytes": 0}
        with opened(tmp_path, server.url) as session:
            WrittenRows(session)
        monkeypatch.setattr(upkeep_module, "ROUND_INTERVAL_S", 1000.0)
        with InferenceSession.open(directory, **stores) as next_writer:
            server.stop()
            server.start()
            next_writer.lookup("user_weight", EVERY)
            wait_until(lambda: next_writer.refresh() or is_up(next_writer), "Redis to be used again")  # type: ignore[func-returns-value]

            def has_promoted() -> bool:
                next_writer.lookup("user_weight", EVERY)  # what an earlier look-up found may have been refused
                return bool(next_writer.stats()["tiers"]["volatile"]["promoted"])

            wait_until(has_promoted, "promoted rows")
            cut_off = stores | {"volatile_store": f"redis://127.0.0.1:{network.port}"}
            with InferenceSession.open(directory, **cut_off) as writer:
                network.set(Network.CUT)
                writer.update("user_weight", EVERY, np.full((NUM_ROWS, 4), 2, np.float32))
            next_writer.update("user_weight", [0], np.full((1, 4), 2, np.float32))
            with InferenceSession.open(directory, **stores) as session:
                assert (session.lookup("user_weight", EVERY) == 2).all()
