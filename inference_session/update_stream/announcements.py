"""Announced versions: which version of a model its servers are to serve, dense weights included.

Only a number travels, in decimal digits, on the topic `hotrow_versions.<model>`, partition 0, under one Kafka key, so
that brokers may drop all but the last. Where its files are is for whoever follows to know: a message cannot make
anybody read another place.
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any

from inference_session.errors import UnavailableError
from inference_session.platform.staging import MAX_VERSION
from inference_session.update_stream.kafka_client import Consumer, KafkaException, TopicPartition, create_client
from inference_session.update_stream.kafka_url import KafkaUrl
from inference_session.update_stream.topics import announcement_topic

KEY = b"version"
_BROKER_S = 10.0
_MAX_MESSAGES = 1000

_log = logging.getLogger(__name__)


class Announcements:
    """The announcements of one model; a context manager. The last one counts, also one from before."""

    def __init__(self, url: KafkaUrl, model: str) -> None:
        """Nothing is sent yet. ConfigurationError where an option of the URL is refused."""
        self._url = url
        self.topic = announcement_topic(model)
        """Name of the topic."""
        self._following = False
        # A group that nobody joins.
        settings = {"group.id": f"hotrow.{self.topic}", "enable.auto.commit": False}
        self._consumer = create_client(Consumer, url, settings)

    def newest(self, timeout_s: float) -> int | None:
        """The version announced last, if there is one since the last call; waits so long at most.

        Raises:
            UnavailableError: the brokers do not answer.
        """
        try:
            if not self._following:
                self._following = self._begin()
            # A consumer that has nothing assigned waits as well.
            messages = self._consumer.consume(_MAX_MESSAGES, timeout_s)
        except KafkaException as error:
            self._following = False
            raise UnavailableError(f"no Kafka broker answers at {self._url}: {error.args[0].str()}") from error
        self._following &= not any(message.error() for message in messages)  # a topic that is gone may come back
        versions = [_version(message) for message in messages if not message.error()]
        return next((version for version in reversed(versions) if version is not None), None)

    def close(self) -> None:
        """Hang up."""
        self._consumer.close()

    def __enter__(self) -> Announcements:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self) -> bool:
        """Begin with the last announcement; False: nobody has ever announced anything."""
        topics = self._consumer.list_topics(timeout=_BROKER_S).topics
        if self.topic not in topics:
            self._consumer.unassign()
            return False
        low, high = self._consumer.get_watermark_offsets(TopicPartition(self.topic, 0), timeout=_BROKER_S)
        self._consumer.assign([TopicPartition(self.topic, 0, max(low, high - 1))])
        return True


def _version(message: Any) -> int | None:
    text = bytes(message.value() or b"")
    if text.isdigit() and len(text) <= len(str(MAX_VERSION)) and 0 < int(text) <= MAX_VERSION:
        return int(text)
    _log.warning("an announcement of %r is refused: %r is no version's number", message.topic(), text[:40])
    return None
