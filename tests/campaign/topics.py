"""The messages of topics, as a client reads them from the beginning."""

from __future__ import annotations

import time
from collections.abc import Sequence

from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

from inference_session.update_stream.kafka_client import assign
from inference_session.urls.kafka_url import KafkaUrl
from tests.testing.servers import PATIENCE_S

_READ_S = 20.0
"""How long a partition may show neither its next message nor its end."""


def last_messages(url: str, topics: Sequence[str]) -> dict[str, dict[bytes, bytes | None]]:
    """The value of the last message of each key, by topic, as far as the broker shows it."""
    settings = {"bootstrap.servers": ",".join(KafkaUrl.parse(url).brokers), "group.id": "campaign", "log_level": 0}
    consumer = Consumer({**settings, "enable.auto.commit": False, "enable.partition.eof": True})
    listed = consumer.list_topics(timeout=PATIENCE_S).topics
    unread = {(topic, partition) for topic in topics if topic in listed for partition in listed[topic].partitions}
    assign(consumer, [TopicPartition(*one, OFFSET_BEGINNING) for one in unread])
    found: dict[str, dict[bytes, bytes | None]] = {topic: {} for topic in topics}
    end = time.monotonic() + _READ_S
    while unread and time.monotonic() < end:
        for message in consumer.consume(500, 0.2):
            topic = message.topic() or ""
            if message.error():
                unread.discard((topic, message.partition() or 0))
            else:
                found[topic][message.key() or b""] = message.value()
                end = time.monotonic() + _READ_S
    consumer.close()
    return found
