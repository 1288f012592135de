"""Updates that several writers apply to one Redis, each at its own pace, against a plain model: the newest row wins."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import redis

from inference_session.errors import StoreError, UnavailableError
from inference_session.parameter_server.create import create_store
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.redis import layout
from inference_session.parameter_server.redis.store import RedisStore
from inference_session.tables.ordered_updates import OrderedUpdates, Outcome, SourceProgress, Status
from tests.testing.moving_slot import migrate, moving_slot
from tests.testing.servers import PATIENCE_MS, RedisClusterServers, RedisServer, valkey_binary
from tests.testing.store_contract import keys_of

TABLE, DIM = "user", 4
NUM_KEYS, NUM_SOURCES, NUM_MESSAGES = 40, 2, 120
ABSENT = -1
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def valkey() -> Iterator[RedisServer]:
    with RedisServer(binary=valkey_binary()) as server:
        yield server


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisClusterServers]:
    with RedisClusterServers() as cluster:
        yield cluster


def open_store(url: str, namespace: Namespace) -> RedisStore:
    store = create_store(url, namespace, {TABLE: DIM}, timeout_ms=PATIENCE_MS)
    assert isinstance(store, RedisStore)
    return store


@dataclass
class Log:
    """The messages of some sources: position → key and number of the row, ABSENT where the key is deleted."""

    messages: list[list[tuple[int, int]]]
    history: str = "id"
    epochs: dict[int, int] = field(default_factory=dict)
    """By source, of the messages that come next."""

    @classmethod
    def random(cls, rng: random.Random) -> Log:
        log = cls([[] for _ in range(NUM_SOURCES)])
        for _ in range(NUM_MESSAGES):
            log.publish(rng.randrange(NUM_KEYS), deleted=rng.random() < 0.2)
        return log

    def publish(self, key: int, *, deleted: bool = False) -> None:
        """All messages of a key have the same source."""
        source = key % NUM_SOURCES
        self.messages[source].append((key, ABSENT if deleted else next(_numbers)))

    def newest(self, key: int) -> int | None:
        """The number of a key's row; None: no message is of it."""
        return next((number for k, number in reversed(self.messages[key % NUM_SOURCES]) if k == key), None)


class Writer:
    """Applies a log to a store of its own, some messages at a time."""

    def __init__(self, open_it: Callable[[], RedisStore], log: Log) -> None:
        self._open, self.log = open_it, log
        self.restart()

    def restart(self) -> None:
        """As when its process ends, and another reads the log from its oldest messages."""
        self.store, self.reached = self._open(), [0] * NUM_SOURCES

    @property
    def is_done(self) -> bool:
        return all(len(part) == reached for part, reached in zip(self.log.messages, self.reached, strict=True))

    def step(self, rng: random.Random) -> Outcome:
        """Apply some messages of some sources; all again where the store has lost some."""
        newest: dict[int, tuple[int, int]] = {}  # by key, its number and its source
        ends = []
        for source, messages in enumerate(self.log.messages):
            ends.append(min(self.reached[source] + rng.choice((0, 1, 3, 10, 50)), len(messages)))
            newest |= {key: (number, source) for key, number in messages[self.reached[source] : ends[-1]]}
        outcome = self.store.apply(TABLE, self._updates(newest, ends))
        self.reached = [0] * NUM_SOURCES if outcome.lost else ends
        return outcome

    def _updates(self, newest: dict[int, tuple[int, int]], ends: list[int]) -> OrderedUpdates:
        rows = {key: one for key, one in newest.items() if one[0] != ABSENT}
        deleted = {key: one for key, one in newest.items() if one[0] == ABSENT}
        progress = [
            SourceProgress(f"topic/{source}", self.log.history, self.log.epochs.get(source, 0), begin, end)
            for source, (begin, end) in enumerate(zip(self.reached, ends, strict=True))
        ]
        return OrderedUpdates(
            keys_of(*rows),
            np.array([[number] * DIM for number, _ in rows.values()], np.float32).reshape(len(rows), DIM),
            keys_of(*deleted),
            np.array([source for _, source in rows.values()], np.intp),
            np.array([source for _, source in deleted.values()], np.intp),
            progress,
        )


MakeWriter = Callable[[Log], Writer]


def numbers_in(store: RedisStore) -> list[int]:
    """By key, the number of its row; ABSENT: there is none."""
    vectors = np.zeros((NUM_KEYS, DIM), np.float32)
    found = store.fetch(TABLE, np.arange(NUM_KEYS), vectors)
    assert (vectors == vectors[:, :1]).all()
    return np.where(found, vectors[:, 0], ABSENT).astype(int).tolist()


def run_to_end(writers: list[Writer], rng: random.Random) -> None:
    while not all(writer.is_done for writer in writers):
        rng.choice([writer for writer in writers if not writer.is_done]).step(rng)


def check_all_newest(log: Log, store: RedisStore) -> None:
    expected = [log.newest(key) for key in range(NUM_KEYS)]
    assert numbers_in(store) == [ABSENT if number is None else number for number in expected]


@pytest.fixture(params=["server", "valkey", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    servers: RedisServer | RedisClusterServers = request.getfixturevalue(request.param)
    return servers.url


@pytest.fixture
def make_writer(url: str, namespace: Namespace) -> Iterator[MakeWriter]:
    with contextlib.ExitStack() as opened:
        yield partial(Writer, lambda: opened.enter_context(open_store(url, namespace)))


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Namespace:
    return Namespace(f"{request.node.name}{next(_numbers)}", "1")


@pytest.mark.parametrize("seed", range(8))
def test_no_row_becomes_older(make_writer: MakeWriter, seed: int) -> None:
    """Two or three writers, each of which may begin again, take turns at random. All rows are the newest in the end."""
    rng = random.Random(seed)
    log = Log.random(rng)
    writers = [make_writer(log) for _ in range(rng.choice((2, 3)))]
    shown = [ABSENT] * NUM_KEYS
    while not all(writer.is_done for writer in writers):
        writer = rng.choice(writers)
        if rng.random() < 0.05:
            writer.restart()
        assert not writer.step(rng).lost
        shown = grown(log, shown, numbers_in(writer.store))
    check_all_newest(log, writers[0].store)


@pytest.mark.parametrize("seed", range(3))
def test_slots_that_move_meanwhile_lose_nothing(cluster: RedisClusterServers, namespace: Namespace, seed: int) -> None:
    """Rows, times and note of a partition go to the other node one after the other. Between two of them Redis refuses
    scripts, which is a temporary error.
    """
    rng = random.Random(seed)
    log = Log.random(rng)
    with contextlib.ExitStack() as opened:
        writers = [Writer(lambda: opened.enter_context(open_store(cluster.url, namespace)), log) for _ in range(2)]
        refused = 0
        for names in rng.sample(hashes(namespace), 4):
            with moving_slot(cluster, names[0]) as (source, target):
                for name in rng.sample(names, 3):
                    refused += not steps(writers, rng)
                    migrate(source, target, name)
                    refused += not steps(writers, rng)
            assert steps(writers, rng)
        assert refused
        run_to_end(writers, rng)
        check_all_newest(log, writers[0].store)


def steps(writers: list[Writer], rng: random.Random) -> bool:
    """Let all writers that have anything left take a step, of which none loses a row; False: one was refused."""
    for writer in writers:
        try:
            assert not writer.step(rng).lost
        except UnavailableError:  # noqa: PERF203  the updates come again
            return False
    return True


def grown(log: Log, shown: list[int], found: list[int]) -> list[int]:
    """By key, the position of its row as found, which must be none before the one that was shown."""
    positions = []
    for key, (first, number) in enumerate(zip(shown, found, strict=True)):
        messages = log.messages[key % NUM_SOURCES]
        later = [i for i in range(max(first, 0), len(messages)) if messages[i] == (key, number)]
        assert later or (first, number) == (ABSENT, ABSENT), f"key {key} was at position {first}, and is {number}"
        positions.append(first if first == ABSENT and number == ABSENT else later[0])
    return positions


Client = redis.Redis | redis.RedisCluster


@pytest.fixture
def client(request: pytest.FixtureRequest, url: str) -> Iterator[Client]:
    port = int(url.rpartition(":")[2])
    kind = redis.RedisCluster if "cluster" in url else redis.Redis
    with kind(host="127.0.0.1", port=port, protocol=2) as client:
        yield client


def hashes(namespace: Namespace) -> list[list[bytes]]:
    """The names of each partition: of rows, of times, of the note."""
    kinds = layout.rows_name, layout.times_name, layout.applied_name
    return [[kind(namespace.tag(TABLE), p) for kind in kinds] for p in range(layout.DEFAULT_PARTITIONS)]


def damage(client: Client, names: list[bytes], saved: list[bytes | None], rng: random.Random) -> None:
    """A partition goes back to what it was, or loses its rows, its note, or both."""
    which = rng.choice((saved, [None, None, None], [None, None, "stays"], ["stays", "stays", None]))
    for name, state in zip(names, which, strict=True):
        if state != "stays":
            client.delete(name)
        if isinstance(state, bytes):
            client.restore(name, 0, state)


@pytest.mark.parametrize("seed", range(8))
def test_what_redis_loses_is_applied_again(
    make_writer: MakeWriter, namespace: Namespace, client: Client, seed: int
) -> None:
    """As after a flush, a snapshot, a failover or an eviction; noticed with the next message of the same partition."""
    rng = random.Random(seed)
    log = Log.random(rng)
    writers = [make_writer(log) for _ in range(2)]
    saved = {names[0]: [None, None, None] for names in hashes(namespace)}
    for _ in range(40):
        rng.choice(writers).step(rng)
        names = rng.choice(hashes(namespace))
        if rng.random() < 0.3:
            saved[names[0]] = [client.dump(name) for name in names]
        elif rng.random() < 0.3:
            damage(client, names, saved[names[0]], rng)
    run_to_end(writers, rng)
    of = layout.partition_of(np.arange(NUM_KEYS), layout.Partitioning(layout.DEFAULT_PARTITIONS)).tolist()
    for key in {(of[key], key % NUM_SOURCES): key for key in range(NUM_KEYS)}.values():
        log.publish(key)
    run_to_end(writers, rng)
    check_all_newest(log, writers[0].store)


def test_rows_that_were_all_erased_are_not_lost(make_writer: MakeWriter) -> None:
    """Redis keeps no hash without fields: a note without rows is no sign of a loss then."""
    rng, log = random.Random(0), Log([[], []])
    writers = [make_writer(log) for _ in range(2)]
    for deleted in (False, True, True, False, True):
        for key in range(NUM_KEYS):
            log.publish(key, deleted=deleted)
        while not all(writer.is_done for writer in writers):
            assert not any(writer.step(rng).lost for writer in writers)
    check_all_newest(log, writers[0].store)


def test_a_topic_made_anew_takes_over(make_writer: MakeWriter) -> None:
    """Its positions begin again. Who has applied the old one writes no more of it, and learns of the new."""
    rng = random.Random(0)
    old = Log.random(rng)
    first, second = make_writer(old), make_writer(old)
    run_to_end([first, second], rng)
    new = Log([[], []], history="new")
    for key in range(NUM_KEYS):
        new.publish(key)
    first.log, first.reached = new, [0] * NUM_SOURCES
    run_to_end([first], rng)
    old.publish(3)
    outcome = second.step(rng)
    while not outcome.lost:  # until it has taken the message
        assert not (outcome.inserted == Status.WRITTEN).any()
        outcome = second.step(rng)
    assert not (outcome.inserted == Status.WRITTEN).any()
    second.log, second.reached = new, [0] * NUM_SOURCES
    run_to_end([first, second], rng)
    check_all_newest(new, first.store)


def test_who_has_seen_only_the_old_topic_harms_nothing_for_long(make_writer: MakeWriter) -> None:
    """It starts just as the topic is made anew, and so writes rows of the old one over those of the new one."""
    rng = random.Random(0)
    old, new = Log.random(rng), Log([[], []], history="new")
    for key in range(NUM_KEYS):
        new.publish(key)
    first, late = make_writer(new), make_writer(old)
    run_to_end([first], rng)
    run_to_end([late], rng)
    for key in range(NUM_KEYS):
        if key % 7:
            new.publish(key)
    run_to_end([first], rng)
    check_all_newest(new, first.store)


def test_positions_that_a_log_gives_again_are_applied(make_writer: MakeWriter) -> None:
    """Brokers that lose the end of a log give its offsets to other messages, under another leader: not skipped."""
    rng = random.Random(0)
    log = Log.random(rng)
    run_to_end([make_writer(log)], rng)
    lost = log.messages[1][-20:]
    del log.messages[1][-20:]
    log.epochs[1] = 1
    for key, _ in lost[:15]:
        log.publish(key)
    missing = [key for key, _ in lost[15:] if key not in {k for k, _ in lost[:15]}]
    for key in missing:
        log.publish(key)
    writer = make_writer(log)
    run_to_end([writer], rng)
    check_all_newest(log, writer.store)


def apply_all(make_writer: MakeWriter, log: Log) -> Writer:
    writer = make_writer(log)
    run_to_end([writer], random.Random(0))
    return writer


def test_other_rows_that_were_written_over_updates_are_replaced(make_writer: MakeWriter) -> None:
    """A push says so, before and after it writes: who goes on, or begins again, applies all updates to its rows."""
    log = Log.random(random.Random(0))
    writer = apply_all(make_writer, log)
    writer.store.insert(TABLE, np.arange(NUM_KEYS), np.full((NUM_KEYS, DIM), -7, np.float32))
    writer.store.forget_applied(TABLE)
    log.publish(0)
    log.publish(1)
    run_to_end([writer], random.Random(0))
    touched = [key for key in range(NUM_KEYS) if log.newest(key) is not None]
    found = numbers_in(writer.store)
    assert [found[key] for key in touched] == [log.newest(key) for key in touched]


def test_who_applies_all_again_finds_nothing_lost(make_writer: MakeWriter) -> None:
    """A process that begins again by itself, as after a push, does not miss what it has written before."""
    log, rng = Log.random(random.Random(0)), random.Random(0)
    writer = apply_all(make_writer, log)
    writer.store.clear(TABLE)
    writer.reached = [0] * NUM_SOURCES
    while not writer.is_done:
        assert not writer.step(rng).lost
    check_all_newest(log, writer.store)


def test_notes_are_dropped_with_their_rows(make_writer: MakeWriter, namespace: Namespace, client: Client) -> None:
    """By `clear`, and with the version."""
    log = Log.random(random.Random(0))
    for drop in (lambda store: store.clear(TABLE), lambda store: store.remove_versions(["1"])):
        writer = apply_all(make_writer, log)
        check_all_newest(log, writer.store)
        drop(writer.store)
        assert [client.exists(name) for names in hashes(namespace) for name in names] == [0] * 24


def test_many_rows_of_one_partition_are_written_at_once(url: str, namespace: Namespace) -> None:
    """More than a script may hand over as arguments of one command, with `evict_least_used` too."""
    keys, n = np.arange(60_000), 60_000
    progress = [SourceProgress("topic/0", "id", 0, 0, n)]
    for options in ("", "?overflow_margin=100000&overflow_policy=evict_least_used"):
        with open_store(url + options, namespace) as store:
            rows = OrderedUpdates(
                keys, np.ones((n, DIM), np.float32), keys[:0], np.zeros(n, np.intp), np.zeros(0, np.intp), progress
            )
            assert (store.apply(TABLE, rows).inserted == Status.WRITTEN).all()
            assert store.num_rows(TABLE) == n
            assert (store.apply(TABLE, rows).inserted == Status.SAME).all()
            store.clear(TABLE)


def test_a_value_that_is_no_hash_takes_no_note(make_writer: MakeWriter, namespace: Namespace, client: Client) -> None:
    """The error is that of any write, and nothing is said to be applied."""
    log = Log([[], []])
    log.publish(0)
    writer = make_writer(log)
    for names in hashes(namespace):
        client.set(names[0], "no hash")
    with pytest.raises(StoreError, match="WRONGTYPE"):
        run_to_end([writer], random.Random(0))
    assert not any(client.exists(names[2]) and client.hexists(names[2], "topic/0") for names in hashes(namespace))
