"""Topics that are deleted and created again, brokers that come back empty: no message of the new topic is skipped."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import confluent_kafka
import numpy as np
import pytest
from confluent_kafka.admin import NewTopic

from inference_session import InferenceSession
from inference_session.parameter_server.create import create_store
from inference_session.parameter_server.namespace import Namespace
from inference_session.update_stream import followed_partitions, kafka_stream
from tests.testing.broker import Broker
from tests.testing.servers import PATIENCE_S, wait_until
from tests.testing.small_version import SmallVersion
from tests.testing.stored_model import DIMS, push
from tests.testing.streamed_rows import FIRST_THAT_ABORTS, await_rows, packed, vectors

NUM_OLD, NUM_NEW = 20, 30
"""Messages of the first topic, and of the one that takes its place, which so has more."""

pytestmark = pytest.mark.skipif(
    confluent_kafka.libversion()[1] >= FIRST_THAT_ABORTS,
    reason="this librdkafka aborts the process on what the broker of these tests says of a deleted topic",
)


@pytest.fixture(params=["ids", "no_ids"])
def with_ids(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the broker tells the ids of topics, which those before Kafka 2.8 do not."""
    if request.param == "no_ids":
        monkeypatch.setattr(followed_partitions, "topic_ids", lambda _, topics, __: dict.fromkeys(topics, ""))
    return bool(request.param == "ids")


@pytest.fixture
def database(small: SmallVersion, tmp_path: Path) -> str:
    """A RocksDB with the small model's rows."""
    url = f"rocksdb://{tmp_path}/db"
    push(small.directory, url)
    return url


@contextmanager
def serving(small: SmallVersion, database: str, broker: Broker) -> Iterator[InferenceSession]:
    """A session whose rows outlive it, so that how far they are applied is noted."""
    with InferenceSession.open(
        small.directory, persistent_store=database, update_stream=broker.url, cache_bytes=0
    ) as session:
        yield session


def send(broker: Broker, topic: str, num_messages: int, base: int) -> None:
    """Publish a row each of keys 0, 1, …, with the values base, base + 1, …"""
    broker.send(topic, *[(packed(i)[0], vectors(base + i).tobytes()) for i in range(num_messages)])


def values(base: int, num_rows: int) -> Any:
    return base + np.arange(num_rows)[:, None]


def updates(session: InferenceSession) -> dict[str, Any]:
    return session.stats()["updates"]


def note_of(small: SmallVersion, database: str) -> str:
    with create_store(database, Namespace(small.model, "1"), DIMS) as store:
        return store.note("user_weight") or ""


def make_anew(broker: Broker, small: SmallVersion, database: str, num_new: int) -> None:
    """Apply the messages of the first topic, then put another one in its place while no session serves."""
    topic = small.topic("user_weight")
    with serving(small, database, broker) as session:
        send(broker, topic, NUM_OLD, 100)
        await_rows(session, "user.weight", np.arange(NUM_OLD), values(100, NUM_OLD))
    broker.delete_topic(topic)
    send(broker, topic, num_new, 200)


def test_a_topic_made_anew_while_nobody_serves(
    small: SmallVersion, database: str, with_ids: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Although it has grown beyond what was applied, all of it is; once that is noted, it is not read again."""
    topic = small.topic("user_weight")
    with Broker() as broker:
        make_anew(broker, small, database, NUM_NEW)
        with serving(small, database, broker) as session:
            await_rows(session, "user.weight", np.arange(NUM_NEW), values(200, NUM_NEW))
            assert updates(session)["replays"] == 1
            wait_until(lambda: updates(session)["lag_messages"] == 0, "all to be applied")
        with serving(small, database, broker) as session:
            assert (updates(session)["messages"], updates(session)["replays"]) == (0, 0)
    expected = "its id was" if with_ids else f"its message at offset {NUM_OLD - 1} is not the one"
    assert [topic in record.getMessage() for record in caplog.records if expected in record.getMessage()] == [True]


def test_a_topic_made_anew_that_is_shorter(small: SmallVersion, database: str, with_ids: bool) -> None:
    """The message that would prove it is behind its end, where this broker sends nothing at all."""
    with Broker() as broker:
        make_anew(broker, small, database, NUM_OLD // 2)
        with serving(small, database, broker) as session:
            await_rows(session, "user.weight", np.arange(NUM_OLD // 2), values(200, NUM_OLD // 2))
            assert updates(session)["replays"] == 1


def test_a_broker_that_comes_back_empty(small: SmallVersion, database: str, with_ids: bool) -> None:
    """While rows are served, and with more messages than before by the time that this is noticed."""
    topic = small.topic("user_weight")
    with Broker() as broker, serving(small, database, broker) as session:
        send(broker, topic, NUM_OLD, 100)
        await_rows(session, "user.weight", np.arange(NUM_OLD), values(100, NUM_OLD))
        broker.stop()
        wait_until(lambda: updates(session)["failure"] is not None, "the outage to be noticed")
        broker.start()
        send(broker, topic, NUM_NEW, 200)
        await_rows(session, "user.weight", np.arange(NUM_NEW), values(200, NUM_NEW))
        wait_until(lambda: updates(session)["lag_messages"] == 0, "all to be applied")


def test_a_broker_that_comes_back_empty_before_it_is_asked(
    small: SmallVersion, database: str, with_ids: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of the new topic arrive from the old offset on before a question to the brokers is answered again."""
    is_down = threading.Event()
    create = kafka_stream.create_consumer
    monkeypatch.setattr(kafka_stream, "create_consumer", lambda *args: Unanswered(create(*args), is_down))
    topic = small.topic("user_weight")
    with Broker() as broker, serving(small, database, broker) as session:
        send(broker, topic, NUM_OLD, 100)
        await_rows(session, "user.weight", np.arange(NUM_OLD), values(100, NUM_OLD))
        is_down.set()
        wait_until(lambda: updates(session)["failure"] is not None, "the outage to be noticed")
        broker.stop()
        broker.start()
        send(broker, topic, NUM_NEW, 200)
        await_rows(session, "user.weight", [NUM_NEW - 1], values(200, NUM_NEW)[-1:])
        is_down.clear()
        await_rows(session, "user.weight", np.arange(NUM_NEW), values(200, NUM_NEW))


def test_a_broker_that_comes_back_empty_between_two_questions(
    small: SmallVersion, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the connection alone shows that it was away: each question is answered as if it had not been."""
    is_repeating = threading.Event()
    create = kafka_stream.create_consumer
    monkeypatch.setattr(kafka_stream, "create_consumer", lambda *args: Repeating(create(*args), is_repeating))
    monkeypatch.setattr(followed_partitions, "topic_ids", lambda _, topics, __: dict.fromkeys(topics, ""))
    topic = small.topic("user_weight")
    with Broker() as broker, serving(small, database, broker) as session:
        send(broker, topic, NUM_OLD, 100)
        await_rows(session, "user.weight", np.arange(NUM_OLD), values(100, NUM_OLD))
        is_repeating.set()
        broker.stop()
        broker.start()
        send(broker, topic, NUM_NEW, 200)
        await_rows(session, "user.weight", np.arange(NUM_NEW), values(200, NUM_NEW))
        assert updates(session)["replays"] == 1


class Repeating:
    """A consumer that repeats its last answer about topics while an event is set."""

    def __init__(self, consumer: Any, is_repeating: threading.Event) -> None:
        self._consumer, self._is_repeating = consumer, is_repeating
        self._answer: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def list_topics(self, *args: Any, **settings: Any) -> Any:
        if args:  # with a topic, it is asked for leaders
            return self._consumer.list_topics(*args, **settings)
        if not self._is_repeating.is_set():
            answer = self._consumer.list_topics(**settings)
            if not self._is_repeating.is_set():  # else it may be that of the broker that came back
                self._answer = answer
        return self._answer


class Unanswered:
    """A consumer whose questions about topics fail while an event is set; messages still arrive."""

    def __init__(self, consumer: Any, is_down: threading.Event) -> None:
        self._consumer, self._is_down = consumer, is_down

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def list_topics(self, *args: Any, **settings: Any) -> Any:
        if self._is_down.is_set():
            raise confluent_kafka.KafkaException(confluent_kafka.KafkaError(confluent_kafka.KafkaError._TRANSPORT))
        return self._consumer.list_topics(*args, **settings)


def test_a_topic_made_anew_in_one_moment(broker: Broker, small: SmallVersion, database: str) -> None:
    """It was never seen to be missing, nor to be short: its id has changed."""
    topic = small.topic("user_weight")
    with serving(small, database, broker) as session:
        for round_ in range(1, 6):
            num_rows, base = 10 * round_, 1000 * round_
            broker.delete_topic(topic) if round_ > 1 else None
            send(broker, topic, num_rows, base)
            await_rows(session, "user.weight", np.arange(num_rows), values(base, num_rows))


def test_a_topic_that_is_not_listed_for_a_while_goes_on(
    broker: Broker, small: SmallVersion, database: str, with_ids: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic with an error in its metadata is not read from its beginning: no row gets older or is read twice."""
    answers: list[str] = []
    create = kafka_stream.create_consumer
    monkeypatch.setattr(kafka_stream, "create_consumer", lambda *args: Unsteady(create(*args), answers))
    topic = small.topic("user_weight")
    with serving(small, database, broker) as session:
        send(broker, topic, NUM_OLD, 100)
        await_rows(session, "user.weight", np.arange(NUM_OLD), values(100, NUM_OLD))
        for value, answer in enumerate(("error", "unlisted", "no_partitions", "error")):
            answers.append(answer)
            wait_until(lambda: not answers, "the odd answer to be taken")
            broker.send(topic, (packed(0)[0], vectors(value).tobytes()))
            await_rows(session, "user.weight", [0], value)
        # A row is answered a moment before its message is counted, and until then the lag is an earlier one.
        wait_until(lambda: updates(session)["messages"] >= NUM_OLD + 4, "the last message to be counted")
        wait_until(lambda: updates(session)["lag_messages"] == 0, "all to be applied")
        assert (updates(session)["messages"], updates(session)["replays"]) == (NUM_OLD + 4, 0)
        np.testing.assert_array_equal(
            session.lookup("user.weight", np.arange(1, NUM_OLD))[:, 0], 100 + np.arange(1, NUM_OLD)
        )


def test_a_topic_that_grows_is_warned_of(
    broker: Broker, small: SmallVersion, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its new partitions are followed; a warning says once that the order of messages of a key is lost."""
    monkeypatch.setattr(kafka_stream, "DISCOVERY_S", 0.1)
    topic, create, answers = small.topic("user_weight"), kafka_stream.create_consumer, ["one_partition"] * 5
    admin = broker.admin()
    admin.create_topics([NewTopic(topic, num_partitions=3, replication_factor=1)])[topic].result(PATIENCE_S)
    monkeypatch.setattr(kafka_stream, "create_consumer", lambda *args: Unsteady(create(*args), answers))
    with InferenceSession.open(small.directory, update_stream=broker.url) as session:
        for partition in range(3):
            broker.send(topic, (packed(partition)[0], vectors(partition).tobytes()), partition=partition)
        await_rows(session, "user.weight", np.arange(3), values(0, 3))
    assert len([text for text in caplog.messages if topic in text and "more partitions" in text]) == 1


def test_a_session_that_has_not_seen_a_topic_does_not_take_over(
    broker: Broker, small: SmallVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that serves has applied its messages; the other waits until it follows the topic, and applies them."""
    monkeypatch.setattr(kafka_stream, "DISCOVERY_S", 0.1)
    settings = {"update_stream": broker.url, "catch_up_s": PATIENCE_S}
    send(broker, small.topic("user_weight"), NUM_OLD, 100)
    with InferenceSession.open(small.directory, **settings) as session:
        await_rows(session, "user.weight", np.arange(NUM_OLD), values(100, NUM_OLD))
        create, answers = kafka_stream.create_consumer, ["unlisted"] * 5
        monkeypatch.setattr(kafka_stream, "create_consumer", lambda *args: Unsteady(create(*args), answers))
        with InferenceSession.open(small.directory, **settings) as other, session.upkeep.updates_held() as applied:
            other.upkeep.catch_up_with(applied)
            np.testing.assert_array_equal(
                other.lookup("user.weight", np.arange(NUM_OLD))[:, 0], values(100, NUM_OLD)[:, 0]
            )


def test_a_topic_whose_metadata_fail_at_the_beginning_is_waited_for(
    broker: Broker, small: SmallVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version does not serve before it has applied messages of partitions that it learns of a moment later."""
    create = kafka_stream.create_consumer
    monkeypatch.setattr(kafka_stream, "create_consumer", lambda *args: Unsteady(create(*args), ["error", "error"]))
    send(broker, small.topic("user_weight"), NUM_OLD, 100)
    with InferenceSession.open(small.directory, update_stream=broker.url, catch_up_s=PATIENCE_S) as session:
        np.testing.assert_array_equal(
            session.lookup("user.weight", np.arange(NUM_OLD))[:, 0], values(100, NUM_OLD)[:, 0]
        )


class Unsteady:
    """A consumer whose next answers about all topics are as a test says."""

    def __init__(self, consumer: Any, answers: list[str]) -> None:
        self._consumer, self._answers = consumer, answers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def list_topics(self, *asked: str, **settings: Any) -> Any:
        metadata = self._consumer.list_topics(*asked, **settings)
        if self._answers and not asked:
            answer = self._answers.pop()
            for name, topic in list(metadata.topics.items()):
                if answer == "error":
                    topic.error, topic.partitions = object(), {}
                elif answer == "unlisted":
                    del metadata.topics[name]
                elif answer == "one_partition":
                    topic.partitions = {number: one for number, one in topic.partitions.items() if number == 0}
                else:
                    topic.partitions = {}
        return metadata


def test_a_note_of_an_earlier_release_is_a_doubt(
    broker: Broker, small: SmallVersion, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It has offsets and no identity: it is not trusted, all is read again, and then noted with identity."""
    topic = small.topic("user_weight")
    send(broker, topic, NUM_OLD, 100)
    with create_store(database, Namespace(small.model, "1"), DIMS, writable=True) as store:
        note = {**json.loads(store.note("user_weight") or "{}"), "offsets": {topic: {"0": NUM_OLD}}}
        store.set_note("user_weight", json.dumps(note))
    with serving(small, database, broker) as session:
        await_rows(session, "user.weight", np.arange(NUM_OLD), values(100, NUM_OLD))
        wait_until(lambda: updates(session)["lag_messages"] == 0, "all to be applied")
        assert updates(session)["replays"] == 1
    assert any("neither the topic's id nor a fingerprint" in record.getMessage() for record in caplog.records)
    assert json.loads(note_of(small, database))["topics"][topic]["0"]["last"][0] == NUM_OLD - 1
