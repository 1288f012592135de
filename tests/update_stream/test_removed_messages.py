"""Messages that brokers remove before they are applied: it is said and counted, and all that are left are applied."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference_session import InferenceSession
from inference_session.update_stream import followed_partitions
from inference_session.update_stream.encodings import encode_batch
from inference_session.update_stream.kafka_client import create_client
from tests.testing.broker import ForgetfulBroker
from tests.testing.servers import wait_until
from tests.testing.small_version import SmallVersion
from tests.testing.stored_model import push
from tests.testing.streamed_rows import await_rows

NUM_FIRST, NUM_LATER = 3, 30
"""Messages that are applied, and those that then come, of which the broker keeps about ten."""
_FILLER = 49
"""The key of most rows of a message."""


@pytest.fixture(params=["ids", "no_ids"])
def with_ids(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the broker tells the ids of topics."""
    is_given = bool(request.param == "ids")
    monkeypatch.setattr(
        followed_partitions, "topic_ids", lambda _, topics, __: dict.fromkeys(topics, "id" if is_given else "")
    )
    return is_given


@pytest.fixture
def broker() -> Iterator[ForgetfulBroker]:
    with ForgetfulBroker() as broker:
        yield broker


@pytest.fixture
def database(small: SmallVersion, tmp_path: Path) -> str:
    """A RocksDB with the small model's rows."""
    url = f"rocksdb://{tmp_path}/db"
    push(small.directory, url)
    return url


def serving(small: SmallVersion, database: str, broker: ForgetfulBroker) -> InferenceSession:
    settings = {"persistent_store": database, "update_stream": broker.url}
    return InferenceSession.open(small.directory, **settings, cache_bytes=0)


def send(broker: ForgetfulBroker, small: SmallVersion, key: int) -> None:
    """Publish the row [100 + key, …] of a key in half a megabyte."""
    keys = np.full(20_000, _FILLER, np.int64)
    keys[0] = key
    vectors = np.repeat(100 + keys.astype(np.float32)[:, None], 4, 1)
    broker.send(small.topic("user_weight"), encode_batch(keys, vectors))


def updates(session: InferenceSession) -> dict[str, Any]:
    return session.stats()["updates"]


def await_key(session: InferenceSession, key: int) -> None:
    await_rows(session, "user.weight", [key], 100 + key)
    wait_until(lambda: updates(session)["lag_messages"] == 0, "all to be applied")


def assert_left_are_applied(
    session: InferenceSession, small: SmallVersion, broker: ForgetfulBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows of messages that are left are new, those of removed ones are old, and these are counted."""
    oldest, num_sent = broker.oldest(small.topic("user_weight")), NUM_FIRST + NUM_LATER
    assert NUM_FIRST < oldest < num_sent
    await_key(session, num_sent - 1)
    expected = np.repeat(100 + np.arange(num_sent, dtype=np.float32)[:, None], 4, 1)
    expected[NUM_FIRST:oldest] = small.tables["user_weight"][NUM_FIRST:oldest]
    np.testing.assert_array_equal(session.lookup("user.weight", np.arange(num_sent)), expected)
    assert updates(session)["missed_messages"] == oldest - NUM_FIRST
    told = [record.getMessage() for record in caplog.records if "were removed before" in record.getMessage()]
    assert [f"{NUM_FIRST} to {oldest - 1}" in text for text in told] == [True]


def test_while_nobody_serves(
    small: SmallVersion, database: str, broker: ForgetfulBroker, with_ids: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once: the next session goes on after the last message."""
    with serving(small, database, broker) as session:
        for key in range(NUM_FIRST):
            send(broker, small, key)
        await_key(session, NUM_FIRST - 1)
    for key in range(NUM_FIRST, NUM_FIRST + NUM_LATER):
        send(broker, small, key)
    with serving(small, database, broker) as session:
        assert_left_are_applied(session, small, broker, caplog)
        assert updates(session)["replays"] == (0 if with_ids else 1)
    with serving(small, database, broker) as session:
        await_key(session, NUM_FIRST + NUM_LATER - 1)
        assert (updates(session)["missed_messages"], updates(session)["replays"]) == (0, 0)


@pytest.mark.usefixtures("with_ids")
def test_while_updates_wait(
    small: SmallVersion,
    database: str,
    broker: ForgetfulBroker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The consumer, which reads little ahead, is told that its offset is no longer there."""
    monkeypatch.setattr(
        "inference_session.update_stream.kafka_stream.create_client",
        lambda kind, url, settings, *args: create_client(
            kind, url, {**settings, "queued.max.messages.kbytes": 1}, *args
        ),
    )
    with serving(small, database, broker) as session:
        for key in range(NUM_FIRST):
            send(broker, small, key)
        await_key(session, NUM_FIRST - 1)
        with session.upkeep.updates_held():
            for key in range(NUM_FIRST, NUM_FIRST + NUM_LATER):
                send(broker, small, key)
        await_key(session, NUM_FIRST + NUM_LATER - 1)
        topic = small.topic("user_weight")
        assert updates(session)["missed_messages"] >= broker.oldest(topic) - NUM_FIRST - 2
        assert any("were removed before" in record.getMessage() for record in caplog.records)


def test_when_all_that_were_removed_had_been_applied(
    small: SmallVersion, database: str, broker: ForgetfulBroker, with_ids: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is missed, although the last message that was applied is gone."""
    topic, num_sent = small.topic("user_weight"), NUM_FIRST
    with serving(small, database, broker) as session:
        for key in range(NUM_FIRST):
            send(broker, small, key)
        await_key(session, NUM_FIRST - 1)
    while broker.oldest(topic) < NUM_FIRST:
        send(broker, small, num_sent)
        num_sent += 1
    assert broker.oldest(topic) == NUM_FIRST
    with serving(small, database, broker) as session:
        await_key(session, num_sent - 1)
        np.testing.assert_array_equal(
            session.lookup("user.weight", np.arange(num_sent))[:, 0], 100 + np.arange(num_sent)
        )
        assert (updates(session)["missed_messages"], updates(session)["replays"]) == (0, 0 if with_ids else 1)
    assert not any("were removed before" in record.getMessage() for record in caplog.records)
