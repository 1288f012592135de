"""A session that follows the topics of a real broker."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import shutil
import signal
import threading
import weakref
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import confluent_kafka
import numpy as np
import pytest

from inference_session import InferenceSession
from inference_session.errors import ConfigurationError, UnavailableError
from inference_session.execution.upkeep import SessionUpkeep
from inference_session.model_spec import TABLES_FOLDER
from inference_session.parameter_server.create import create_store
from inference_session.parameter_server.namespace import Namespace
from inference_session.rows.base import look_up_keys
from inference_session.update_stream import Publisher, followed_partitions, kafka_stream, store_retries, update_applier
from inference_session.update_stream.encodings import encode_batch
from inference_session.versions import VersionManager
from tests.testing import small_model
from tests.testing.broken_handler import BrokenHandler
from tests.testing.broker import Broker
from tests.testing.clocks import ConsumerWhileSetBack
from tests.testing.proxy import Network, Proxy
from tests.testing.servers import PATIENCE_MS, PATIENCE_S, RedisServer, wait_until
from tests.testing.small_version import SmallVersion
from tests.testing.stored_model import DIMS, push
from tests.testing.streamed_rows import DEFAULT, FIRST_THAT_ABORTS, await_rows, packed, vectors


def rejected(session: InferenceSession) -> dict[str, int]:
    return {reason: count for reason, count in session.stats()["updates"]["rejected"].items() if count}


def test_updates_come_in_front_of_table_files(broker: Broker, small: SmallVersion) -> None:
    """Both topics, both encodings; rows of numbers also when counted from the end; deletions; float16 tables."""
    hashed = small.tables["hashed/key"]
    with InferenceSession.open(small.directory, update_stream=broker.url) as session:
        with Publisher(broker.url, small.model) as publisher:
            publisher.publish("user.weight", [3, 49, 60], vectors(7, rows=3))
            publisher.publish("code", np.array([1], np.int16), np.full((1, 3), 70000.0))
            publisher.delete("hashed", hashed[:2])
        with Publisher(broker.url, small.model, encoding="batch") as publisher:
            publisher.publish("hashed", hashed[2:], vectors(2, rows=len(hashed) - 2, dim=2))
        broker.send(small.topic("user_weight", "hctr_et"), (packed(5)[0][:4], vectors(5).tobytes()))

        await_rows(session, "user.weight", [3, 49, 60, -1], 7)
        await_rows(session, "user.weight", [5, 5 - 50], 5)
        await_rows(session, "code", [1], 70000)
        await_rows(session, "hashed", hashed[:2], DEFAULT)
        await_rows(session, "hashed", hashed[2:], 2)
        np.testing.assert_array_equal(session.lookup("user.weight", [4]), small.tables["user_weight"][[4]])


def test_requests_see_updates_and_count_deleted_keys(broker: Broker, small: SmallVersion) -> None:
    """Pooled, joined and plain look-ups all read the updated rows; a deleted key is an unknown one."""
    tables, deleted = dict(small.tables), small.tables["hashed/key"][3]
    with InferenceSession.open(small.directory, update_stream=broker.url) as session:
        with Publisher(broker.url, small.model) as publisher:
            publisher.publish("user.weight", np.arange(25), vectors(3, rows=25))
            publisher.publish("hashed", tables["hashed/key"][:3], vectors(4, rows=3, dim=2))
            publisher.delete("hashed", [deleted])
        await_rows(session, "hashed", [deleted], DEFAULT)
        await_rows(session, "hashed", tables["hashed/key"][:3], 4)
        await_rows(session, "user.weight", np.arange(25), 3)
        tables["user_weight"] = np.concatenate([vectors(3, rows=25), tables["user_weight"][25:]])
        hashed = tables["hashed"].copy()
        hashed[:3], hashed[3] = 4, DEFAULT
        tables["hashed"] = hashed
        for seed in range(20):
            inputs = small_model.random_inputs(50, np.random.default_rng(seed), num_items=4)
            inputs["items"][:, 0] = tables["hashed/key"][np.abs(tables["hashed/key"]) < 2**31][0]
            for name, answer in small_model.expected(tables, inputs).items():
                np.testing.assert_allclose(session.run(inputs)[name], answer, atol=1e-5, rtol=1e-5)

        before = session.stats()["tables"]["hashed"]["default_vectors"]
        inputs = small_model.random_inputs(6, np.random.default_rng(0), num_items=3)
        inputs["items"][:] = next(key for key in tables["hashed/key"][4:] if abs(key) < 2**31)
        session.run(inputs)
        assert session.stats()["tables"]["hashed"]["default_vectors"] == before


def test_updates_go_on_though_one_that_is_rejected_cannot_be_logged(broker: Broker, small: SmallVersion) -> None:
    """A handler of the application that raises ended the stream."""
    handler = BrokenHandler()
    logging.getLogger("inference_session").addHandler(handler)
    try:
        with InferenceSession.open(small.directory, update_stream=broker.url) as session:
            broker.send(small.topic("user_weight", "hctr_et"), (b"abc", vectors(5).tobytes()))
            wait_until(lambda: any(rejected(session).values()), "it to be rejected")
            with Publisher(broker.url, small.model) as publisher:
                publisher.publish("user.weight", [3], vectors(7))

            await_rows(session, "user.weight", [3], 7)
    finally:
        logging.getLogger("inference_session").removeHandler(handler)


def test_updates_never_tear_or_hide_rows(broker: Broker, small: SmallVersion) -> None:
    """While the updated rows grow and are replaced, every look-up finds each row whole, old or new."""
    num_keys = 3000
    with InferenceSession.open(small.directory, update_stream=broker.url) as session:
        source = session.rows.writer
        source.update(
            "user_weight",
            np.arange(num_keys),
            np.repeat(np.arange(1, 2, dtype=np.float32), num_keys)[:, None] * vectors(1),
        )
        done, failures = threading.Event(), []

        def look() -> None:
            keys, last = np.arange(num_keys), 0.0
            while not done.is_set():
                rows = session.lookup("user.weight", keys)
                if not (rows == rows[:, :1]).all() or rows.min() < last:
                    failures.append(rows)
                last = float(rows.min())

        readers = [threading.Thread(target=look) for _ in range(2)]
        for reader in readers:
            reader.start()
        for value in range(2, 60):
            source.update("user_weight", np.arange(num_keys), vectors(value, rows=num_keys))
            source.update("user_weight", np.arange(num_keys * value, num_keys * value + 500), vectors(value, rows=500))
        done.set()
        for reader in readers:
            reader.join()
        assert not failures
        assert (session.lookup("user.weight", np.arange(num_keys)) == 59).all()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers, and other writers of a store, may take as long as a busy machine needs."""
    monkeypatch.setattr(followed_partitions, "BROKER_TIMEOUT_S", PATIENCE_S / 2)
    monkeypatch.setattr(update_applier, "FOLLOW_TIMEOUT_S", PATIENCE_S / 2)


def test_the_stream_is_replayed_where_nothing_is_durable(broker: Broker, small: SmallVersion, patience: None) -> None:
    """Before `open` returns, in the order of the stream, and nothing is committed."""
    with Publisher(broker.url, small.model) as publisher:
        for value in range(5):
            publisher.publish("user.weight", [1, 2], vectors(value, rows=2))
        publisher.delete("user.weight", [2])
    for _ in range(2):
        with InferenceSession.open(small.directory, update_stream=broker.url, catch_up_s=PATIENCE_S) as session:
            np.testing.assert_array_equal(session.lookup("user.weight", [1]), vectors(4))
            np.testing.assert_array_equal(session.lookup("user.weight", [2]), vectors(0))
            assert session.stats()["updates"]["lag_messages"] == 0
    assert not broker.committed(small.model)


def test_poison_is_set_aside(broker: Broker, small: SmallVersion, caplog: pytest.LogCaptureFixture) -> None:
    """Each bad message is counted by its reason, kept with a text, and logged once; good ones go on."""
    topic, hashed = small.topic("user_weight"), small.topic("hashed")
    good = (packed(1)[0], vectors(1).tobytes())
    with InferenceSession.open(small.directory, update_stream=broker.url) as session:
        nan = vectors(1)
        nan[0, 2] = np.nan
        broker.send(topic, good, (packed(2)[0], nan.tobytes()), (packed(3)[0], b"\0" * 12), (b"abc", b"\0" * 16))
        broker.send(
            topic, (None, b"HCTR"), (None, b"junk" * 9), (None, encode_batch(np.arange(2), vectors(1, rows=2))[:-3])
        )
        broker.send(topic, (packed(-4)[0], vectors(1).tobytes()), (None, None), (None, b"HCTR\x10\0\0\0"))
        broker.send(topic, *[(b"x", b"y")] * 200)
        broker.send(small.topic("nobody"), good, good)
        broker.send(hashed, (packed(-4)[0], vectors(6, dim=2).tobytes()))
        broker.send(topic, (packed(9)[0], vectors(9).tobytes()))

        await_rows(session, "user.weight", [9], 9)
        await_rows(session, "user.weight", [1], 1)
        await_rows(session, "hashed", [-4], 6)
        counts = {"no_key": 1, "key_width": 202, "vector_width": 1, "unknown_encoding": 1, "truncated": 2}
        wait_until(lambda: rejected(session) == {**counts, "not_finite": 1, "unknown_table": 2}, "all to be counted")
        assert len(session.stats()["updates"]["set_aside"]) == 100
        np.testing.assert_array_equal(
            session.lookup("user.weight", [2, 3, -4]), small.tables["user_weight"][[2, 3, -4]]
        )
    refusals = [record for record in caplog.records if "an update was rejected" in record.getMessage()]
    assert len(refusals) == 7


def test_non_finite_rows_can_be_asked_for(broker: Broker, small: SmallVersion) -> None:
    """With the setting, they are rows as any other."""
    with InferenceSession.open(small.directory, update_stream=broker.url, non_finite_updates="apply") as session:
        broker.send(small.topic("user_weight"), (packed(2)[0], vectors(np.inf).tobytes()))
        await_rows(session, "user.weight", [2], np.inf)


def test_topics_are_filtered(broker: Broker, small: SmallVersion) -> None:
    """Only those that the regular expression matches are followed."""
    settings = {"update_stream": broker.url, "update_filter": r"^hps_et\..*\.user_weight$"}
    with InferenceSession.open(small.directory, **settings) as session:
        broker.send(small.topic("user_weight", "hctr_et"), (packed(2)[0], vectors(8).tobytes()))
        broker.send(small.topic("hashed"), (packed(2)[0], vectors(8, dim=2).tobytes()))
        broker.send(small.topic("user_weight"), (packed(2)[0], vectors(2).tobytes()))
        await_rows(session, "user.weight", [2], 2)
        assert session.stats()["updates"]["topics"] == [small.topic("user_weight")]
    with pytest.raises(ConfigurationError, match="'update_filter' cannot be"):
        InferenceSession.open(small.directory, update_stream=broker.url, update_filter="(")


def test_updates_before_a_moment_are_passed_over(broker: Broker, small: SmallVersion) -> None:
    """A version that was trained on them keeps its own rows, and gets the later ones."""
    topic, other = small.topic("user_weight"), small.topic("hashed")
    old = [(packed(key)[0], vectors(9).tobytes()) for key in (1, 2)]
    broker.send(topic, *old)
    broker.send(other, (packed(int(small.tables["hashed/key"][0]))[0], vectors(9, dim=2).tobytes()))
    (first,) = broker.messages(other)
    moment = datetime.fromtimestamp((first.timestamp()[1] + 1) / 1000, timezone.utc)
    wait_until(lambda: datetime.now(timezone.utc) > moment, "the moment to be over")
    broker.send(topic, (packed(3)[0], vectors(3).tobytes()))
    with InferenceSession.open(small.directory, update_stream=broker.url, update_since=moment.isoformat()) as session:
        await_rows(session, "user.weight", [3], 3)
        broker.send(other, (packed(8)[0], vectors(8, dim=2).tobytes()))
        await_rows(session, "hashed", [8], 8)
        np.testing.assert_array_equal(session.lookup("user.weight", [1, 2]), small.tables["user_weight"][[1, 2]])
        np.testing.assert_array_equal(
            session.lookup("hashed", small.tables["hashed/key"][:1]), small.tables["hashed"][:1]
        )
        wait_until(lambda: not session.stats()["updates"]["lag_messages"], "the old messages to count as read")
    with pytest.raises(ConfigurationError, match="'update_since' cannot be 'yesterday'; allowed: a date and time"):
        InferenceSession.open(small.directory, update_stream=broker.url, update_since="yesterday")


def test_new_rows_of_a_clock_that_was_set_back_are_applied(
    broker: Broker, small: SmallVersion, caplog: pytest.LogCaptureFixture
) -> None:
    """Their dates say that the version has learned them; they lie behind a newer row, or came after it was opened."""
    moment = datetime.now(timezone.utc)
    topic, other = small.topic("user_weight"), small.topic("hashed")
    before, after = moment - timedelta(days=1), moment + timedelta(seconds=1)
    broker.send_dated(topic, before, (packed(1)[0], vectors(9).tobytes()))
    broker.send_dated(topic, after, (packed(2)[0], vectors(2).tobytes()))
    broker.send_dated(topic, before, (packed(3)[0], vectors(3).tobytes()))
    old = packed(int(small.tables["hashed/key"][0]))[0], vectors(9, dim=2).tobytes()
    broker.send_dated(other, before, old)
    broker.send_dated(other, before - timedelta(hours=1), old)
    with InferenceSession.open(
        small.directory, update_stream=broker.url, update_since=moment.isoformat(), catch_up_s=PATIENCE_S
    ) as session:
        np.testing.assert_array_equal(session.lookup("user.weight", [2, 3])[:, 0], [2, 3])
        broker.send_dated(other, before, (packed(8)[0], vectors(8, dim=2).tobytes()))
        await_rows(session, "hashed", [8], 8)
        np.testing.assert_array_equal(session.lookup("user.weight", [1]), small.tables["user_weight"][[1]])
        np.testing.assert_array_equal(
            session.lookup("hashed", small.tables["hashed/key"][:1]), small.tables["hashed"][:1]
        )
    for name, offset, what in ((topic, 2, "applied"), (other, 1, "passed over"), (other, 2, "applied")):
        said = f"topic {name!r}, partition 0: the message at offset {offset} is dated before"
        assert len([text for text in caplog.messages if said in text and f"it is {what}" in text]) == 1


def test_duplicates_and_old_rows_that_come_again_do_no_harm(broker: Broker, small: SmallVersion) -> None:
    """The order in the topic counts: after a repetition the last row is the last one again."""
    sent = [(packed(i % 3)[0], vectors(i).tobytes()) for i in range(9)]
    with InferenceSession.open(small.directory, update_stream=broker.url) as session:
        broker.send(small.topic("user_weight"), *sent)
        broker.send(small.topic("user_weight"), *sent[:4], *sent)
        wait_until(lambda: session.stats()["updates"]["messages"] == 22, "all to be read")
        np.testing.assert_array_equal(session.lookup("user.weight", [0, 1, 2])[:, 0], [6, 7, 8])


@pytest.mark.skipif(
    confluent_kafka.libversion()[1] >= FIRST_THAT_ABORTS,
    reason="this librdkafka aborts the process on what the broker of these tests says of a deleted topic",
)
def test_a_vanished_topic_is_survived(broker: Broker, small: SmallVersion) -> None:
    """Its rows stay, the loss shows, and when it is back it is read from its beginning."""
    topic = small.topic("user_weight")
    with InferenceSession.open(small.directory, update_stream=broker.url) as session:
        broker.send(topic, (packed(1)[0], vectors(1).tobytes()), (packed(2)[0], vectors(2).tobytes()))
        await_rows(session, "user.weight", [2], 2)
        broker.delete_topic(topic)
        wait_until(lambda: not session.stats()["updates"]["topics"], "the loss to be noticed")
        np.testing.assert_array_equal(session.lookup("user.weight", [1]), vectors(1))
        broker.send(topic, (packed(3)[0], vectors(3).tobytes()))
        await_rows(session, "user.weight", [3], 3)


def test_rows_of_a_closed_session_are_gone_at_once(broker: Broker, small: SmallVersion) -> None:
    """The memory of updated rows, and that of mapped files, does not wait for the garbage collector."""
    gc.disable()
    try:
        with InferenceSession.open(small.directory, update_stream=broker.url) as session:
            broker.send(small.topic("user_weight"), (packed(1)[0], vectors(1).tobytes()))
            await_rows(session, "user.weight", [1], 1)
            rows, writer = weakref.ref(session.rows), weakref.ref(session.rows.writer)
        del session
        # A thread that has just worked for it may hold it for a moment.
        wait_until(lambda: rows() is None and writer() is None, "the rows to be gone")
    finally:
        gc.enable()


def test_a_lost_broker_is_survived(small: SmallVersion) -> None:
    """Serving goes on meanwhile, the failure is reported, and later rows are served."""
    with Broker() as broker, InferenceSession.open(small.directory, update_stream=broker.url) as session:
        topic = small.topic("user_weight")
        broker.send(topic, (packed(1)[0], vectors(1).tobytes()), (packed(2)[0], vectors(2).tobytes()))
        await_rows(session, "user.weight", [2], 2)
        broker.stop()
        wait_until(lambda: "no broker answers" in str(session.stats()["updates"]["failure"]), "the failure to be told")
        np.testing.assert_array_equal(session.lookup("user.weight", [1, 2])[:, 0], [1, 2])
        broker.start()
        broker.send(topic, (packed(4)[0], vectors(4).tobytes()))
        await_rows(session, "user.weight", [4], 4)
        wait_until(lambda: session.stats()["updates"]["failure"] is None, "the failure to be over")


class ClosedLate:
    """A consumer whose `close` waits for an event, as where the last commit goes to a broker that is down."""

    def __init__(self, consumer: Any, is_up: threading.Event) -> None:
        self._consumer, self._is_up = consumer, is_up

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def close(self) -> None:
        self._is_up.wait()
        self._consumer.close()


def test_a_session_is_closed_before_its_consumer(
    broker: Broker, small: SmallVersion, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All messages are applied by then, and no warning says otherwise."""
    create, is_up = kafka_stream.create_consumer, threading.Event()
    monkeypatch.setattr(kafka_stream, "create_consumer", lambda *args: ClosedLate(create(*args), is_up))
    others = {*threading.enumerate()}  # those of sessions before may still wait for brokers that are down
    session = InferenceSession.open(small.directory, update_stream=broker.url)
    [thread] = (one for one in {*threading.enumerate()} - others if one.name == "hotrow-update-stream")

    session.close()

    assert thread.is_alive()
    assert "still applying" not in caplog.text
    is_up.set()
    thread.join()


def test_a_version_opens_without_its_broker(small: SmallVersion) -> None:
    """At once, and follows it when it comes."""
    broker = Broker()
    with InferenceSession.open(small.directory, update_stream=broker.url, catch_up_s=1000) as session, broker:
        broker.send(small.topic("user_weight"), (packed(4)[0], vectors(4).tobytes()))
        await_rows(session, "user.weight", [4], 4)


@pytest.mark.parametrize("with_files", [True, False], ids=["files", "no_files"])
def test_updates_reach_every_tier_and_the_cache(
    broker: Broker, small: SmallVersion, tmp_path: Path, with_files: bool
) -> None:
    """Redis over RocksDB: rows and deletions, also of rows in files, and they are there without Kafka afterwards."""
    database = f"rocksdb://{tmp_path}/db"
    push(small.directory, database)
    if not with_files:
        (small.directory / TABLES_FOLDER).rename(tmp_path / "away")
    keys = small.tables["hashed/key"]
    with RedisServer() as redis:
        stores = {"volatile_store": redis.url, "persistent_store": database, "store_timeout_ms": PATIENCE_MS}
        with InferenceSession.open(small.directory, **stores, update_stream=broker.url) as session:
            session.lookup("hashed", keys)
            session.lookup("user.weight", np.arange(-50, 50))
            with Publisher(broker.url, small.model) as publisher:
                publisher.publish("hashed", keys[:3], vectors(4, rows=3, dim=2))
                publisher.delete("hashed", keys[3:6])
                publisher.publish("user.weight", [1, 49, 77], vectors(5, rows=3))
            await_rows(session, "hashed", keys[:3], 4)
            await_rows(session, "hashed", keys[3:6], DEFAULT)
            await_rows(session, "user.weight", [1, 49, 77, -1, -49], 5)
            wait_until(lambda: bool(broker.committed(small.model)), "offsets to be committed")
        with InferenceSession.open(small.directory, **stores, cache_bytes=0) as session:
            np.testing.assert_array_equal(session.lookup("hashed", keys[3:6]), [DEFAULT] * 3)
        for url in (redis.url, database):
            with create_store(url, Namespace(small.model, "1"), DIMS, timeout_ms=PATIENCE_MS) as store:
                out = np.zeros((6, 2), np.float32)
                assert store.fetch("hashed", keys[:6], out).tolist() == [True] * 3 + [False] * 3
                assert (out[:3] == 4).all()
        with InferenceSession.open(small.directory, **stores, update_stream=broker.url) as session:
            assert session.stats()["updates"]["messages"] == 0


def test_who_cannot_write_follows_who_does(broker: Broker, small: SmallVersion, tmp_path: Path, patience: None) -> None:
    """Two sessions on one RocksDB both serve every update, also each with its own Redis; the second takes over."""
    database = f"rocksdb://{tmp_path}/db"
    push(small.directory, database)
    keys = small.tables["hashed/key"]
    settings = {"persistent_store": database, "update_stream": broker.url, "store_timeout_ms": PATIENCE_MS}
    with (
        Publisher(broker.url, small.model) as publisher,
        RedisServer() as redis,
        InferenceSession.open(small.directory, **settings, volatile_store=redis.url) as follower,
    ):
        with InferenceSession.open(small.directory, **settings) as writer:
            writer.update("user.weight", [0], vectors(0))  # there is one writer's place, and this takes it
            for value in (1, 2):
                follower.lookup("hashed", keys)
                publisher.publish("hashed", keys[:3], vectors(value, rows=3, dim=2))
                publisher.delete("hashed", keys[3 + value : 4 + value])
                publisher.flush()
                for session in (writer, follower):
                    await_rows(session, "hashed", keys[:3], value)
                    await_rows(session, "hashed", keys[3 + value : 4 + value], DEFAULT)
            assert follower.stats()["updates"]["failures"] == 0
        publisher.publish("hashed", keys[:3], vectors(3, rows=3, dim=2))
        publisher.flush()
        await_rows(follower, "hashed", keys[:3], 3)
        wait_until(lambda: not follower.stats()["updates"]["lag_messages"], "all to be applied")


def test_who_finds_a_new_topic_late_reads_all_of_it(
    broker: Broker, small: SmallVersion, tmp_path: Path, patience: None
) -> None:
    """Another process has noted that all is applied to the RocksDB of both; it is not yet in the Redis of this one."""
    database = f"rocksdb://{tmp_path}/db"
    push(small.directory, database)
    keys = small.tables["hashed/key"]
    settings = {"persistent_store": database, "update_stream": broker.url, "store_timeout_ms": PATIENCE_MS}
    with (
        Publisher(broker.url, small.model) as publisher,
        RedisServer() as redis,
        InferenceSession.open(small.directory, **settings, volatile_store=redis.url) as late,
    ):
        with InferenceSession.open(small.directory, **settings) as writer:
            writer.update("user.weight", [0], vectors(0))  # there is one writer's place, and this takes it
            late.lookup("hashed", keys)
            wait_until(lambda: redis.client().dbsize() > 0, "the rows to be in Redis")
            with late.upkeep.updates_held():
                publisher.publish("hashed", keys[:3], vectors(1, rows=3, dim=2))
                publisher.flush()
                await_rows(writer, "hashed", keys[:3], 1)
                writer.close()  # which notes how far it has come
        await_rows(late, "hashed", keys[:3], 1)


def test_updates_wait_for_a_store_that_is_down(broker: Broker, small: SmallVersion) -> None:
    """Nothing is skipped: they are applied, in order, once it is back."""
    with RedisServer() as redis:
        push(small.directory, redis.url)
        settings = {"persistent_store": redis.url, "update_stream": broker.url, "store_timeout_ms": 500}
        with InferenceSession.open(small.directory, **settings) as session:
            with Publisher(broker.url, small.model) as publisher:
                publisher.publish("user.weight", [1], vectors(9))
                publisher.flush()
                await_rows(session, "user.weight", [1], 9)
                redis.stop()
                for value in range(3):
                    publisher.publish("user.weight", [1], vectors(value))
            wait_until(lambda: session.stats()["updates"]["failure"] is not None, "the outage to be noticed")
            wait_until(lambda: session.stats()["updates"]["staleness_s"] > 0.1, "the delay to show")
            redis.start()
            await_rows(session, "user.weight", [1], 2)
            wait_until(lambda: session.stats()["updates"]["failure"] is None, "the outage to be over")


def test_a_table_that_is_pushed_while_it_is_served_gets_its_updates_again(broker: Broker, small: SmallVersion) -> None:
    """A push writes the rows of the files over them."""
    with RedisServer() as redis:
        push(small.directory, redis.url)
        settings = {"persistent_store": redis.url, "update_stream": broker.url, "store_timeout_ms": PATIENCE_MS}
        with (
            InferenceSession.open(small.directory, **settings, cache_bytes=0) as session,
            create_store(redis.url, Namespace(small.model, "1"), DIMS, timeout_ms=PATIENCE_MS) as store,
        ):
            for value in (5, 6):
                broker.send(small.topic("user_weight"), (packed(1)[0], vectors(value).tobytes()))
                await_rows(session, "user.weight", [1], value)
                wait_until(lambda: "offsets" in (store.note("user_weight") or ""), "the offset to be noted")
                push(small.directory, redis.url)
                wait_until(lambda: "offsets" in (store.note("user_weight") or ""), "the updates to come again")
                await_rows(session, "user.weight", [1], value)
            assert session.stats()["updates"]["replays"] == 2


def test_a_clock_that_is_set_back_delays_nothing(
    broker: Broker, small: SmallVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are applied one by one, updates can be held, and the stream ends, whatever the time of day."""
    create, is_over = kafka_stream.create_consumer, threading.Event()
    monkeypatch.setattr(kafka_stream, "create_consumer", lambda *args: ConsumerWhileSetBack(create(*args), is_over))
    with Publisher(broker.url, small.model) as publisher, contextlib.ExitStack() as ending:
        session = ending.enter_context(InferenceSession.open(small.directory, update_stream=broker.url))
        ending.callback(is_over.set)
        for value in (1, 2, 3):
            publisher.publish("user.weight", [3], vectors(value))
            await_rows(session, "user.weight", [3], value)
        with session.upkeep.updates_held():
            pass


def test_updates_that_are_held_wait(broker: Broker, small: SmallVersion) -> None:
    """While another session applies them; afterwards they are applied as usual."""
    with (
        InferenceSession.open(small.directory, update_stream=broker.url) as session,
        InferenceSession.open(small.directory, update_stream=broker.url) as other,
        Publisher(broker.url, small.model) as publisher,
    ):
        publisher.publish("user.weight", [3], vectors(1))
        for each in (session, other):
            await_rows(each, "user.weight", [3], 1)
        with session.upkeep.updates_held() as applied:
            other.upkeep.catch_up_with(applied)
            publisher.publish("user.weight", [3], vectors(2))
            await_rows(other, "user.weight", [3], 2)
            np.testing.assert_array_equal(session.lookup("user.weight", [3]), vectors(1))
        await_rows(session, "user.weight", [3], 2)


def test_a_session_that_ends_while_it_is_held_writes_nothing_more(
    broker: Broker, small: SmallVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that it has received are older than the rows that its successor has written to the same store."""
    for name in ("MAX_MESSAGES", "TAKES"):  # one more step would apply an old message, and not the newest
        monkeypatch.setattr(kafka_stream, name, 1)
    with RedisServer() as redis:
        settings = {"volatile_store": redis.url, "update_stream": broker.url, "store_timeout_ms": PATIENCE_MS}
        with (
            InferenceSession.open(small.directory, **settings, cache_bytes=0) as old,
            InferenceSession.open(small.directory, **settings, cache_bytes=0) as new,
            Publisher(broker.url, small.model) as publisher,
        ):
            publisher.publish("user.weight", [3], vectors(1))
            for each in (old, new):
                wait_until(lambda e=each: e.stats()["updates"]["updated_rows"] == 1, "the row to be applied")  # type: ignore[misc]
            with old.upkeep.updates_held():
                for value in range(2, 10):
                    publisher.publish("user.weight", [3], vectors(value))
                await_rows(new, "user.weight", [3], 9)
                old.close()
                np.testing.assert_array_equal(new.lookup("user.weight", [3]), vectors(9))


def test_a_session_that_is_held_does_not_write_what_a_store_has_refused(
    broker: Broker, small: SmallVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its store answers again while it is held; its successor has written a newer row there by then."""
    for name in ("FIRST_PAUSE_S", "LONGEST_PAUSE_S"):  # it would write as soon as the store takes rows
        monkeypatch.setattr(store_retries, name, 0.001)
    with RedisServer() as redis, Proxy(redis.port) as network:
        settings = {"update_stream": broker.url, "store_timeout_ms": PATIENCE_MS, "cache_bytes": 0}
        behind = f"redis://127.0.0.1:{network.port}"
        with (
            InferenceSession.open(small.directory, volatile_store=behind, **settings) as old,
            InferenceSession.open(small.directory, volatile_store=redis.url, **settings) as new,
            Publisher(broker.url, small.model) as publisher,
        ):
            publisher.publish("user.weight", [3], vectors(1))
            for each in (old, new):
                wait_until(lambda e=each: e.stats()["updates"]["updated_rows"] == 1, "the row to be applied")  # type: ignore[misc]
            network.set(Network.CUT)
            publisher.publish("user.weight", [3], vectors(2))
            wait_until(lambda: old.stats()["updates"]["failure"] is not None, "the outage to be noticed")
            with old.upkeep.updates_held():
                publisher.publish("user.weight", [3], vectors(3))
                await_rows(new, "user.weight", [3], 3)
                network.set(Network.GOOD)
                wait_until(lambda: old.stats()["tiers"]["volatile"]["failure"] is None, "the store to be in use again")
                for value in range(5):  # meanwhile it would write
                    publisher.publish("user.weight", [4], vectors(value))
                    await_rows(new, "user.weight", [4], value)
                old.close()
                np.testing.assert_array_equal(new.lookup("user.weight", [3]), vectors(3))


def test_hot_rows_that_were_read_before_the_note_are_read_again(
    broker: Broker, small: SmallVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer of the RocksDB applies an update, and notes it, after a new session has warmed its cache."""
    database = f"rocksdb://{tmp_path}/db"
    push(small.directory, database)
    settings = {"persistent_store": database, "update_stream": broker.url, "state_dir": str(tmp_path / "state")}
    with (
        InferenceSession.open(small.directory, **settings) as writer,
        Publisher(broker.url, small.model) as publisher,
    ):
        publisher.publish("user.weight", [3], vectors(1))
        await_rows(writer, "user.weight", [3], 1)
        writer.upkeep.save_hot_keys()
        follow = SessionUpkeep.follow_updates

        def is_noted() -> bool:
            with create_store(database, Namespace(small.model, "1"), DIMS) as store:
                return '": 2' in (store.note("user_weight") or "")  # the offset after both messages

        def follow_later(upkeep: SessionUpkeep) -> None:
            answered = look_up_keys(upkeep.rows.readers[0], 0, np.array([3]), np.empty((1, 4), np.float32))
            np.testing.assert_array_equal(answered, vectors(1))
            publisher.publish("user.weight", [3], vectors(2))
            publisher.flush()
            wait_until(is_noted, "the update to be noted")
            follow(upkeep)

        monkeypatch.setattr(SessionUpkeep, "follow_updates", follow_later)
        with InferenceSession.open(small.directory, **settings) as reader:
            await_rows(reader, "user.weight", [3], 2)


def test_rows_do_not_grow_older_when_new_content_takes_over(broker: Broker, small: SmallVersion) -> None:
    """A row is published again and again; a reader never sees an older one, whichever content answers."""
    first = 1000.0  # above all values of the files
    ending = threading.Event()
    failed: list[tuple[float, float]] = []

    def publish() -> None:
        with Publisher(broker.url, small.model, timeout_s=PATIENCE_S) as publisher:
            for value in itertools.takewhile(lambda _: not ending.is_set(), itertools.count(first)):
                publisher.publish("user.weight", np.arange(50), vectors(value, rows=50))
                publisher.flush()
                ending.wait(0.02)  # new content has to read all of it

    def found_by(versions: VersionManager) -> float:
        with versions.lease() as session:
            return float(session.lookup("user.weight", [3])[0, 0])

    def ask(versions: VersionManager) -> None:
        seen = -np.inf  # before the first update, rows of the files are answered
        while not ending.is_set():
            found = found_by(versions)
            failed.extend([(seen, found)] if found < seen else [])
            seen = max(seen, found) if found >= first else seen

    settings = {"update_stream": broker.url, "catch_up_s": PATIENCE_S}
    with VersionManager(small.directory, lambda: InferenceSession.open(small.directory, **settings)) as versions:
        threads = [threading.Thread(target=publish), threading.Thread(target=ask, args=(versions,))]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: found_by(versions) >= first, "the first update")
            for seed in range(2, 7):
                write_in_place(small.directory, seed)
                wait_until(lambda: is_updated(versions), "the new content to take over")
        finally:
            ending.set()
            for thread in threads:
                thread.join()

    assert failed == []


def test_content_that_cannot_be_brought_up_to_date_does_not_take_over(small: SmallVersion) -> None:
    """The brokers do not answer: its rows would be older. It takes over once they do."""
    with Broker() as broker:
        settings = {"update_stream": broker.url, "catch_up_s": 1}
        with VersionManager(small.directory, lambda: InferenceSession.open(small.directory, **settings)) as versions:
            with Publisher(broker.url, small.model) as publisher, versions.lease() as session:
                publisher.publish("user.weight", [3], vectors(1))
                await_rows(session, "user.weight", [3], 1)
            write_in_place(small.directory, 2)
            broker.send_signal(signal.SIGSTOP)
            with pytest.raises(UnavailableError, match="catch_up_s=1 the updates that are served"):
                versions.update()
            with versions.lease() as session:
                np.testing.assert_array_equal(session.lookup("user.weight", [3]), vectors(1))
            broker.send_signal(signal.SIGCONT)
            wait_until(lambda: is_updated(versions), "the new content to take over")
            with versions.lease() as session:
                np.testing.assert_array_equal(session.lookup("user.weight", [3]), vectors(1))


def is_updated(versions: VersionManager) -> bool:
    """Whether the new content takes over now."""
    with contextlib.suppress(UnavailableError):
        return versions.update()
    return False


def write_in_place(directory: Path, seed: int) -> None:
    """Replace what a version directory holds, file by file, MANIFEST.json last."""
    beside = directory.with_name(".tmp-beside")
    small_model.write(beside, seed=seed)
    files = sorted(
        (file for file in beside.rglob("*") if file.is_file()), key=lambda file: file.name == "MANIFEST.json"
    )
    for file in files:
        file.replace(directory / file.relative_to(beside))
    shutil.rmtree(beside)
