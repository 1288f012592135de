"""Asks the brokers which keys were published since a moment."""

from __future__ import annotations

import time
from datetime import datetime

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import UnavailableError
from inference_session.update_stream.encodings import decode
from inference_session.update_stream.kafka_client import (
    BrokerErrors,
    Consumer,
    KafkaException,
    TopicPartition,
    assign,
    create_client,
)
from inference_session.update_stream.topics import PREFIXES, topic_name
from inference_session.urls.kafka_url import KafkaUrl

_BROKER_TIMEOUT_S = 15.0


def published_keys(url: str, model: str, folder: str, embedding_dim: int, since: datetime) -> NDArray[np.int64]:
    """The keys of a table, int64 [n], that were published or deleted since a moment, each once.

    Raises:
        UnavailableError: the brokers do not answer.
    """
    topic, brokers, errors = topic_name(PREFIXES[0], model, folder), KafkaUrl.parse(url), BrokerErrors()
    consumer = create_client(Consumer, brokers, {"group.id": f"hotrow.{topic}", "enable.auto.commit": False}, errors)
    try:
        found = consumer.list_topics(timeout=_BROKER_TIMEOUT_S).topics.get(topic)
        partitions = [] if found is None else list(found.partitions)
        since_ms = int(since.timestamp() * 1000)
        keys = [
            _keys_of(consumer, TopicPartition(topic, partition), embedding_dim, since_ms) for partition in partitions
        ]
    except KafkaException as error:
        raise UnavailableError(f"no Kafka broker answers at {brokers}: {errors.explain(error, consumer)}") from error
    finally:
        consumer.close()
    return np.unique(np.concatenate([np.empty(0, np.int64), *keys]))


def _keys_of(consumer: Consumer, partition: TopicPartition, embedding_dim: int, since_ms: int) -> NDArray[np.int64]:
    low, high = consumer.get_watermark_offsets(partition, timeout=_BROKER_TIMEOUT_S)
    assign(consumer, [TopicPartition(partition.topic, partition.partition, low)])
    keys = [np.empty(0, np.int64)]
    end = time.monotonic() + _BROKER_TIMEOUT_S
    while low < high:
        messages = [message for message in consumer.consume(10_000, 0.5) if message.error() is None]
        if messages:
            low, end = messages[-1].offset() + 1, time.monotonic() + _BROKER_TIMEOUT_S
        elif time.monotonic() > end:
            raise UnavailableError(f"{partition.topic!r} stops at offset {low}, though it has messages up to {high}")
        recent = [message for message in messages if message.timestamp()[1] >= since_ms]
        changes = decode([(message.key(), message.value()) for message in recent], embedding_dim, allow_non_finite=True)
        keys += [changes.keys, changes.deleted]
    return np.concatenate(keys)
