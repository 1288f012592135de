"""A real Redis that dies, hangs and comes back under load, over a RocksDB: no wrong answer, no error, and no loss."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from inference_session import InferenceSession
from inference_session.errors import StoreError
from tests.testing import small_model
from tests.testing.servers import RedisServer, wait_until
from tests.testing.stored_model import push

NUM_CLIENTS = 4
PAUSE_S = 0.01
"""Of a client, between two requests, so that waiting for an outage costs little processor time."""

Damage = Callable[[RedisServer], None]


class Load:
    """Clients that ask one request after the other, and compare every answer."""

    def __init__(self, session: InferenceSession, tables: small_model.Arrays) -> None:
        self._session = session
        self._tables = tables
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(seed,)) for seed in range(NUM_CLIENTS)]
        self.faults: list[BaseException] = []
        self.num_answers = 0

    def _ask(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not self._ending.is_set():
            inputs = small_model.random_inputs(int(rng.integers(1, 30)), rng)
            try:
                answer = self._session.run(inputs)
                for name, expected in small_model.expected(self._tables, inputs).items():
                    np.testing.assert_allclose(answer[name], expected, atol=1e-5, rtol=1e-5)
            except Exception as error:  # noqa: BLE001  reported by the test's own thread
                self.faults.append(error)
            self.num_answers += 1
            self._ending.wait(PAUSE_S)

    def pass_on(self, num_answers: int = 200) -> None:
        """Wait until the clients have this many more answers."""
        goal = self.num_answers + num_answers
        wait_until(lambda: self.num_answers >= goal, f"{num_answers} answers")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._ending.set()
            for thread in self._threads:
                thread.join()


def kill(server: RedisServer) -> None:
    server.stop(signal.SIGKILL)


def start_empty(server: RedisServer) -> None:
    server.start()


def hang(server: RedisServer) -> None:
    server.send_signal(signal.SIGSTOP)


def resume(server: RedisServer) -> None:
    server.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("cache_bytes", [0, 2000], ids=["no cache", "tiny cache"])
@pytest.mark.parametrize(
    ("damage", "repair"), [(kill, start_empty), (hang, resume)], ids=["killed, back empty", "stopped, continued"]
)
def test_no_answer_is_wrong_while_redis_is_away(
    tmp_path: Path, damage: Damage, repair: Damage, cache_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Under load Redis goes and comes back twice: every answer is right, and Redis is used again after."""
    directory = tmp_path / "repository" / "small" / "1"
    tables = small_model.write(directory)
    database = f"rocksdb://{tmp_path}/db"
    caplog.set_level(logging.INFO, "inference_session.parameter_server")
    with RedisServer() as server:
        push(directory, database)
        push(directory, server.url)
        (directory / "tables").rename(tmp_path / "tables")
        with InferenceSession.open(
            directory,
            volatile_store=server.url,
            persistent_store=database,
            cache_bytes=cache_bytes,
            store_timeout_ms=300,
        ) as session:
            load = Load(session, tables)

            def tier_is_up() -> bool:
                return session.stats()["tiers"]["volatile"]["failure"] is None

            with load.running():
                for _ in range(2):
                    load.pass_on()
                    damage(server)
                    wait_until(lambda: not tier_is_up(), "the outage to be noticed")
                    load.pass_on()
                    repair(server)
                    wait_until(tier_is_up, "the tier to recover")
                    found = session.stats()["tiers"]["volatile"]["hits"]
                    wait_until(
                        lambda found=found: session.stats()["tiers"]["volatile"]["hits"] > found,  # type: ignore[misc]
                        "Redis to have rows again",
                    )

    assert not load.faults, load.faults[0]
    # Once a change of state, not once a request; a busy machine may add outages to the two, the last one at the end.
    said = [record.message for record in caplog.records if record.message.startswith("tier volatile")]
    num_lost, num_back = (sum(what in message for message in said) for what in ("failed", "answers again"))
    assert 2 <= num_back <= num_lost <= num_back + 1, said


def test_a_redis_that_refuses_every_read_is_out(tmp_path: Path) -> None:
    """Although it answers PING: else its users would not learn why they get default vectors."""
    directory = tmp_path / "repository" / "small" / "1"
    tables = small_model.write(directory)
    with RedisServer() as server, server.client() as client:
        push(directory, server.url)
        (directory / "tables").rename(tmp_path / "tables")

        def allow(*rules: str) -> None:
            client.execute_command("ACL", "SETUSER", "reader", "on", ">word", "~*", "+@all", *rules)

        allow()
        url = server.url.replace("redis://", "redis://reader:word@")
        with InferenceSession.open(directory, volatile_store=url, cache_bytes=0) as session:

            def failure() -> str:
                return session.stats()["tiers"]["volatile"]["failure"] or ""

            def is_answered() -> bool:
                found = session.lookup("user.weight", [1])
                return bool((found == tables["user_weight"][1]).all())

            assert is_answered()
            allow("-hmget")
            assert not is_answered()
            wait_until(lambda: "NOPERM" in failure(), "the refusal to be told")
            assert session.stats()["degraded_keys"]
            allow()
            wait_until(lambda: not failure(), "the tier to recover")
            assert is_answered()
        allow("-hmget")
        with pytest.raises(StoreError, match="NOPERM"):
            InferenceSession.open(directory, volatile_store=url)
