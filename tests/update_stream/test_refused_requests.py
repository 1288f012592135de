"""Brokers whose access lists refuse what an update stream asks: what is refused is named for as long as it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from confluent_kafka import KafkaError, TopicPartition

from inference_session import InferenceSession
from inference_session.errors import StoreError, UnavailableError
from inference_session.update_stream import Publisher, kafka_stream
from inference_session.update_stream.announcements import Announcements
from inference_session.urls.kafka_url import KafkaUrl
from tests.testing.refusing_broker import FETCH, FIND_COORDINATOR, LIST_OFFSETS, OFFSET_COMMIT, PRODUCE, RefusingBroker
from tests.testing.servers import PATIENCE_S, wait_until
from tests.testing.small_version import SmallVersion
from tests.testing.stored_model import push
from tests.testing.streamed_rows import await_rows, packed, vectors


def updates(session: InferenceSession) -> dict[str, Any]:
    found: dict[str, Any] = session.stats()["updates"]
    return found


def test_a_topic_that_may_not_be_read_is_named(small: SmallVersion, caplog: pytest.LogCaptureFixture) -> None:
    """Until it may be read, although the brokers answer all other questions; whether it has messages then or none."""
    with RefusingBroker() as broker:
        broker.send(small.topic("user_weight"), packed(1)[0], vectors(1).tobytes())
        broker.refuse(FETCH, KafkaError.TOPIC_AUTHORIZATION_FAILED)
        with InferenceSession.open(small.directory, update_stream=broker.url) as session:
            for other in (small.topic("hashed"), small.topic("code")):
                broker.refuse(FETCH, KafkaError.TOPIC_AUTHORIZATION_FAILED)
                wait_until(lambda: updates(session)["failure"] is not None, "the topic to be refused")
                broker.send(other, packed(1)[0], b"")
                wait_until(lambda other=other: other in updates(session)["topics"], "topics to be looked up")  # type: ignore[misc]
                assert re.match("topic .*, partition ., cannot be read: .*authorization", updates(session)["failure"])
                broker.allow(FETCH)
                wait_until(lambda: updates(session)["failure"] is None, "the topic to be read")
                await_rows(session, "user.weight", [1], 1)
    assert not [text for text in caplog.messages if "is waiting" in text]


def test_a_group_that_may_not_commit_is_no_failure(small: SmallVersion, caplog: pytest.LogCaptureFixture) -> None:
    """Offsets are committed for others to see: a warning says that they are not, and rows are applied."""
    with RefusingBroker() as broker:
        broker.send(small.topic("user_weight"), packed(1)[0], vectors(1).tobytes())
        broker.refuse(FIND_COORDINATOR, KafkaError.GROUP_AUTHORIZATION_FAILED)
        with InferenceSession.open(small.directory, update_stream=broker.url) as session:
            wait_until(lambda: any("Group authorization failed" in text for text in caplog.messages), "a warning")
            await_rows(session, "user.weight", [1], 1)
            assert updates(session)["failures"] == 0
    [told] = [text for text in caplog.messages if "Group authorization failed" in text]
    assert "commit" in told


def test_offsets_that_may_not_be_committed_are_no_failure(
    small: SmallVersion, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a store keeps the rows, offsets are committed: one warning says that they are not."""
    push(small.directory, database := f"rocksdb://{tmp_path}/db")
    with RefusingBroker() as broker:
        broker.send(small.topic("user_weight"), packed(1)[0], vectors(1).tobytes())
        broker.refuse(OFFSET_COMMIT, KafkaError.GROUP_AUTHORIZATION_FAILED)
        with InferenceSession.open(small.directory, persistent_store=database, update_stream=broker.url) as session:
            for value in (1, 2):
                broker.send(small.topic("user_weight"), packed(1)[0], vectors(value).tobytes())
                await_rows(session, "user.weight", [1], value)
                wait_until(lambda: any("offsets are not committed" in text for text in caplog.messages), "a warning")
            assert updates(session)["failures"] == 0
    [told] = [text for text in caplog.messages if "offsets are not committed" in text]
    assert "Group authorization failed" in told


def test_refused_commits_are_told_of_once(
    small: SmallVersion, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the group's coordinator may not be asked, or the offsets not be committed."""
    create: Any = kafka_stream.create_consumer
    refused: set[int] = set()

    def create_watched(*args: Any) -> Any:
        *others, on_commit = args

        def watched(error: KafkaError | None, partitions: list[TopicPartition]) -> None:
            on_commit(error, partitions)
            refused.update(each.code() for each in (error, *(one.error for one in partitions)) if each is not None)

        return create(*others, watched)

    monkeypatch.setattr(kafka_stream, "create_consumer", create_watched)
    push(small.directory, database := f"rocksdb://{tmp_path}/db")
    with RefusingBroker() as broker:
        broker.send(small.topic("user_weight"), packed(1)[0], vectors(1).tobytes())
        broker.refuse(FIND_COORDINATOR, KafkaError.GROUP_AUTHORIZATION_FAILED)
        with InferenceSession.open(small.directory, persistent_store=database, update_stream=broker.url) as session:
            wait_until(lambda: any("offsets are not committed" in text for text in caplog.messages), "a warning")
            broker.refuse(OFFSET_COMMIT, KafkaError.TOPIC_AUTHORIZATION_FAILED)
            broker.allow(FIND_COORDINATOR)
            broker.send(small.topic("user_weight"), packed(1)[0], vectors(2).tobytes())
            await_rows(session, "user.weight", [1], 2)
            wait_until(lambda: KafkaError.TOPIC_AUTHORIZATION_FAILED in refused, "a commit to be refused")
    assert sum("offsets are not committed" in text for text in caplog.messages) == 1


@pytest.mark.parametrize("kind", [FETCH, LIST_OFFSETS])
def test_announcements_that_may_not_be_read_are_named(kind: int) -> None:
    """The brokers answer, so that is not what the error says. Once they may be read, the last one counts."""
    with RefusingBroker() as broker, Announcements(KafkaUrl.parse(broker.url), "ctr") as announcements:
        broker.send(announcements.topic, b"version", b"3")
        broker.refuse(kind, KafkaError.TOPIC_AUTHORIZATION_FAILED)
        with pytest.raises(UnavailableError, match=r"'hotrow_versions.ctr' at .* cannot be read: .*authorization"):
            announcements.newest(PATIENCE_S)
        broker.allow(kind)
        wait_until(lambda: announcements.newest(0.1) == 3, "the announcement to be read")


def test_announcements_need_no_group() -> None:
    """Nothing is committed under its name."""
    with RefusingBroker() as broker, Announcements(KafkaUrl.parse(broker.url), "ctr") as announcements:
        broker.refuse(FIND_COORDINATOR, KafkaError.GROUP_AUTHORIZATION_FAILED)
        for version in range(1, 6):
            broker.send(announcements.topic, b"version", b"%d" % version)
            assert announcements.newest(PATIENCE_S) == version


@pytest.mark.parametrize("name", ["TOPIC_AUTHORIZATION_FAILED", "POLICY_VIOLATION", "MSG_SIZE_TOO_LARGE"])
def test_what_brokers_refuse_for_good_is_no_outage(name: str) -> None:
    """It would be refused again. The publisher stays usable."""
    keys, rows = np.arange(3), np.ones((3, 4), np.float32)
    with RefusingBroker() as broker, Publisher(broker.url, "ctr") as publisher:
        broker.send("hps_et.ctr.user", packed(1)[0], b"")
        broker.refuse(PRODUCE, getattr(KafkaError, name))
        publisher.publish("user", keys, rows)
        with pytest.raises(StoreError, match="was not delivered: Broker: "):
            publisher.flush()
        broker.allow(PRODUCE)
        publisher.publish("user", keys, rows)
        publisher.flush()
        assert broker.num_messages("hps_et.ctr.user") == 1 + 3
