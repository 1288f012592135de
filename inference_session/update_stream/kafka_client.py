"""Kafka's client library, librdkafka: all that is used of it, and clients made of a URL."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from inference_session.errors import ConfigurationError, UnavailableError
from inference_session.platform.daemon_threads import DaemonThreads
from inference_session.urls.kafka_url import KafkaUrl

try:
    from confluent_kafka import (
        OFFSET_BEGINNING,
        Consumer,
        KafkaError,
        KafkaException,
        Message,
        Producer,
        TopicCollection,
        TopicPartition,
    )
    from confluent_kafka.admin import AdminClient, TopicMetadata
    from confluent_kafka.cimpl import NewTopic
except ImportError as missing:
    raise ConfigurationError("Kafka needs the package `confluent-kafka`: pip install 'hotrow[kafka]'") from missing

__all__ = [
    "OFFSET_BEGINNING", "AdminClient", "BrokerErrors", "Consumer", "KafkaError", "KafkaException", "Message",
    "NewTopic", "Producer", "TopicMetadata", "TopicPartition", "assign", "create_client", "interruptible",
    "learn_leaders", "read_to_end", "received", "topic_ids",
]  # fmt: skip

_LEADERS_TIMEOUT_S = 1.0
"""How long the brokers may take to name leaders: after this time, a client asks for them by itself."""

_MESSAGES_AT_ONCE = 1000
_POLL_S = 0.05
_UNREACHABLE = (KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._ALL_BROKERS_DOWN)
_STATE = re.compile(r" \(after \d+ms in state .*\)$")
"""What the library adds to its errors for its own developers."""

Client = TypeVar("Client")
Result = TypeVar("Result")


class BrokerErrors:
    """Why brokers could not be reached: the client library tells that to its callback for errors, and not in the errors
    that it raises.
    """

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, error: KafkaError) -> None:
        """The client's callback."""
        if error.code() != KafkaError._ALL_BROKERS_DOWN:
            self._last = _STATE.sub("", error.str())

    def explain(self, raised: KafkaException, client: Consumer | AdminClient | None = None) -> str:
        """What to say of an error that the client has raised. `client`: one that has called for nothing yet that would
        have run its callback; a message that it has received may get lost.
        """
        if client is not None:
            client.poll(0)
        error: KafkaError = raised.args[0]
        return self._last if self._last and error.code() in _UNREACHABLE else error.str()

    def forget(self) -> None:
        """The brokers answer."""
        self._last = ""


def create_client(
    kind: Callable[[dict[str, Any]], Client],
    url: KafkaUrl,
    settings: Mapping[str, Any] | None = None,
    on_error: Callable[[KafkaError], None] = lambda _: None,
) -> Client:
    """A `Consumer`, which gets no damaged message, `Producer` or `AdminClient` of the brokers. It prints nothing.

    `on_error` is told of errors that the client itself tries to overcome.

    Raises:
        ConfigurationError: the library does not take an option of the URL.
        UnavailableError: it cannot start its threads now.
    """
    quiet = {"log_level": 0, "error_cb": on_error}
    checked = {"check.crcs": True} if kind is Consumer else {}
    try:
        return kind({**url.client_settings(), **quiet, **checked, **(settings or {})})
    except KafkaException as error:
        if error.args[0].code() == KafkaError._CRIT_SYS_RESOURCE:
            raise UnavailableError(f"the Kafka client does not start; try again: {error.args[0].str()}") from error
        raise ConfigurationError(
            f"the Kafka client rejects the settings of {str(url)!r}: {error.args[0].str()}"
        ) from error


def interruptible(call: Callable[[], Result]) -> Result:
    """What a call of the client library returns or raises, where it may wait long: the library itself handles no
    signal, such as Ctrl-C, while it waits.

    If a signal's handler raises, the call goes on in a thread of its own. Its client must not be closed then.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()  # Python handles signals in the main thread
    with DaemonThreads(1) as threads:
        return threads.submit(call).result()


def assign(consumer: Consumer, partitions: Sequence[TopicPartition]) -> None:
    """Make a consumer read these partitions, from their offsets, and no others.

    librdkafka ends the process by an assertion if the partitions change again, or the consumer is closed, before it
    has stopped reading those from before. It works through its queue in order, so it has stopped once two requests are
    answered: the first waits until the stop is under way, the second until it is done.
    """
    read = {partition.topic for partition in consumer.assignment()}
    learn_leaders(consumer, {partition.topic for partition in partitions} - read)
    consumer.assign(partitions)
    for _ in range(2):
        consumer.assignment()


def received(consumer: Consumer, num_messages: int, deadline: float) -> list[Message]:
    """The next messages and events, at most as many; [] when none has come by this value of time.monotonic().

    The client library would wait by the time of day: if that is set back by an hour, for an hour. It would also
    handle no signal meanwhile.
    """
    while not (messages := consumer.consume(num_messages, 0.0)):
        if time.monotonic() >= deadline:
            return []
        time.sleep(_POLL_S)
    return list(messages)


def read_to_end(consumer: Consumer, url: KafkaUrl, begin: TopicPartition, timeout_s: float) -> Iterator[list[Message]]:
    """Yield the messages of a partition from an offset to its end, some at a time. The end is where the brokers say so:
    after the last message there may be control records of transactions, and offsets of messages that were compacted.

    Args:
        consumer: has `enable.partition.eof`, and reads nothing else from now on.
        url: the brokers, for errors.
        begin: names the offset.
        timeout_s: the longest that the next messages may take to come.

    Raises:
        UnavailableError: the messages cannot be read.
    """
    assign(consumer, [begin])
    why = f"its next message did not come within {timeout_s:g} s"
    deadline = time.monotonic() + timeout_s
    while messages := received(consumer, _MESSAGES_AT_ONCE, deadline):
        # An event without a topic is of the group, under which nothing is committed. There may be any number of them.
        events = [message.error() for message in messages if message.error() is not None and message.topic()]
        if found := [message for message in messages if message.error() is None]:
            yield found
            deadline = time.monotonic() + timeout_s
        if events and events[0].code() == KafkaError._PARTITION_EOF:
            return
        if events:
            why = events[0].str()
            break
        if time.monotonic() >= deadline:
            break
    raise UnavailableError(f"topic {begin.topic!r} at {url} cannot be read: {why}")


def learn_leaders(client: Consumer | Producer, topics: Iterable[str]) -> None:
    """Let a client ask now which brokers lead the partitions of topics that exist.

    A connected client that first uses a topic asks for it only in its next look through its topics, once a second.
    Until then it sends and reads no message of that topic. Errors are ignored, since the client asks again.
    """
    end = time.monotonic() + _LEADERS_TIMEOUT_S
    with contextlib.suppress(KafkaException):
        for topic in topics:
            if (left_s := end - time.monotonic()) > 0:
                client.list_topics(topic, timeout=left_s)


def topic_ids(admin: AdminClient, topics: Collection[str], timeout_s: float) -> dict[str, str]:
    """The ids of topics, by name; empty where the broker gives none, as those before Kafka 2.8. Without topics that are
    not described now.
    """
    if not topics:
        return {}
    ids = {}
    for topic, described in admin.describe_topics(TopicCollection(list(topics)), request_timeout=timeout_s).items():
        with contextlib.suppress(KafkaException):
            topic_id = str(described.result().topic_id)
            ids[topic] = topic_id if topic_id.strip("A=") else ""  # base64 of all zeros means no id
    return ids
