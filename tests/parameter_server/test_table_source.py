"""Rows in a store are those of one set of files: a version number that is used again is noticed."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference_session import InferenceSession
from inference_session.errors import ConfigurationError
from inference_session.parameter_server.table_source import push_note
from inference_session.update_stream.offset_notes import with_applied
from tests.testing import small_model
from tests.testing.servers import RedisServer, wait_until
from tests.testing.stored_model import push, url_of

REFUSED = r"holds rows of table 'user.weight' that came from other files than those of .*; publish these under a new"


EVERY = np.arange(50)


def rows_of(directory: Path, **settings: Any) -> np.ndarray:
    """What a session answers."""
    with InferenceSession.open(directory, **settings) as session:
        return session.lookup("user_weight", EVERY)


def ask(directory: Path, **settings: Any) -> None:
    """Let requests read rows, and wait until they are in the volatile store."""
    with InferenceSession.open(directory, **settings) as session:
        session.run(small_model.random_inputs(20, np.random.default_rng(0)))
        wait_until(lambda: session.stats()["tiers"]["volatile"]["promoted"] > 0, "promoted rows")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Version 2 of the small model."""
    small_model.write(tmp_path / "repository/small/2")
    return tmp_path / "repository/small/2"


def replace_files(directory: Path) -> None:
    """Remove a version, and publish other files under its number."""
    shutil.rmtree(directory)
    small_model.write(directory, seed=5)


def test_promoted_rows_of_a_removed_version_are_not_answered(directory: Path) -> None:
    """Nobody pushed them. The same files are accepted, and others under a number of their own."""
    with RedisServer() as redis:
        ask(directory, volatile_store=redis.url)
        InferenceSession.open(directory, volatile_store=redis.url).close()
        replace_files(directory)

        with pytest.raises(ConfigurationError, match=REFUSED):
            InferenceSession.open(directory, volatile_store=redis.url)
        ask(directory.rename(directory.with_name("3")), volatile_store=redis.url)


def test_pushed_rows_of_a_removed_version_are_not_answered(directory: Path) -> None:
    """Until those of the new files are pushed."""
    push(directory, url_of(directory))
    replace_files(directory)

    with pytest.raises(ConfigurationError, match=REFUSED):
        InferenceSession.open(directory, persistent_store=url_of(directory))
    push(directory, url_of(directory))
    InferenceSession.open(directory, persistent_store=url_of(directory)).close()


def test_a_redis_that_was_down_is_asked_later_whose_rows_it_has(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It has rows of a removed version. It is left out, with the reason, until they are gone."""
    with RedisServer("--appendonly", "yes") as redis:
        ask(directory, volatile_store=redis.url)
        before = rows_of(directory, volatile_store=redis.url)
        replace_files(directory)
        expected = rows_of(directory)
        assert not np.array_equal(before, expected)
        redis.stop()
        push(directory, url_of(directory))
        settings = {"volatile_store": redis.url, "persistent_store": url_of(directory), "cache_bytes": 0}
        with InferenceSession.open(directory, **settings) as session:
            redis.start()
            wait_until(lambda: "came from other files" in caplog.text, "the reason in the log")
            np.testing.assert_array_equal(session.lookup("user_weight", EVERY), expected)
            assert "came from other files" in str(session.stats()["tiers"]["volatile"]["failure"])
            with redis.client() as client:
                client.flushall()
            wait_until(lambda: session.stats()["tiers"]["volatile"]["failure"] is None, "Redis to be used")
            np.testing.assert_array_equal(session.lookup("user_weight", EVERY), expected)
        assert caplog.text.count("came from other files") == 1


def test_a_redis_that_was_started_again_during_an_outage_is_used_again(directory: Path) -> None:
    """It is another process than took the writes: it drops what it has of these rows, and is asked whose the others
    are.
    """
    push(directory, url_of(directory))
    with RedisServer() as redis:
        settings = {"volatile_store": redis.url, "persistent_store": url_of(directory), "cache_bytes": 0}
        with InferenceSession.open(directory, **settings) as session:
            for value in (1.0, 2.0, 3.0):
                session.update("user_weight", EVERY, np.full((50, 4), value, np.float32))
                if value == 1:
                    with redis.client() as client:
                        client.save()
                    redis.stop(signal.SIGKILL)
                elif value == 2:
                    assert session.stats()["tiers"]["volatile"]["failure"] is not None
                    redis.start()
                    wait_until(lambda: session.stats()["tiers"]["volatile"]["failure"] is None, "Redis to be used")
                assert (session.lookup("user_weight", EVERY) == value).all()
            with redis.client() as client:
                assert client.keys("hotrow_push*")


def test_a_redis_that_was_emptied_learns_again_whose_rows_it_gets(directory: Path) -> None:
    """Nobody notices that it is emptied while it answers; the rows promoted later are of the same files."""
    with RedisServer() as redis, redis.client() as client:
        with InferenceSession.open(directory, volatile_store=redis.url, cache_bytes=0) as session:
            num_notes = len(client.keys("hotrow_push*"))
            client.flushall()
            wait_until(lambda: len(client.keys("hotrow_push*")) == num_notes, "the notes")
            session.lookup("user_weight", EVERY)
        replace_files(directory)

        with pytest.raises(ConfigurationError, match=REFUSED):
            InferenceSession.open(directory, volatile_store=redis.url)


def test_a_user_who_may_only_read_rows_is_no_failure(directory: Path) -> None:
    """Notes are not for it, so any rows are accepted."""
    with RedisServer() as redis, redis.client() as client:
        push(directory, redis.url)
        allowed = "+hmget", "+hscan", "+select", "+ping"
        client.execute_command("ACL", "SETUSER", "reader", "on", ">word", "~hps_et*", *allowed)
        url = redis.url.replace("//", "//reader:word@")
        settings = {"cache_bytes": 0, "cache_missed_keys": False, "touch_rows": False}
        with InferenceSession.open(directory, volatile_store=url, **settings) as session:
            session.lookup("user_weight", EVERY)
            session.refresh()
            tier = session.stats()["tiers"]["volatile"]
    assert (tier["hits"] > 0, tier["failures"]) == (True, 0)


def test_rows_that_all_versions_share_may_come_from_any(directory: Path) -> None:
    """As those of HPS do."""
    with RedisServer() as redis:
        settings = {"volatile_store": redis.url, "store_namespace": "shared"}
        ask(directory, **settings)
        replace_files(directory)

        InferenceSession.open(directory, **settings).close()


def test_an_update_stream_keeps_the_note_of_the_files() -> None:
    """Its offsets are in the same note."""
    assert '"source": "abc"' in with_applied(push_note("abc", 5, 5), {("topic", 0): None})
