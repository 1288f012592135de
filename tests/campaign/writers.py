"""Writers of rows: a trainer that publishes to the update stream, or a program that writes into the session."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from inference_session.errors import HotrowError, UnavailableError
from inference_session.update_stream import Publisher
from inference_session.urls.kafka_url import KafkaUrl
from tests.campaign.contents import MODEL, TABLES, Table
from tests.campaign.expectations import Content, Expectations
from tests.campaign.rows import Integers, encode
from tests.campaign.target import SessionTarget
from tests.campaign.topics import last_messages
from tests.testing.servers import PATIENCE_S, wait_until

_NUM_PARTITIONS = 4
"""As many as the broker gives to topics that a client's query creates. A topic that is created again must have as many
as before: else a key's messages are in two partitions, and in no order (update-rows.md, Order).
"""

_log = logging.getLogger(__name__)


class RowWriter(Protocol):
    """Changes rows of what serves. Methods other than `lock` are called while holding it."""

    lock: threading.RLock

    def write(self, serving: Content, table: Table, keys: Integers, *, delete: bool) -> None:
        """Change rows, or delete them, by the positions of their keys."""

    def flush(self) -> None:
        """Return when everything has been handed over."""


class StreamWriter:
    """Publishes rows. Rows that the broker refused, or confirmed and then lost, are published again."""

    def __init__(self, url: str, expectations: Expectations) -> None:
        self.lock = threading.RLock()
        self._url = url
        self._expectations = expectations
        self._publisher = self._create_publisher()
        self._serving: Content | None = None
        """The version that served at the last write of rows."""

    def write(self, serving: Content, table: Table, keys: Integers, *, delete: bool) -> None:
        """See RowWriter."""
        self._serving = serving
        try:
            self._send(serving, table, keys, delete=delete)
        except UnavailableError:  # an error of the broker's own: the publisher says that rows may be lost
            self._publish_all(serving)

    def flush(self) -> None:
        """See RowWriter."""
        try:
            self._publisher.flush()
        except UnavailableError:
            assert self._serving is not None
            self._publish_all(self._serving)

    def lose(self, serving: Content, lose: Callable[[], None]) -> None:
        """Lose topics by `lose`, and publish every row that was ever published once more, as a trainer would. This
        broker sometimes loses confirmed messages of topics that were just created again; then all of it is repeated.
        """

        def is_done() -> bool:
            lose()
            self._publish_all(serving)
            missing = self.missing(serving)
            if missing:
                _log.warning("the broker lost %d confirmed messages: %s", len(missing), missing[:3])
            return not missing

        with self.lock:
            wait_until(is_done, "topics that have all rows")

    def missing(self, serving: Content) -> list[str]:
        """Rows whose newest write a new client does not find in the topics, as texts. Called while holding `lock`."""
        held = last_messages(self._url, [topic_of(table) for table in TABLES])
        found: list[str] = []
        for table in TABLES:
            history = self._expectations.history(serving.version, table)
            for key in np.flatnonzero(history.begun).tolist():
                number = int(history.begun[key])
                value = held[topic_of(table)].get(table.keys[key].tobytes(), b"")
                is_held = value is None if history.is_missing(key, number) else value == _value(table, key, number)
                found += [] if is_held else [f"the topic lacks write {number} of {table.name}, position {key}"]
        return found

    def _publish_all(self, serving: Content) -> None:
        wait_until(lambda: self._publish_again(serving), "all rows to be published once more")

    def _publish_again(self, serving: Content) -> bool:
        """Whether the broker has accepted all rows; one that has just lost its topics may refuse some."""
        with contextlib.suppress(HotrowError):  # what was queued is as lost as what was in the topics
            self._publisher.close()
        try:
            self._publisher = self._create_publisher()
            for table in TABLES:
                published = np.flatnonzero(self._expectations.history(serving.version, table).begun)
                self._send(serving, table, published, delete=False)
            self._publisher.flush()
        except (HotrowError, KafkaException):
            return False
        return True

    def _send(self, serving: Content, table: Table, keys: Integers, *, delete: bool) -> None:
        numbers = self._expectations.begin_write(serving.version, table, keys, delete=delete)
        if delete:
            self._publisher.delete(table.name, table.keys[keys])
        else:
            self._publisher.publish(table.name, table.keys[keys], encode(table.number, keys, 0, numbers))

    def _create_publisher(self) -> Publisher:
        admin = AdminClient({"bootstrap.servers": ",".join(KafkaUrl.parse(self._url).brokers), "log_level": 0})
        wanted = [NewTopic(topic_of(table), _NUM_PARTITIONS, 1) for table in TABLES]
        errors = [made.exception() for made in admin.create_topics(wanted, request_timeout=PATIENCE_S).values()]
        for error in filter(None, errors):
            if not isinstance(error, KafkaException) or error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise error
        return Publisher(self._url, MODEL, timeout_s=PATIENCE_S)


def topic_of(table: Table) -> str:
    """The topic of a table's updates."""
    return f"hps_et.{MODEL}.{table.name}"


def _value(table: Table, key: int, number: int) -> bytes:
    """Of the message of a write."""
    return encode(table.number, np.array([key]), 0, number).tobytes()


class DirectWriter:
    """Writes into the session that serves."""

    def __init__(self, target: SessionTarget, expectations: Expectations, may_fail: Callable[[], bool]) -> None:
        """`may_fail`: whether the store that keeps rows is faulty now."""
        self.lock = threading.RLock()
        self._target = target
        self._expectations = expectations
        self._may_fail = may_fail
        self._was_refused = False
        """A write since the persistent store was faulty: it may take seconds to take writes again (use-stores.md)."""

    def write(self, serving: Content, table: Table, keys: Integers, *, delete: bool) -> None:
        """See RowWriter. What a faulty store refuses is in doubt until it is written again."""
        numbers = self._expectations.begin_write(serving.version, table, keys, delete=delete)
        session, was_faulty = self._target.session, self._may_fail()
        try:
            if delete:
                session.erase(table.name, table.keys[keys])
            else:
                session.update(table.name, table.keys[keys], encode(table.number, keys, serving.tag, numbers))
        except UnavailableError:
            self._expectations.doubt(serving.version, table, keys)
            self._was_refused |= was_faulty or self._may_fail()  # it may have healed while the write waited for it
            if not self._was_refused:
                raise
        else:
            self._was_refused = was_faulty or self._may_fail()
            self._expectations.acknowledge(serving.version, table, keys, numbers)

    def flush(self) -> None:
        """See RowWriter. Each write has been done when it returns."""
