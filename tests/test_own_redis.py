"""Processes that share a RocksDB, each with a Redis of its own or none: none answers older rows than others wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from inference_session import InferenceSession
from tests.testing.servers import RedisServer, wait_until
from tests.testing.stored_model import url_of, write_stored

EVERY = np.arange(50)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The small model in a RocksDB."""
    return write_stored(tmp_path)[0]


@pytest.fixture
def own_redis() -> Iterator[str]:
    with RedisServer() as server:
        yield server.url


def open_session(directory: Path, volatile_store: str | None) -> InferenceSession:
    return InferenceSession.open(
        directory, volatile_store=volatile_store, persistent_store=url_of(directory), cache_bytes=0
    )


def write(session: InferenceSession, value: float) -> None:
    session.update("user_weight", EVERY, np.full((50, 4), value, np.float32))


@pytest.mark.parametrize("other_has_redis", [True, False], ids=["with its own Redis", "without a Redis"])
def test_what_others_wrote_meanwhile_is_answered_after_a_restart(
    directory: Path, own_redis: str, other_has_redis: bool
) -> None:
    """The Redis was up all the time, and has the rows of before."""
    with open_session(directory, own_redis) as session:
        write(session, 1)
    with RedisServer() as other, open_session(directory, other.url if other_has_redis else None) as session:
        write(session, 2)

    with open_session(directory, own_redis) as session:
        assert (session.lookup("user_weight", EVERY) == 2).all()
        session.update("user_weight", [0], np.full((1, 4), 3, np.float32))
        wait_until(lambda: session.stats()["tiers"]["volatile"]["failure"] is None, "Redis to be used again")
        assert (session.lookup("user_weight", EVERY)[1:] == 2).all()


def test_what_a_process_without_redis_writes_reaches_others(
    directory: Path, own_redis: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A session that is open meanwhile does not go on answering what its Redis has, however often the other writes."""
    with open_session(directory, own_redis) as session:
        write(session, 1)
    with open_session(directory, own_redis) as reading, open_session(directory, None) as writing:
        for value in (2.0, 3.0):
            assert (reading.lookup("user_weight", EVERY) == value - 1).all()
            write(writing, value)
            wait_until(lambda value=value: is_answered(reading, value), "the rows of the other session")  # type: ignore[misc]
        why = "another process wrote rows to the tier below and not to this one"
        wait_until(lambda: why in str(reading.stats()["tiers"]["volatile"]["failure"]), "the reason in the statistics")
        wait_until(lambda: why in caplog.text, "the log")
        assert caplog.text.count(why) == 1


def is_answered(session: InferenceSession, value: float) -> bool:
    return bool((session.lookup("user_weight", EVERY) == value).all())
