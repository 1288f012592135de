"""Several servers that apply one stream to one Redis, without a RocksDB: no row becomes older, and none stays lost."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import confluent_kafka
import numpy as np
import pytest

from inference_session import InferenceSession
from inference_session.parameter_server.redis.store import RedisStore
from inference_session.rows.stored_writer import StoredWriter
from inference_session.tables.ordered_updates import OrderedUpdates, Outcome
from inference_session.update_stream import followed_partitions, kafka_stream
from inference_session.update_stream.encodings import encode_batch
from tests.testing.broker import Broker
from tests.testing.servers import PATIENCE_MS, PATIENCE_S, RedisServer, wait_until
from tests.testing.small_version import SmallVersion
from tests.testing.stored_model import push
from tests.testing.streamed_rows import FIRST_THAT_ABORTS, await_rows, packed, vectors

TABLE = "user.weight"


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A Redis of the test's own."""
    with RedisServer() as redis:
        yield redis


def serving(small: SmallVersion, redis: RedisServer, broker: Broker, **settings: Any) -> InferenceSession:
    """A server's session, which does not wait for updates when it is opened."""
    settings = {"volatile_store": redis.url, "store_timeout_ms": PATIENCE_MS, "catch_up_s": 0, **settings}
    return InferenceSession.open(small.directory, update_stream=broker.url, **settings)


def send(broker: Broker, small: SmallVersion, *rows: tuple[int, float | None]) -> None:
    """Publish rows, key and value, each as a message; None: the row is deleted."""
    messages = [(packed(k)[0], None if value is None else vectors(value).tobytes()) for k, value in rows]
    broker.send(small.topic("user_weight"), *messages)


def updates(session: InferenceSession) -> dict[str, Any]:
    found: dict[str, Any] = session.stats()["updates"]
    return found


def await_messages(session: InferenceSession, count: int) -> None:
    wait_until(lambda: updates(session)["messages"] == count, "the messages to be applied")


def evict(session: InferenceSession, keys: Sequence[int]) -> None:
    """Drop rows from the cache."""
    writer = session.rows.writer
    assert isinstance(writer, StoredWriter)
    writer._forget("user_weight", np.array(keys))


@contextlib.contextmanager
def others_paused(first: InferenceSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Streams of other sessions read one message at a time, and wait once they have applied one; yields what returns
    when one waits. They go on when the context ends.
    """
    waits, go_on = threading.Event(), threading.Event()
    change_caches = StoredWriter._change_caches

    def change_and_wait(writer: StoredWriter, *arguments: Any) -> None:
        change_caches(writer, *arguments)
        if threading.current_thread().name == "hotrow-update-stream" and writer is not first.rows.writer:
            waits.set()
            assert go_on.wait(PATIENCE_S)

    with monkeypatch.context() as patched:
        patched.setattr(kafka_stream, "TAKES", 1)
        patched.setattr(kafka_stream, "MAX_MESSAGES", 1)
        patched.setattr(StoredWriter, "_change_caches", change_and_wait)
        try:
            yield lambda: wait_until(waits.is_set, "a stream to have changed the caches")
        finally:
            go_on.set()


def test_a_server_that_starts_writes_no_older_rows(
    broker: Broker, small: SmallVersion, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the topic from its oldest message. A server that is further, and misses its cache then, keeps what it
    reads; so does the one that starts.
    """
    newest = [[200] * 4, [0] * 4]
    with serving(small, redis, broker) as first:
        send(broker, small, (1, 100), (2, 100), (1, 200), (2, None))
        await_messages(first, 4)
        with others_paused(first, monkeypatch) as await_pause, serving(small, redis, broker) as second:
            await_pause()
            for session in (first, second):
                evict(session, [1, 2])
                np.testing.assert_array_equal(session.lookup(TABLE, [1, 2]), newest)
        with serving(small, redis, broker) as second:
            while updates(second)["messages"] < 4:
                np.testing.assert_array_equal(second.lookup(TABLE, [1, 2]), newest)
            np.testing.assert_array_equal(second.lookup(TABLE, [1, 2]), newest)
        np.testing.assert_array_equal(first.lookup(TABLE, [1, 2]), newest)


def test_a_topic_is_followed_once_its_id_is_known(
    broker: Broker, small: SmallVersion, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that starts, and whose broker does not describe topics yet, applies nothing that it could not order."""
    send(broker, small, (1, 100), (2, 100), (1, 200))
    with serving(small, redis, broker) as first:
        await_messages(first, 3)
        with monkeypatch.context() as patched:
            patched.setattr(followed_partitions, "topic_ids", lambda *_: {})
            second = serving(small, redis, broker)
            wait_until(lambda: "no broker describes its topic" in (updates(second)["failure"] or ""), "a failure")
            assert updates(second)["topics"] == []
        await_messages(second, 3)
        assert updates(second)["failure"] is None
        np.testing.assert_array_equal(second.lookup(TABLE, [1, 2]), [[200] * 4, [100] * 4])
        second.close()


def test_a_server_that_lags_answers_what_the_other_has_written(
    broker: Broker, small: SmallVersion, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in its cache become no older by what it has yet to apply, and newer by it, though it writes nothing."""
    with serving(small, redis, broker) as first, contextlib.ExitStack() as opened:
        with others_paused(first, monkeypatch) as await_pause:
            second = opened.enter_context(serving(small, redis, broker))
            send(broker, small, (1, 100))
            await_pause()
            second.lookup(TABLE, [1, 2])
            send(broker, small, (1, 200), (2, 200), (1, 300))
            await_messages(first, 4)
            evict(second, [1])
            assert second.lookup(TABLE, [1])[0, 0] == 300
        while updates(second)["messages"] < 4:
            assert second.lookup(TABLE, [1])[0, 0] == 300
        np.testing.assert_array_equal(second.lookup(TABLE, [1, 2]), [[300] * 4, [200] * 4])


def test_a_topic_that_no_broker_describes_is_followed_in_the_end(
    broker: Broker, small: SmallVersion, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of brokers that give no ids: some clusters have no controller to ask."""
    monkeypatch.setattr(followed_partitions, "topic_ids", lambda *_: {})
    send(broker, small, (1, 100), (1, 200))
    with serving(small, redis, broker) as session:
        await_messages(session, 2)
        assert session.lookup(TABLE, [1])[0, 0] == 200
        wait_until(lambda: updates(session)["failure"] is None, "the topic to be read")


def test_large_messages_are_written_in_pieces(
    broker: Broker, small: SmallVersion, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis answers nobody else while a script writes. After small messages, many are taken at once."""
    sizes: list[int] = []
    apply = RedisStore.apply

    def note_size(store: RedisStore, table: str, updates: OrderedUpdates) -> Outcome:
        sizes.append(len(updates.all_keys))
        return apply(store, table, updates)

    monkeypatch.setattr(RedisStore, "apply", note_size)
    batches = [(None, encode_batch(np.arange(i, i + 1000), vectors(i, rows=1000))) for i in range(0, 40_000, 1000)]
    send(broker, small, *((key, 100) for key in range(600)))
    broker.send(small.topic("user_weight"), *batches)

    with serving(small, redis, broker) as session:
        await_messages(session, 640)

    assert max(sizes) < 2 * 1024


def test_what_redis_has_lost_is_applied_again(broker: Broker, small: SmallVersion, redis: RedisServer) -> None:
    """With the next message of the same part of the table: by every server, so that their caches have it too."""
    keys = np.arange(50)
    with serving(small, redis, broker) as first, serving(small, redis, broker) as second:
        for value in (100, 200):
            send(broker, small, *((int(key), value + int(key)) for key in keys))
            for session in (first, second):
                await_rows(session, TABLE, keys, value + keys[:, None])
            with redis.client() as client:
                client.flushall()
            send(broker, small, *((int(key), 1) for key in keys[:25]))
            for session in (first, second):
                evict(session, keys.tolist())
                await_rows(session, TABLE, keys[:25], 1)
                await_rows(session, TABLE, keys[25:], value + keys[25:, None])
        assert updates(first)["replays"] + updates(second)["replays"] >= 2


def test_updates_come_again_after_a_push(broker: Broker, small: SmallVersion, redis: RedisServer) -> None:
    """A push writes the rows of the files over them; a server that starts afterwards has them as well."""
    with serving(small, redis, broker) as first:
        send(broker, small, (1, 100), (2, None), (3, 100))
        await_rows(first, TABLE, [1, 3], 100)
        push(small.directory, redis.url)
        with serving(small, redis, broker) as second:
            await_rows(second, TABLE, [1, 3], 100)
            await_rows(second, TABLE, [2], 0)
        evict(first, [1, 2, 3])
        await_rows(first, TABLE, [1, 3], 100)


@pytest.mark.skipif(
    confluent_kafka.libversion()[1] >= FIRST_THAT_ABORTS,
    reason="this librdkafka aborts the process on what the broker of these tests says of a deleted topic",
)
def test_a_topic_made_anew_is_applied_by_all(small: SmallVersion, redis: RedisServer) -> None:
    """Its offsets begin again, below those of the notes. A server that starts later applies it too."""
    with Broker() as broker, serving(small, redis, broker) as first, serving(small, redis, broker) as second:
        send(broker, small, *((1, 100 + value) for value in range(20)), (2, 100))
        for session in (first, second):
            await_rows(session, TABLE, [1], 119)
        broker.delete_topic(small.topic("user_weight"))
        send(broker, small, (1, 200), (3, 200))
        for session in (first, second):
            evict(session, [1, 2, 3])
            await_rows(session, TABLE, [1, 3], 200)
        with serving(small, redis, broker) as third:
            await_messages(third, 2)
            for session in (first, second, third):
                evict(session, [1, 2, 3])
                np.testing.assert_array_equal(session.lookup(TABLE, [1, 2, 3])[:, 0], [200, 100, 200])
