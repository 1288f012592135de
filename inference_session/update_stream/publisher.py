"""The producer's side of an update stream: rows from a trainer to the servers, every one of them confirmed."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inference_session.errors import ConfigurationError, InvalidRequestError, StoreError, UnavailableError
from inference_session.model_spec import folder_names
from inference_session.platform.drafts import MAX_VERSION
from inference_session.requests.caller_arrays import as_keys
from inference_session.update_stream.announcements import KEY
from inference_session.update_stream.encodings import (
    check_rows,
    encode_batch,
    encode_keys,
    encode_vectors,
    is_ambiguous,
)
from inference_session.update_stream.kafka_client import (
    AdminClient,
    BrokerErrors,
    KafkaError,
    KafkaException,
    NewTopic,
    Producer,
    create_client,
    interruptible,
    learn_leaders,
)
from inference_session.update_stream.topics import PREFIXES, announcement_topic, topic_name
from inference_session.urls.kafka_url import KafkaUrl

Encoding = Literal["row", "batch"]

DEFAULT_TIMEOUT_S = 15.0
_BATCH_BYTES = 256 << 10
"""Rows in one batch message, about: well below the 1 MiB that brokers take by default."""
_ROWS_BETWEEN_POLLS = 1000
_QUEUE_BYTES = 64 << 20
_TOPIC_SETTINGS = {"cleanup.policy": "compact", "delete.retention.ms": str(10 * 365 * 24 * 3600 * 1000)}
"""Settings of topics that we create: the last row of every key stays, and so does the tombstone of a deleted one."""


class Publisher:
    """Publishes rows of one model's tables. A context manager. Only one thread may use it at a time.

        with Publisher("kafka://broker:9092", "ctr") as publisher:
            publisher.publish("user", keys, vectors)
            publisher.delete("user", keys_that_are_gone)

    Rows of one key arrive in the order in which they were published: all messages of a key go to one partition, by
    the CRC-32 of its 8 bytes, as librdkafka does by default.

    An error of `publish`, `delete`, `announce`, `flush` or `close` says that messages since the last `flush` may be
    lost. The publisher stays usable: publish these rows again.
    """

    def __init__(
        self, url: str | KafkaUrl, model: str, *, encoding: Encoding = "row", timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Connect to the brokers.

        Args:
            url: kafka://HOST:PORT[,HOST:PORT].
            model: name of the model, as in the repository.
            encoding: `row`, a message for each row, which brokers can compact; `batch`, many rows to a message, which
                is several times as fast. Deletions are messages of their own in both.
            timeout_s: the longest that the brokers may take to answer, and to confirm a message.

        Raises:
            UnavailableError: no broker answers.
            ConfigurationError: the URL, the model or the encoding is not allowed.
        """
        if encoding not in get_args(Encoding):
            raise ConfigurationError(f"unknown encoding {encoding!r}; allowed: {', '.join(get_args(Encoding))}")
        if not model:
            raise ConfigurationError(f"the name of the model is {model!r}; give the one that servers load it by")
        self.url = KafkaUrl.parse(url) if isinstance(url, str) else url
        self.model = model
        self.encoding = encoding
        self._timeout_s = timeout_s
        self._failure: KafkaError | None = None
        self._num_partitions: dict[str, int] = {}
        self._producer = self._create_producer()
        self._errors = BrokerErrors()
        self._admin = create_client(AdminClient, self.url, on_error=self._errors)
        self._topics()

    def publish(self, table: str, keys: ArrayLike, vectors: ArrayLike) -> None:
        """Queue rows. They replace the rows of the same keys; if a key occurs twice, its last vector counts.

        Args:
            table: the table's name, or that of its folder.
            keys: integers [n].
            vectors: floats [n, embedding_dim].

        Raises:
            InvalidRequestError: keys or vectors have another type or shape.
            UnavailableError: the brokers have stopped answering.
            StoreError: the brokers refuse a message.
        """
        rows = as_keys(keys), np.ascontiguousarray(vectors, np.float32)
        check_rows(*rows)
        topic = self._topic(table)
        count = self._partitions(topic)
        if self.encoding == "row":
            self._produce(
                topic, zip(encode_keys(rows[0]), encode_vectors(rows[1]), _partition(rows[0], count), strict=True)
            )
        else:
            self._produce(topic, _batches(*rows, count))

    def delete(self, table: str, keys: ArrayLike) -> None:
        """Queue deletions: the rows of these keys, integers [n], become the default vector. Errors as of `publish`."""
        gone = as_keys(keys)
        topic = self._topic(table)
        partitions = _partition(gone, self._partitions(topic))
        self._produce(topic, ((key, None, p) for key, p in zip(encode_keys(gone), partitions, strict=True)))

    def announce(self, version: int) -> None:
        """Queue an announcement, so that servers load this version (`hotrow follow`). Errors as of `publish`."""
        if not 0 < version <= MAX_VERSION:
            raise InvalidRequestError(f"invalid version {version!r}; allowed: whole numbers from 1 to {MAX_VERSION}")
        topic = announcement_topic(self.model)
        self._partitions(topic)  # made if there is none
        self._produce(topic, [(KEY, b"%d" % version, 0)])

    def flush(self) -> None:
        """Wait until the brokers have confirmed everything that was queued. Errors as of `publish`."""
        # A message that is not delivered in time fails, so this comes to an end.
        while self._serve(self._producer.flush, 1.0) and self._failure is None:
            pass
        self._raise_failure()

    def close(self) -> None:
        """Flush, and accept nothing more. May be called more than once."""
        self.flush()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()

    def __repr__(self) -> str:
        return f"<Publisher of model {self.model!r} to {str(self.url)!r}>"

    def _create_producer(self) -> Producer:
        timeout_ms = int(self._timeout_s * 1000)
        settings = {
            # In order and without duplicates, even when messages are sent again.
            "enable.idempotence": True,
            "linger.ms": 5,
            "delivery.timeout.ms": timeout_ms,
            "socket.timeout.ms": timeout_ms,
            "queue.buffering.max.messages": 500_000,
            "queue.buffering.max.kbytes": _QUEUE_BYTES >> 10,
            "on_delivery": self._on_delivery,
        }
        return create_client(Producer, self.url, settings)

    def _on_delivery(self, error: KafkaError | None, _message: object) -> None:
        if error is not None and self._failure is None:
            self._failure = error

    def _produce(self, topic: str, messages: Iterable[tuple[bytes | None, bytes | None, int]]) -> None:
        for number, (key, value, partition) in enumerate(messages):
            if number % _ROWS_BETWEEN_POLLS == 0:
                self._serve(self._producer.poll, 0)
                self._raise_failure()
            while not self._queue(topic, key, value, partition):
                self._serve(self._producer.poll, 0.1)  # until the brokers have taken some, or time out
                self._raise_failure()

    def _serve(self, wait: Callable[[float], int], timeout_s: float) -> int:
        """Wait for the client library; raises the errors that end it, such as that the brokers have lost all topics."""
        try:
            return wait(timeout_s)
        except KafkaException as error:
            self._failure = self._failure or error.args[0]
            return 0

    def _queue(self, topic: str, key: bytes | None, value: bytes | None, partition: int) -> bool:
        """Queue a message; False: the queue is full."""
        try:
            self._producer.produce(topic, value, key, partition)
        except BufferError:
            return False
        except KafkaException as error:
            raise StoreError(f"a message of topic {topic!r} was refused: {error.args[0].str()}") from error
        return True

    def _raise_failure(self) -> None:
        """Raise what went wrong, once. Later messages go through a new producer, as the client library may have ended
        the old one for good.
        """
        if self._failure is None:
            return
        failure = self._failure
        self._producer.purge()
        self._serve(self._producer.flush, 0)
        self._producer = self._create_producer()
        self._num_partitions.clear()  # brokers that lost their topics may have created them again
        self._failure = None
        kind = StoreError if failure.code() in _REFUSALS else UnavailableError
        raise kind(f"a message to {self._where()} was not delivered: {failure.str()}")

    def _partitions(self, topic: str) -> int:
        """How many partitions a topic has; one that does not exist is made."""
        if topic not in self._num_partitions:
            found = self._topics().get(topic, 0)
            if not found:
                self._create_topic(topic)
                found = self._await_topic(topic)
            learn_leaders(self._producer, [topic])
            self._num_partitions[topic] = found
        return self._num_partitions[topic]

    def _create_topic(self, topic: str) -> None:
        new = NewTopic(topic, num_partitions=-1, replication_factor=-1, config=_TOPIC_SETTINGS)
        try:
            self._admin.create_topics([new], request_timeout=self._timeout_s)[topic].result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                text = f"topic {topic!r} does not exist and cannot be created at {self._where()}"
                raise StoreError(f"{text}: {error.args[0].str()}") from error

    def _await_topic(self, topic: str) -> int:
        end = time.monotonic() + self._timeout_s
        while time.monotonic() < end:
            if found := self._topics().get(topic, 0):
                return found
            time.sleep(0.05)
        raise UnavailableError(f"topic {topic!r} was created at {self._where()}, but has no partitions yet")

    def _topics(self) -> dict[str, int]:
        """All topics, with the number of their partitions."""
        try:
            topics = interruptible(lambda: self._admin.list_topics(timeout=self._timeout_s)).topics
        except KafkaException as error:
            why = self._errors.explain(error, self._admin)
            raise UnavailableError(
                f"no Kafka broker answers at {self._where()} within {self._timeout_s:g} s: {why}"
            ) from error
        return {name: len(topic.partitions) for name, topic in topics.items() if topic.error is None}

    def _topic(self, table: str) -> str:
        if not table:
            raise InvalidRequestError("the name of a table is empty")
        return topic_name(PREFIXES[0], self.model, folder_names([table])[0])

    def _where(self) -> str:
        return ", ".join(self.url.brokers)


_REFUSALS = (
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.INVALID_RECORD,
    KafkaError.POLICY_VIOLATION,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
)


def _partition(keys: NDArray[np.int64], count: int) -> list[int]:
    """The partition of each key."""
    partitions: list[int] = (crc32(keys) % np.uint32(count)).tolist()
    return partitions


def _batches(keys: NDArray[np.int64], vectors: NDArray[np.float32], count: int) -> Iterator[tuple[None, bytes, int]]:
    """Messages, with their partitions. Their lengths say how wide keys are; where one would not, a row goes alone."""
    partitions = crc32(keys) % np.uint32(count)
    step = max(1, _BATCH_BYTES // (8 + 4 * vectors.shape[1]))
    for partition in range(count):
        members = np.flatnonzero(partitions == partition)
        for begin in range(0, len(members), step):
            part = members[begin : begin + step]
            num_alone = int(is_ambiguous(len(part), vectors.shape[1]))
            for some in filter(len, (part[:num_alone], part[num_alone:])):
                yield None, encode_batch(keys[some], vectors[some]), partition


_CRC_TABLE = np.array([zlib.crc32(bytes([i])) ^ zlib.crc32(b"\0") for i in range(256)], np.uint32)


def crc32(keys: NDArray[np.int64]) -> NDArray[np.uint32]:
    """zlib.crc32 of the 8 bytes of each key, int64 [n], of all keys at once: uint32 [n]."""
    remainder = np.full(len(keys), 0xFFFFFFFF, np.uint32)
    for column in keys.astype("<i8", copy=False).view(np.uint8).reshape(-1, 8).T:
        remainder = _CRC_TABLE[(remainder ^ column) & np.uint32(0xFF)] ^ (remainder >> np.uint32(8))
    checksums: NDArray[np.uint32] = remainder ^ np.uint32(0xFFFFFFFF)
    return checksums
