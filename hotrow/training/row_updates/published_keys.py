"""Asks the brokers which keys were published since a moment."""

from __future__ import annotations

from datetime import datetime

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import UnavailableError
from inference_session.update_stream.encodings import decode
from inference_session.update_stream.kafka_client import (
    OFFSET_BEGINNING,
    BrokerErrors,
    Consumer,
    KafkaException,
    TopicPartition,
    create_client,
    read_to_end,
)
from inference_session.update_stream.newer_messages import NewerMessages
from inference_session.update_stream.topics import PREFIXES, topic_name
from inference_session.urls.kafka_url import KafkaUrl

_BROKER_TIMEOUT_S = 15.0


def published_keys(url: str, model: str, folder: str, embedding_dim: int, since: datetime) -> NDArray[np.int64]:
    """The keys of a table, int64 [n], that were published or deleted since a moment, each once.

    Raises:
        UnavailableError: the brokers do not answer, or the topic cannot be read.
    """
    topic, brokers, errors = topic_name(PREFIXES[0], model, folder), KafkaUrl.parse(url), BrokerErrors()
    settings = {"group.id": f"hotrow.{topic}", "enable.auto.commit": False, "enable.partition.eof": True}
    # Where brokers remove messages while they are read.
    settings["auto.offset.reset"] = "earliest"
    # The client names the end of a partition after an answer without messages, for which brokers take this time.
    settings["fetch.wait.max.ms"] = 10
    consumer = create_client(Consumer, brokers, settings, errors)
    try:
        found = consumer.list_topics(timeout=_BROKER_TIMEOUT_S).topics.get(topic)
        partitions = [] if found is None else list(found.partitions)
        newer = NewerMessages(since)
        keys = [np.empty(0, np.int64)]
        for partition in partitions:
            begin = TopicPartition(topic, partition, OFFSET_BEGINNING)
            for messages in read_to_end(consumer, brokers, begin, _BROKER_TIMEOUT_S):
                recent = [(each.key(), each.value()) for each in newer.among(topic, messages)]
                changes = decode(recent, embedding_dim, allow_non_finite=True)
                keys += [changes.keys, changes.deleted]
    except KafkaException as error:
        raise UnavailableError(f"no Kafka broker answers at {brokers}: {errors.explain(error, consumer)}") from error
    finally:
        consumer.close()
    return np.unique(np.concatenate(keys))
