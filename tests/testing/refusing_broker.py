"""The broker inside Kafka's client library, which can be told to refuse requests, as one with access lists does."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import Any

import confluent_kafka
import numpy as np

from tests.testing.servers import PATIENCE_S

PRODUCE, FETCH, LIST_OFFSETS, OFFSET_COMMIT, FIND_COORDINATOR = 0, 1, 2, 8, 10
"""Kinds of requests, by their numbers in Kafka's protocol."""
_MANY = 100_000
_ERROR_BYTES = 512
_PRODUCER = 0


class RefusingBroker:
    """One broker, in threads of the library. A context manager."""

    def __init__(self) -> None:
        self._library = _library()
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        settings = self._library.rd_kafka_conf_new()
        self._library.rd_kafka_conf_set(settings, b"log_level", b"0", error, _ERROR_BYTES)
        self._owner = ctypes.c_void_p(self._library.rd_kafka_new(_PRODUCER, settings, error, _ERROR_BYTES))
        assert self._owner, error.value
        self._cluster = ctypes.c_void_p(self._library.rd_kafka_mock_cluster_new(self._owner, 1))
        self._address = self._library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()
        self.url = f"kafka://{self._address}"

    def send(self, topic: str, key: bytes, value: bytes) -> None:
        """Publish a message, and wait until it is confirmed."""
        producer = confluent_kafka.Producer({"bootstrap.servers": self._address, "log_level": 0})
        producer.produce(topic, value, key, partition=0)
        assert producer.flush(PATIENCE_S) == 0

    def num_messages(self, topic: str) -> int:
        """How many messages it has of a topic."""
        consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": self._address, "group.id": "counting", "log_level": 0}
        )
        with contextlib.closing(consumer):
            partitions = consumer.list_topics(topic, PATIENCE_S).topics[topic].partitions
            places = [confluent_kafka.TopicPartition(topic, partition) for partition in partitions]
            return sum(int(consumer.get_watermark_offsets(place, PATIENCE_S)[1]) for place in places)

    def refuse(self, kind: int, error: int) -> None:
        """Answer requests of this kind with an error of confluent_kafka.KafkaError."""
        errors = np.full(_MANY, error, np.int32)
        self._library.rd_kafka_mock_push_request_errors_array(
            self._cluster, ctypes.c_int16(kind), ctypes.c_size_t(_MANY), ctypes.c_void_p(errors.ctypes.data)
        )

    def allow(self, kind: int) -> None:
        """Answer requests of this kind again."""
        self._library.rd_kafka_mock_clear_request_errors(self._cluster, ctypes.c_int16(kind))

    def __enter__(self) -> RefusingBroker:
        return self

    def __exit__(self, *_: object) -> None:
        self._library.rd_kafka_mock_cluster_destroy(self._cluster)
        self._library.rd_kafka_destroy(self._owner)


def _library() -> Any:
    """The client library that the package confluent_kafka brings."""
    folder = Path(confluent_kafka.__file__).parent
    [path] = folder.with_name("confluent_kafka.libs").glob("librdkafka*")
    library = ctypes.CDLL(str(path))
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    library.rd_kafka_conf_new.restype = library.rd_kafka_new.restype = pointer
    library.rd_kafka_mock_cluster_new.restype, library.rd_kafka_mock_cluster_bootstraps.restype = pointer, text
    library.rd_kafka_conf_set.argtypes = [pointer, text, text, text, ctypes.c_size_t]
    library.rd_kafka_new.argtypes = [ctypes.c_int, pointer, text, ctypes.c_size_t]
    return library
