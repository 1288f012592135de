"""Announced versions: which version of a model its servers are to serve, dense weights included.

Only a number travels, in decimal digits, on the topic `hotrow_versions.<model>`, partition 0, under one Kafka key, so
that brokers may drop all but the last. Followers know where its files are: a message cannot make them read another
place.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NamedTuple

from inference_session.errors import UnavailableError
from inference_session.platform.drafts import MAX_VERSION
from inference_session.update_stream.kafka_client import (
    BrokerErrors,
    Consumer,
    KafkaException,
    TopicPartition,
    assign,
    create_client,
    interruptible,
    read_to_end,
    received,
)
from inference_session.update_stream.topics import announcement_topic
from inference_session.urls.kafka_url import KafkaUrl

KEY = b"version"
BROKER_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)


class _Announcement(NamedTuple):
    """A message of the topic. In a topic that was deleted and created again, an equal offset has another time."""

    offset: int
    published_ms: int
    version: int | None
    """None: the message is refused."""


class Announcements:
    """The announcements of one model; a context manager. The last one counts, also one from before.

    The announcement is read from the topic each time, so that nothing depends on earlier reads: a topic that is
    made anew, a broker that comes back empty and a refused message hide no announcement.
    """

    def __init__(self, url: KafkaUrl, model: str) -> None:
        """Nothing is sent yet. ConfigurationError where an option of the URL is refused."""
        self._url = url
        self.topic = announcement_topic(model)
        """Name of the topic."""
        self._told: _Announcement | None = None
        """What `newest` returned last."""
        self._refused: _Announcement | None = None
        """The refused message that was logged last."""
        # No consumer joins this group.
        settings = {"group.id": f"hotrow.{self.topic}", "enable.auto.commit": False, "enable.partition.eof": True}
        self._errors = BrokerErrors()
        self._consumer = create_client(Consumer, url, settings, self._errors)

    def newest(self, timeout_s: float) -> int | None:
        """The version announced last, if there is one since the last call; waits at most this long.

        Raises:
            UnavailableError: the brokers do not answer, or the topic cannot be read.
        """
        try:
            found = self._find()
            if found in (None, self._told) and self._wait(timeout_s):
                found = self._find()
        except KafkaException as error:
            if error.args[0].code() > 0:  # a broker's own; the client's are below 0
                raise self._unreadable(error.args[0].str()) from error
            why = self._errors.explain(error, self._consumer)  # a message that is lost is read by the next call
            raise UnavailableError(f"no Kafka broker answers at {self._url}: {why}") from error
        if found is None or found == self._told:
            return None
        self._told = found
        return found.version

    def close(self) -> None:
        """Close the connections."""
        self._consumer.close()

    def __enter__(self) -> Announcements:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # An interrupted call may still use the consumer. It has joined no group, so nobody waits for it to leave.
        if kind is None or issubclass(kind, Exception):
            self.close()

    def _find(self) -> _Announcement | None:
        """The last announcement that is a version; None: none was ever announced. Then follow new messages."""
        topic = interruptible(lambda: self._consumer.list_topics(timeout=BROKER_TIMEOUT_S)).topics.get(self.topic)
        if topic is None or topic.error is not None:
            assign(self._consumer, [])
            return None
        partition = TopicPartition(self.topic, 0)
        low, high = interruptible(lambda: self._consumer.get_watermark_offsets(partition, timeout=BROKER_TIMEOUT_S))
        found, refused = None, None
        for begin in _begins(low, high):
            found, refused = self._read_from(begin)
            if found is not None:
                break
        self._tell_refused(refused)
        return found

    def _tell_refused(self, refused: _Announcement | None) -> None:
        """Log the last message that is refused, once."""
        if refused is not None and refused != self._refused:
            _log.warning(
                "the announcement at offset %d of topic %r is rejected: it is not a version number",
                refused.offset,
                self.topic,
            )
        self._refused = refused

    def _read_from(self, begin: int) -> tuple[_Announcement | None, _Announcement | None]:
        """From an offset to the end, the last message that is a version, and the last that is not."""
        found, refused = None, None
        at = TopicPartition(self.topic, 0, begin)
        for messages in read_to_end(self._consumer, self._url, at, BROKER_TIMEOUT_S):
            for message in messages:
                read = _Announcement(message.offset(), message.timestamp()[1], _version(message))
                found, refused = (found, read) if read.version is None else (read, refused)
        return found, refused

    def _unreadable(self, why: str) -> UnavailableError:
        return UnavailableError(f"topic {self.topic!r} at {self._url} cannot be read: {why}")

    def _wait(self, timeout_s: float) -> bool:
        """Wait for a message; returns whether one came. With nothing assigned, the consumer waits as well."""
        deadline = time.monotonic() + timeout_s
        while messages := received(self._consumer, 1, deadline):
            if not messages[0].error():
                return True
        return False


def _begins(low: int, high: int) -> Iterator[int]:
    """Offsets to read a partition from, each further from its end: usually the last message is wanted."""
    length = 1
    while high - length > low:
        yield high - length
        length *= 4
    yield low


def _version(message: Any) -> int | None:
    text = bytes(message.value() or b"")
    is_version = text.isdigit() and len(text) <= len(str(MAX_VERSION)) and 0 < int(text) <= MAX_VERSION
    return int(text) if is_version else None
