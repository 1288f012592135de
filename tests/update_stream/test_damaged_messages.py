"""Messages that are damaged on a broker's disk or on their way: no row of them is applied, and none is lost."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from inference_session import InferenceSession
from inference_session.errors import UnavailableError
from inference_session.update_stream.announcements import Announcements
from inference_session.update_stream.kafka_client import Consumer, KafkaError, TopicPartition, assign, create_client
from inference_session.urls.kafka_url import KafkaUrl
from tests.testing.broker import Broker
from tests.testing.proxy import Proxy
from tests.testing.servers import PATIENCE_S, wait_until
from tests.testing.small_version import SmallVersion
from tests.testing.streamed_rows import await_rows, packed, vectors

RIGHT, WRONG = vectors(12345).tobytes(), vectors(54321).tobytes()
NUM_ROWS, DAMAGED = 6, 2


def updates(session: InferenceSession) -> dict[str, Any]:
    found: dict[str, Any] = session.stats()["updates"]
    return found


def test_a_damaged_message_is_waited_for(small: SmallVersion, caplog: pytest.LogCaptureFixture) -> None:
    """Once it arrives whole, it and those behind it are applied; other topics go on meanwhile."""
    broker = Broker()
    with Proxy(broker.port) as proxy:
        broker.advertised_port = proxy.port
        with broker, InferenceSession.open(small.directory, update_stream=broker.url) as session:
            proxy.damage = RIGHT, WRONG
            for key in range(NUM_ROWS):  # each in a batch of its own
                value = RIGHT if key == DAMAGED else vectors(key).tobytes()
                broker.send(small.topic("user_weight"), (packed(key)[0], value))
            wait_until(lambda: updates(session)["failures"] > 2, "the damage to be found")
            for number in range(3):
                broker.send(small.topic("user_weight", "hctr_et"), (packed(40)[0], vectors(number).tobytes()))
                await_rows(session, "user.weight", [40], number)
            assert "CRC" in updates(session)["failure"]
            np.testing.assert_array_equal(
                session.lookup("user.weight", np.arange(DAMAGED, NUM_ROWS)),
                small.tables["user_weight"][DAMAGED:NUM_ROWS],
            )
            proxy.damage = None
            await_rows(session, "user.weight", [DAMAGED], 12345)
            await_rows(session, "user.weight", [NUM_ROWS - 1], NUM_ROWS - 1)
            wait_until(lambda: updates(session)["failure"] is None, "the damage to be over")
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([text for text in told if "CRC" in text]) == 1
    assert len([text for text in told if text.endswith("partition 0, continues")]) == 1


def test_no_consumer_gets_a_damaged_message() -> None:
    """Whatever it reads; it gets an error first, and the message once that arrives whole."""
    broker = Broker()
    with Proxy(broker.port) as proxy:
        broker.advertised_port = proxy.port
        with broker:
            broker.send("any", (b"key", RIGHT))
            consumer = create_client(Consumer, KafkaUrl.parse(broker.url), {"group.id": "any"})
            partitions = consumer.list_topics("any", timeout=PATIENCE_S).topics["any"].partitions
            proxy.damage = RIGHT, WRONG
            assign(consumer, [TopicPartition("any", partition, 0) for partition in partitions])
            first = consumer.poll(PATIENCE_S)
            proxy.damage = None
            messages = [first]
            while messages[-1].error() is not None:
                messages.append(consumer.poll(PATIENCE_S))
            consumer.close()
    assert first.error().code() == KafkaError._BAD_MSG
    assert messages[-1].value() == RIGHT


def test_a_damaged_announcement_is_named() -> None:
    """The error says that the message is damaged, not that no broker answers. Once it arrives whole, it counts."""
    broker = Broker()
    with Proxy(broker.port) as proxy:
        broker.advertised_port = proxy.port
        with broker, Announcements(KafkaUrl.parse(broker.url), "ctr") as announcements:
            broker.send(announcements.topic, (b"version", b"123456789"))
            proxy.damage = b"123456789", b"123456780"
            with pytest.raises(UnavailableError, match=r"topic 'hotrow_versions.ctr' at .* cannot be read: .*CRC"):
                announcements.newest(PATIENCE_S)
            proxy.damage = None
            wait_until(lambda: announcements.newest(0.1) == 123456789, "the announcement to be read")
