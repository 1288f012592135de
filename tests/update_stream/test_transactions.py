"""Publishers that use transactions, and offsets without a message: at the end each row is the last one that counts."""

from __future__ import annotations

import random
import struct
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from inference_session import InferenceSession
from inference_session.update_stream import followed_partitions
from inference_session.update_stream.announcements import KEY, Announcements
from inference_session.urls.kafka_url import KafkaUrl
from tests.testing.servers import wait_until
from tests.testing.small_version import SmallVersion
from tests.testing.stored_model import push
from tests.testing.streamed_rows import DEFAULT, await_rows, packed
from tests.testing.transaction_broker import NO_TRANSACTION, TransactionBroker

NUM_STEPS = 60
KEYS = range(1000, 1020)


class Publishers:
    """Some that use transactions and one that does not, the sessions that follow them, and what counts."""

    def __init__(self, seed: int, broker: TransactionBroker, small: SmallVersion, settings: dict[str, str]) -> None:
        self.random, self.broker = random.Random(seed), broker
        self.small, self.settings, self.topic = small, {"update_stream": broker.url, **settings}, small.topic("hashed")
        self.value = 0
        self.session: InferenceSession | None = None
        self.pending: defaultdict[int, list[tuple[int, int, list[float]]]] = defaultdict(list)
        """By transaction: offsets, keys and rows."""
        self.ended: list[tuple[int, int, list[float]]] = []
        """Those that count."""

    def run(self) -> None:
        """Take random steps, then end all transactions, and wait until each row is the last one that counts."""
        steps: list[Callable[[], None]] = [self.send] * 10 + [self.end_one] * 6
        steps += [self.compact, self.open, self.close, self.settle]
        try:
            for step in self.random.choices(steps, k=NUM_STEPS):
                step()
            while self.pending:
                self.end_one()
            self.compact()
            self.open()
            self.settle()
            assert self.session is not None
            updates = self.session.stats()["updates"]
            assert (updates["missed_messages"], sum(updates["rejected"].values())) == (0, 0)
        finally:
            self.close()

    def send(self) -> None:
        """Some rows and deletions, by one of the publishers."""
        transaction = self.random.choice([NO_TRANSACTION, NO_TRANSACTION, 1, 2, 3])
        messages, begin = [], self.broker.end(self.topic)
        for offset in range(begin, begin + self.random.randint(1, 5)):
            key, self.value, is_gone = self.random.choice(KEYS), self.value + 1, self.random.random() < 0.2
            row = DEFAULT if is_gone else [float(self.value), -1.0]
            messages.append((packed(key)[0], None if is_gone else struct.pack("<2f", *row)))
            self.pending[transaction].append((offset, key, row))
        self.broker.send(self.topic, *messages, transaction=transaction)
        self.ended += self.pending.pop(NO_TRANSACTION, [])

    def end_one(self) -> None:
        """Commit or abort one of the open transactions."""
        if self.pending:
            transaction = self.random.choice(list(self.pending))
            messages = self.pending.pop(transaction)
            if self.random.random() < 0.5:
                self.broker.commit(self.topic, transaction)
                self.ended += messages
            else:
                self.broker.abort(self.topic, transaction)

    def compact(self) -> None:
        """Drop what does not count."""
        if not self.pending:
            self.broker.compact(self.topic)

    def open(self) -> None:
        """Follow the topic, from where the last session has ended if rows are kept."""
        self.session = self.session or InferenceSession.open(self.small.directory, **self.settings)

    def close(self) -> None:
        """Follow it no more."""
        if self.session is not None:
            self.session.close()
            self.session = None

    def settle(self) -> None:
        """Wait until all is applied that brokers give: what came before the first open transaction."""
        if self.session is not None:
            begin = min((messages[0][0] for messages in self.pending.values()), default=self.broker.end(self.topic))
            rows = {key: row for offset, key, row in sorted(self.ended) if offset < begin}
            await_rows(self.session, "hashed", list(KEYS), np.array([rows.get(key, DEFAULT) for key in KEYS]))


@pytest.mark.parametrize("seed", range(6))
def test_every_row_is_the_last_one_that_counts(
    seed: int, small: SmallVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without ids of topics, with rows that are kept and not, over random sessions and compactions."""
    topic_id = "" if seed % 2 else "id"
    monkeypatch.setattr(followed_partitions, "topic_ids", lambda _, topics, __: dict.fromkeys(topics, topic_id))
    settings = {}
    if seed % 3:
        settings["persistent_store"] = f"rocksdb://{tmp_path}/db"
        push(small.directory, settings["persistent_store"])
    with TransactionBroker() as broker:
        Publishers(seed, broker, small, settings).run()


def test_an_open_transaction_delays_what_comes_after_it(small: SmallVersion) -> None:
    """Brokers hold messages back until it has ended. `lag_messages` counts them."""
    topic, row = small.topic("hashed"), struct.pack("<2f", 1, 1)
    with TransactionBroker() as broker:
        broker.send(topic, (packed(1001)[0], row))
        broker.send(topic, (packed(1002)[0], row), transaction=1)
        broker.send(topic, (packed(1003)[0], row))
        with InferenceSession.open(small.directory, update_stream=broker.url) as session:
            await_rows(session, "hashed", [1001, 1002, 1003], [[1, 1], DEFAULT, DEFAULT])
            wait_until(lambda: session.stats()["updates"]["lag_messages"] == 2, "the messages after it to be counted")
            broker.abort(topic, 1)
            await_rows(session, "hashed", [1001, 1002, 1003], [[1, 1], DEFAULT, [1, 1]])
            wait_until(lambda: session.stats()["updates"]["lag_messages"] == 0, "the marker to be counted as read")


def test_announcements_in_transactions(small: SmallVersion) -> None:
    """The last one that was committed counts, although markers and an aborted one come after it."""
    with TransactionBroker() as broker, Announcements(KafkaUrl.parse(broker.url), small.model) as announcements:
        broker.send(announcements.topic, (KEY, b"4"), transaction=1)
        broker.commit(announcements.topic, 1)
        for version in range(5, 25):
            broker.send(announcements.topic, (KEY, b"%d" % version), transaction=2)
            broker.abort(announcements.topic, 2)
        assert announcements.newest(0.1) == 4
        broker.send(announcements.topic, (KEY, b"3"), transaction=1)
        assert announcements.newest(0.1) is None
        broker.commit(announcements.topic, 1)
        wait_until(lambda: announcements.newest(0.1) == 3, "the announcement to be committed")
