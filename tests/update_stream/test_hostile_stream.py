"""Random publishers, topics, brokers and restarts of servers: in the end every row is the last one in its topic."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import confluent_kafka
import numpy as np
import pytest
from confluent_kafka.admin import NewTopic

from inference_session import InferenceSession
from inference_session.parameter_server.create import create_store
from inference_session.parameter_server.namespace import Namespace
from inference_session.update_stream import Publisher
from inference_session.update_stream.encodings import decode, encode_batch
from inference_session.update_stream.publisher import crc32
from tests.testing.broker import Broker
from tests.testing.servers import PATIENCE_MS, PATIENCE_S, RedisServer, wait_until
from tests.testing.small_version import SmallVersion
from tests.testing.stored_model import DIMS, push
from tests.testing.streamed_rows import DEFAULT, FIRST_THAT_ABORTS, packed

NUM_KEYS = 300
NUM_STEPS = 25
TABLE, DIM = "hashed", 2
POISON = [(None, None), (b"abc", b"x"), (packed(1)[0], b"\0" * 5), (None, b"HCTR"), (None, b"junk" * 9), (b"", b"")]


class Hostile:
    """One broker, one RocksDB, one Redis, up to two sessions, and everything that may happen to them."""

    def __init__(self, seed: int, broker: Broker, redis: RedisServer, small: SmallVersion, database: str) -> None:
        self.random, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.broker, self.redis, self.small, self.database = broker, redis, small, database
        self.topic = small.topic(TABLE)
        self.sessions: list[InferenceSession] = []
        self.sent: dict[int, set[tuple[float, ...]]] = {
            key: {tuple(DEFAULT), tuple(row)}
            for key, row in zip(small.tables["hashed/key"].tolist(), small.tables[TABLE].tolist(), strict=True)
        }
        """By key, whatever it has ever been made to be."""
        self.log: list[str] = []

    def run(self) -> None:
        """Take random steps, now and then until all is applied."""
        steps: list[tuple[Callable[[], None], int]] = [
            (self.publish, 12),
            (self.poison, 4),
            (self.repeat, 3),
            (self.huge, 1),
            (self.delete_topic, 3),
            (self.make_topic_anew_at_once, 3),
            (self.restart_broker, 2),
            (self.open, 5),
            (self.close, 4),
            (self.settle, 4),
        ]
        try:
            for step in self.random.choices([s for s, _ in steps], [weight for _, weight in steps], k=NUM_STEPS):
                self.log.append(step.__name__)
                step()
            if not self.sessions:
                self.open()
            self.settle()
            wait_until(lambda: not self.updates(0)["lag_messages"], "all to be applied")
            self.check_stores()
        finally:
            while self.sessions:
                self.sessions.pop().close()

    def publish(self) -> None:
        """Rows and deletions, by one publisher or by two at once, whose rows are of the same keys."""
        with contextlib.ExitStack() as stack:
            publishers = []
            for _ in range(self.random.randint(1, 2)):
                encoding = self.random.choice(["row", "batch"])
                publishers.append(stack.enter_context(Publisher(self.broker.url, self.small.model, encoding=encoding)))
            for _ in range(self.random.randint(1, 6)):
                for publisher in publishers:
                    keys = self.numbers.integers(0, NUM_KEYS, self.random.randint(1, 200))
                    publisher.publish(TABLE, keys, self.rows(keys))
                    if self.random.random() < 0.3:
                        publisher.delete(TABLE, keys[:5])

    def rows(self, keys: Any) -> Any:
        vectors = self.numbers.standard_normal((len(keys), DIM), np.float32)
        for key, vector in zip(keys.tolist(), vectors, strict=True):
            self.sent.setdefault(key, {tuple(DEFAULT)}).add(tuple(vector.tolist()))
        return vectors

    def poison(self) -> None:
        self.broker.send(self.topic, *self.random.choices(POISON, k=self.random.randint(1, 20)), partition=0)

    def repeat(self) -> None:
        """Some of the messages that there are come again, in their order, as of a producer that tries again."""
        if self.topic in self.topics():
            last = self.broker.messages(self.topic)[-50:]
            for message in last:
                self.broker.send(self.topic, (message.key(), message.value()), partition=message.partition())

    def huge(self) -> None:
        """Most of a megabyte in one message, of rows of one partition."""
        count = self.topics().get(self.topic, 0)
        if count:
            keys = np.arange(NUM_KEYS)[crc32(np.arange(NUM_KEYS)) % np.uint32(count) == 0]
            keys = np.tile(keys, 50_000 // max(len(keys), 1))
            self.broker.send(self.topic, (None, encode_batch(keys, self.rows(keys))), partition=0)

    def delete_topic(self) -> None:
        if self.topic in self.topics():
            self.broker.delete_topic(self.topic)

    def make_topic_anew_at_once(self) -> None:
        """With another number of partitions, and with more rows than before or fewer."""
        self.delete_topic()
        admin = self.broker.admin()
        new = NewTopic(self.topic, num_partitions=self.random.randint(1, 6), replication_factor=1)
        admin.create_topics([new])[self.topic].result(PATIENCE_S)
        self.publish()

    def restart_broker(self) -> None:
        """It comes back empty, at once or after sessions have noticed its absence."""
        self.broker.stop()
        if self.sessions and self.random.random() < 0.5:
            wait_until(lambda: self.updates(0)["failure"] is not None, "the outage to be noticed")
        self.broker.start()
        self.publish()

    def open(self) -> None:
        if len(self.sessions) < 2:
            settings = {"volatile_store": self.redis.url, "persistent_store": self.database}
            limits = {"store_timeout_ms": PATIENCE_MS, "catch_up_s": self.random.choice([0, 1])}
            session = InferenceSession.open(
                self.small.directory,
                update_stream=self.broker.url,
                **settings,
                **limits,
                cache_bytes=self.random.choice([0, 1 << 20]),
            )
            self.sessions.append(session)

    def close(self) -> None:
        if self.sessions:
            self.sessions.pop(self.random.randrange(len(self.sessions))).close()

    def settle(self) -> None:
        """Every session serves the last row of every key of the topic; of other keys some earlier row."""
        expected = self.expected()
        keys = np.array(sorted(self.sent), np.int64)
        for number, session in enumerate(self.sessions):
            try:
                wait_until(lambda n=number: not self.wrong(n, keys, expected), "rows to be those of the topic")
            except AssertionError as late:  # noqa: PERF203
                wrong = self.wrong(number, keys, expected)
                told = {key: expected.get(key, self.sent[key]) for key, _ in wrong[:3]}
                raise AssertionError(
                    f"{len(wrong)} rows: {wrong[:3]}, not {told}; {self.log}; {session.stats()}"
                ) from late

    def wrong(self, number: int, keys: Any, expected: dict[int, tuple[float, ...] | None]) -> list[Any]:
        if not len(keys):
            return []
        rows = self.sessions[number].lookup(TABLE, keys)
        return [
            found
            for found in zip(keys.tolist(), map(tuple, rows.tolist()), strict=True)
            if not self.fits(*found, expected)
        ]

    def fits(self, key: int, row: tuple[float, ...], expected: dict[int, tuple[float, ...] | None]) -> bool:
        if key in expected:
            return row == (expected[key] or tuple(DEFAULT))
        return row in self.sent[key]

    def expected(self) -> dict[int, tuple[float, ...] | None]:
        """The rows of the topic now, read by a plain consumer; None: deleted."""
        messages = self.broker.messages(self.topic) if self.topic in self.topics() else []
        updates = decode([(message.key(), message.value()) for message in messages], DIM)
        rows = dict(zip(updates.keys.tolist(), map(tuple, updates.vectors.tolist()), strict=True))
        return {**rows, **dict.fromkeys(updates.deleted.tolist())}

    def check_stores(self) -> None:
        """Redis and RocksDB hold exactly the rows that are served."""
        expected = self.expected()
        keys = np.array(sorted(expected), np.int64)
        for url in (self.redis.url, self.database):
            with create_store(url, Namespace(self.small.model, "1"), DIMS, timeout_ms=PATIENCE_MS) as store:
                rows = np.zeros((len(keys), DIM), np.float32)
                found = store.fetch(TABLE, keys, rows)
                for key, is_there, row in zip(keys.tolist(), found, rows.tolist(), strict=True):
                    if is_there or url == self.database:
                        assert (tuple(row) if is_there else None) == expected[key], (url, key, self.log)

    def topics(self) -> dict[str, int]:
        found = self.broker.admin().list_topics(timeout=PATIENCE_S).topics
        return {name: len(topic.partitions) for name, topic in found.items() if topic.error is None}

    def updates(self, number: int) -> dict[str, Any]:
        return self.sessions[number].stats()["updates"]


@pytest.mark.slow
@pytest.mark.skipif(
    confluent_kafka.libversion()[1] >= FIRST_THAT_ABORTS,
    reason="this librdkafka aborts the process on what the broker of these tests says of a deleted topic",
)
@pytest.mark.parametrize("seed", range(2))
def test_every_row_is_the_last_one_of_its_topic(seed: int, small: SmallVersion, tmp_path: Path) -> None:
    """Whatever publishers, brokers and servers did."""
    database = f"rocksdb://{tmp_path}/db"
    push(small.directory, database)
    with Broker() as broker, RedisServer() as redis:
        Hostile(seed, broker, redis, small, database).run()
