"""ParameterServer: tiers, promotion, outages and recovery."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_session.errors import SessionClosedError, StoreError, TableNotFoundError, UnavailableError
from inference_session.parameter_server import server as server_module
from inference_session.parameter_server import tier as tier_module
from inference_session.parameter_server import tier_health
from inference_session.parameter_server import upkeep as upkeep_module
from inference_session.parameter_server.base import ERASED_SUFFIX, EmbeddingStore, FetchRequest, LateError
from inference_session.parameter_server.create import create_store
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.promotions import MAX_PENDING_PROMOTIONS, PROMOTIONS_AT_ONCE
from inference_session.parameter_server.server import ParameterServer
from inference_session.parameter_server.tier import Tier
from inference_session.tables.ordered_updates import OrderedUpdates, Outcome, SourceProgress, Status
from tests.testing.broken_handler import BrokenHandler
from tests.testing.memory_store import MemoryStore
from tests.testing.server_calls import await_promotions, fetch_any
from tests.testing.servers import PATIENCE_MS, PATIENCE_S, RedisServer, wait_until
from tests.testing.store_contract import DIMS, assert_same_bits, fetch, keys_of, random_keys, random_vectors
from tests.testing.table_files import table_files
from tests.testing.wrapper_store import FaultStore, HookedStore

KEYS, VECTORS = random_keys(200), random_vectors(200, 4)
NEWEST = random_vectors(5, 4, seed=9)


class Stack:
    """A volatile and a persistent tier in memory, either of which fails while `faults` has an error for it."""

    def __init__(self, *, on_store_failure: server_module.OnStoreFailure = "default_vector", keep: bool = True) -> None:
        self.volatile, self.persistent = MemoryStore(DIMS), MemoryStore(DIMS)
        self.persistent.insert("user", KEYS, VECTORS)
        self.faults: dict[str, Exception] = {}
        self.asked: list[int] = []
        upper = FaultStore(self.volatile, lambda _: self.faults.get("volatile"))
        lower = FaultStore(self.persistent, lambda _: self.faults.get("persistent"))
        self.server = ParameterServer(
            [Tier("volatile", upper, volatile=True, cache_missed_keys=keep), Tier("persistent", lower)],
            on_store_failure=on_store_failure,
        )

    def fetch(self, keys: np.ndarray, table: str = "user") -> tuple[np.ndarray, np.ndarray]:
        out = np.full((len(keys), DIMS[table]), -7777, np.float32)
        return fetch_any(self.server, [FetchRequest(table, keys, out)])[0], out

    def tier(self, name: str) -> dict[str, object]:
        tiers = asdict(self.server.stats())["tiers"]
        return tiers[name]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stack]]:
    monkeypatch.setattr(upkeep_module, "ROUND_INTERVAL_S", 0.02)
    monkeypatch.setattr(tier_health, "MIN_RETRY_PAUSE_S", 0.02)
    stacks: list[Stack] = []

    def make(**settings: object) -> Stack:
        stacks.append(Stack(**settings))  # type: ignore[arg-type]
        return stacks[-1]

    yield make
    for stack in stacks:
        stack.server.close()


def test_rows_are_fetched_through_the_tiers(make: Callable[..., Stack]) -> None:
    """Rows that the first tier lacks come from the next; keys that none has are not found, their output not touched."""
    stack = make()
    stack.volatile.insert("user", KEYS[:50], -VECTORS[:50])
    found, out = stack.fetch(np.concatenate([KEYS, keys_of(4321), KEYS[:3]]))
    assert found.tolist() == [True] * 200 + [False] + [True] * 3
    assert_same_bits(out[:50], -VECTORS[:50])
    assert_same_bits(out[50:200], VECTORS[50:])
    assert (out[200] == -7777).all()
    assert (stack.tier("volatile")["hits"], stack.tier("volatile")["misses"]) == (50, 151)
    assert (stack.tier("persistent")["hits"], stack.tier("persistent")["misses"]) == (150, 1)
    assert fetch_any(stack.server, []) == []
    assert stack.fetch(keys_of())[0].shape == (0,)


def test_rows_that_were_found_go_up_and_nothing_else(make: Callable[..., Stack]) -> None:
    """Promotion inserts found rows into the volatile tier, never one for an unknown key."""
    stack = make()
    stack.fetch(np.concatenate([KEYS[:100], keys_of(4321)]))
    await_promotions(stack.server)
    assert stack.volatile.num_rows("user") == 100
    assert stack.tier("volatile")["promoted"] == 100
    assert_same_bits(stack.fetch(KEYS[:100])[1], VECTORS[:100])
    assert stack.tier("persistent")["hits"] == 100
    quiet = make(keep=False)
    quiet.fetch(KEYS)
    await_promotions(quiet.server)
    assert quiet.volatile.num_rows("user") == 0


def test_a_promotion_never_replaces_a_newer_row(make: Callable[..., Stack]) -> None:
    """A row written while an older one is being promoted stays."""
    stack = make()
    with stack.server.frozen():  # the promotion has to wait, as it would behind a long write
        stack.fetch(KEYS[:10])
        stack.volatile.insert("user", KEYS[:5], -VECTORS[:5])
    await_promotions(stack.server)
    assert_same_bits(stack.fetch(KEYS[:5])[1], -VECTORS[:5])


class LaggingStore(HookedStore):
    """Shows writes to the wrapped store only after a refresh, like a RocksDB's reader."""

    def __init__(self, store: MemoryStore, table: str = "user") -> None:
        self.table = table
        self.dims = {name: store.embedding_dim(name) for name in store.tables}
        super().__init__(MemoryStore(self.dims))
        self.behind = store
        self.refresh()

    @property
    def lags(self) -> bool:
        return True

    def refresh(self) -> None:
        shown = MemoryStore(self.dims)
        for keys, vectors in self.behind.scan(self.table):
            shown.insert(self.table, keys, vectors)
        self.store = shown


def test_a_row_erased_while_it_is_fetched_is_not_promoted() -> None:
    """Of the rows being promoted, those written meanwhile are not promoted; the others arrive."""
    volatile, persistent = MemoryStore(DIMS), HookedStore(MemoryStore(DIMS))
    persistent.insert("user", KEYS, VECTORS)
    tiers = [Tier("volatile", volatile, volatile=True, cache_missed_keys=True), Tier("persistent", persistent)]
    server = ParameterServer(tiers)
    persistent.hooks["fetch_many"] = lambda: server.erase("user", KEYS[:5])

    fetch_any(server, [FetchRequest("user", KEYS[:20], np.empty((20, 4), np.float32))])
    await_promotions(server)

    held = volatile.fetch("user", KEYS[:20], np.empty((20, 4), np.float32))
    assert held.tolist() == [False] * 5 + [True] * 15
    server.close()


def test_rows_that_another_process_has_changed_are_not_promoted() -> None:
    """Old rows that a lagging tier still shows are not promoted to the tier above."""
    volatile, behind = MemoryStore(DIMS), MemoryStore(DIMS)
    behind.insert("user", KEYS, VECTORS)
    lagging = LaggingStore(behind)
    tiers = [Tier("volatile", volatile, volatile=True, cache_missed_keys=True), Tier("persistent", lagging)]
    server = ParameterServer(tiers)

    def change() -> None:
        behind.erase("user", KEYS[:5])
        behind.insert("user", KEYS[5:8], -VECTORS[5:8])

    lagging.hooks["fetch_many"] = change
    found = fetch_any(server, [FetchRequest("user", KEYS[:20], np.empty((20, 4), np.float32))])[0]

    def held() -> list[bool]:
        return volatile.fetch("user", KEYS[:20], np.empty((20, 4), np.float32)).tolist()

    assert found.all()
    wait_until(lambda: held() == [False] * 8 + [True] * 12, "changed rows to be taken back")
    server.close()


TwoProcesses = tuple[ParameterServer, ParameterServer, LaggingStore]


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoProcesses]:
    """The server of the process that writes the lower store, and of one that follows it, over the same upper store;
    and how the latter sees the lower store. What it has promoted is not verified afterwards.
    """
    monkeypatch.setattr(upkeep_module, "ROUND_INTERVAL_S", 3600)
    volatile, behind = MemoryStore(DIMS), MemoryStore(DIMS)
    behind.insert("user", KEYS, VECTORS)
    lagging = LaggingStore(behind)
    writer, follower = (
        ParameterServer([Tier("volatile", volatile, volatile=True, cache_missed_keys=True), Tier("persistent", lower)])
        for lower in (behind, lagging)
    )
    yield writer, follower, lagging
    follower.close()
    writer.close()


def test_a_promotion_brings_back_no_row_that_another_process_has_erased(two_processes: TwoProcesses) -> None:
    """The process that has erased it would answer it, and keep it in its cache."""
    writer, follower, lagging = two_processes
    lagging.hooks["fetch_many"] = lambda: writer.erase("user", KEYS[:5])

    found = fetch_any(follower, [FetchRequest("user", KEYS[:20], np.empty((20, 4), np.float32))])[0]
    await_promotions(follower)

    assert found.all()
    found = fetch_any(writer, [FetchRequest("user", KEYS[:20], np.empty((20, 4), np.float32))])[0]
    assert found.tolist() == [False] * 5 + [True] * 15
    assert follower.tiers[0].promoted == 15


def test_rows_that_a_follower_forgets_come_back_no_older(
    two_processes: TwoProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer updates a row again after the follower has caught up with the update before, which it forgets."""
    writer, follower, lagging = two_processes
    writer.insert("user", KEYS[:5], -VECTORS[:5])
    monkeypatch.setattr(follower, "refresh", lambda: [lagging.refresh(), writer.insert("user", KEYS[:5], NEWEST)])

    follower.forget("user", KEYS[:5])
    fetch_any(follower, [FetchRequest("user", KEYS[:5], np.empty((5, 4), np.float32))])
    await_promotions(follower)

    rows = np.empty((5, 4), np.float32)
    assert fetch_any(writer, [FetchRequest("user", KEYS[:5], rows)])[0].all()
    assert_same_bits(rows, NEWEST)


def test_no_tier_sees_what_others_write_while_the_server_is_frozen(
    two_processes: TwoProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promoted rows are verified before or after."""
    _, follower, lagging = two_processes
    fetch_any(follower, [FetchRequest("user", KEYS[:5], np.empty((5, 4), np.float32))])
    await_promotions(follower)
    is_locked: list[bool] = []
    monkeypatch.setattr(lagging, "refresh", lambda: is_locked.append(follower._writes.lock.locked()))

    follower.upkeep.drop_outdated(follower.upkeep.promotions.take_unverified())

    assert is_locked
    assert all(is_locked)


class SharedStore(MemoryStore):
    """Writes of other processes are seen at once, as in a Redis."""

    @property
    def is_shared(self) -> bool:
        return True


@pytest.mark.parametrize("lags", [False, True])
def test_rows_of_files_that_another_process_has_erased_are_not_promoted(*, lags: bool, tmp_path: Path) -> None:
    """A row that is promoted from the files while another process erases it is removed again."""
    erased = "user" + ERASED_SUFFIX
    behind = SharedStore(DIMS | {table + ERASED_SUFFIX: 1 for table in DIMS})
    marks = LaggingStore(behind, erased) if lags else behind
    volatile = MemoryStore(DIMS)
    tiers = [
        Tier("volatile", volatile, volatile=True, cache_missed_keys=True),
        Tier("persistent", marks),
        Tier("files", table_files(tmp_path, {"user": (KEYS, VECTORS)}, marks)),
    ]
    server = ParameterServer(tiers)
    with server.frozen():  # the promotion has to wait until the rows are erased
        fetch_any(server, [FetchRequest("user", KEYS[:20], np.empty((20, 4), np.float32))])
        behind.insert(erased, KEYS[:5], np.ones((5, 1), np.float32))

    def held() -> list[bool]:
        return volatile.fetch("user", KEYS[:20], np.empty((20, 4), np.float32)).tolist()

    wait_until(lambda: held() == [False] * 5 + [True] * 15, "erased rows to be taken back")
    server.close()


class ContainingStore(SharedStore):
    """Rows in memory that contain all updates, which another process has written."""

    @property
    def orders_updates(self) -> bool:
        return True

    def apply(self, table: str, updates: OrderedUpdates) -> Outcome:
        return Outcome(*(np.full(len(part), Status.OTHER, np.int8) for part in (updates.keys, updates.deleted)))


def promoted_from_files(folder: Path, kind: type[SharedStore] = SharedStore) -> tuple[ParameterServer, SharedStore]:
    """A server that has promoted 20 rows from the files into the store that it shares with other processes."""
    shared = kind(DIMS | {table + ERASED_SUFFIX: 1 for table in DIMS})
    tiers = [
        Tier("volatile", shared, volatile=True, cache_missed_keys=True),
        Tier("files", table_files(folder, {"user": (KEYS, VECTORS)}, shared)),
    ]
    server = ParameterServer(tiers)
    fetch_any(server, [FetchRequest("user", KEYS[:20], np.empty((20, 4), np.float32))])
    await_promotions(server)
    return server, shared


def test_rows_written_after_a_promotion_are_not_taken_back(tmp_path: Path) -> None:
    """Rows of files were promoted, erased, and written again, by this process or another: no other tier has these."""
    server, shared = promoted_from_files(tmp_path)
    server.erase("user", KEYS[:10])
    server.insert("user", KEYS[:5], -VECTORS[:5])
    shared.insert("user", KEYS[5:10], -VECTORS[5:10])
    shared.insert("user" + ERASED_SUFFIX, KEYS[10:15], np.ones((5, 1), np.float32))

    rows = np.zeros((20, 4), np.float32)
    expected = [True] * 10 + [False] * 5 + [True] * 5
    wait_until(lambda: shared.fetch("user", KEYS[:20], rows).tolist() == expected, "erased rows alone to be taken back")
    np.testing.assert_array_equal(rows[:10], -VECTORS[:10])
    np.testing.assert_array_equal(rows[15:], VECTORS[15:20])
    server.close()


def test_the_check_of_promoted_rows_keeps_written_ones_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A row that this process has erased and written again stays, even if it is the same as before. A refresh
    meanwhile, after which any row may be another one, writes nothing: what others have erased is taken back.
    """
    monkeypatch.setattr(upkeep_module, "ROUND_INTERVAL_S", 3600)
    server, shared = promoted_from_files(tmp_path)
    server.erase("user", KEYS[:10])
    server.insert("user", KEYS[:10], VECTORS[:10])
    shared.insert("user" + ERASED_SUFFIX, KEYS[10:15], np.ones((5, 1), np.float32))
    server.log.add_all()

    server.upkeep.drop_outdated(server.upkeep.promotions.take_unverified())

    held = shared.fetch("user", KEYS[:20], np.empty((20, 4), np.float32))
    assert held.tolist() == [True] * 10 + [False] * 5 + [True] * 5
    server.close()


def test_promoted_rows_that_another_process_has_deleted_first_are_taken_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It applied the deletions of a stream before the rows of the files were promoted. Those that come later from the
    same stream change nothing in the store.
    """
    monkeypatch.setattr(upkeep_module, "ROUND_INTERVAL_S", 3600)
    server, shared = promoted_from_files(tmp_path, ContainingStore)
    none, sources = np.empty((0, 4), np.float32), np.zeros(5, np.intp)
    progress = [SourceProgress("topic/0", "id", 0, 0, 5)]

    server.apply("user", OrderedUpdates(KEYS[:0], none, KEYS[:5], sources[:0], sources, progress))
    server.upkeep.drop_outdated(server.upkeep.promotions.take_unverified())

    held = shared.fetch("user", KEYS[:20], np.empty((20, 4), np.float32))
    assert held.tolist() == [False] * 5 + [True] * 15
    server.close()


def test_promotions_are_bounded_in_bytes(make: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that wait are dropped and counted once they take too much memory, however few requests they are of."""
    monkeypatch.setattr("inference_session.parameter_server.promotions.MAX_PENDING_BYTES", 100)
    stack = make()
    with stack.server.frozen():  # so that nothing is promoted meanwhile
        for begin in range(0, 200, 20):
            stack.fetch(KEYS[begin : begin + 20])
    await_promotions(stack.server)

    dropped = stack.server.stats().dropped_promotions
    assert 0 < dropped < 200
    assert stack.volatile.num_rows("user") == 200 - dropped


def test_without_a_store_that_takes_writes_a_write_is_an_error() -> None:
    """A row that no tier takes is not accepted."""
    server = ParameterServer([])
    with pytest.raises(StoreError, match="'user' cannot be written to"):
        server.insert("user", KEYS, VECTORS)
    server.close()


def test_a_tier_comes_back_though_that_cannot_be_logged(make: Callable[..., Stack]) -> None:
    """The error failed a request, and ended the background work, and with it the return of any tier."""
    stack, handler = make(), BrokenHandler()
    stack.volatile.insert("user", KEYS, VECTORS)
    logging.getLogger("inference_session").addHandler(handler)
    try:
        for _ in range(2):
            stack.faults["volatile"] = UnavailableError("Redis is gone")
            assert stack.fetch(KEYS)[0].all()
            assert stack.tier("volatile")["failure"] == "Redis is gone"
            del stack.faults["volatile"]
            wait_until(lambda: stack.tier("volatile")["failure"] is None, "the tier to come back")
    finally:
        logging.getLogger("inference_session").removeHandler(handler)


def test_a_tier_that_is_down_is_left_out_and_comes_back(
    make: Callable[..., Stack], caplog: pytest.LogCaptureFixture
) -> None:
    """Requests are answered from the other tier; the outage is logged once; after it, all is as before."""
    stack = make()
    stack.volatile.insert("user", KEYS, VECTORS)
    with caplog.at_level(logging.INFO):
        stack.faults["volatile"] = UnavailableError("Redis is gone")
        for _ in range(5):
            found, out = stack.fetch(KEYS)
            assert found.all()
            assert_same_bits(out, VECTORS)
        assert stack.tier("volatile")["failure"] == "Redis is gone"
        assert "volatile (unavailable)" in repr(stack.server)
        assert stack.server.stats().degraded_keys == 0
        del stack.faults["volatile"]
        wait_until(lambda: stack.tier("volatile")["failure"] is None, "the tier to come back")
        wait_until(lambda: "answers again" in caplog.text, "that to be logged")
    assert caplog.text.count("Redis is gone") == 1
    assert caplog.text.count("answers again") == 1
    before = stack.tier("volatile")["hits"]
    stack.fetch(KEYS)
    assert stack.tier("volatile")["hits"] == before + 200  # type: ignore[operator]


def test_a_tier_that_refuses_all_is_left_out(make: Callable[..., Stack], caplog: pytest.LogCaptureFixture) -> None:
    """As a Redis does whose password was changed: it is down until it accepts the password, each time."""
    stack = make()
    for times in (1, 2):
        stack.faults["volatile"] = StoreError("WRONGPASS")
        assert stack.fetch(KEYS)[0].all()
        wait_until(lambda: stack.tier("volatile")["failure"] == "WRONGPASS", "the tier to be left out")
        assert caplog.text.count("WRONGPASS") >= times
        del stack.faults["volatile"]
        wait_until(lambda: stack.tier("volatile")["failure"] is None, "the tier to come back")


def test_a_tier_that_refuses_one_thing_stays(make: Callable[..., Stack]) -> None:
    """A fault in one table's rows does not hide the rows of others."""
    stack = make()
    refusing = FaultStore(stack.volatile, lambda verb: StoreError("WRONGTYPE") if verb == "fetch_many" else None)
    tier = Tier("volatile", refusing, volatile=True)
    server = ParameterServer([tier, Tier("persistent", stack.persistent)])
    for _ in range(2):
        assert fetch_any(server, [FetchRequest("user", KEYS, np.empty((200, 4), np.float32))])[0].all()
        wait_until(lambda: not tier.health.is_suspect, "the tier to be asked")
    assert tier.health.failure is None
    assert tier.health.outages == 0
    server.close()


def test_keys_that_a_dead_tier_may_have_are_counted_or_refused(make: Callable[..., Stack]) -> None:
    """With default vectors they are not found and counted; with `error` the request is UNAVAILABLE."""
    stack = make()
    stack.volatile.insert("user", KEYS[:10], VECTORS[:10])
    stack.faults["persistent"] = UnavailableError("disk is gone")
    assert stack.fetch(KEYS[:10])[0].all()
    assert not stack.fetch(KEYS[10:20])[0].any()
    assert stack.server.stats().degraded_keys == 10
    strict = make(on_store_failure="error")
    strict.volatile.insert("user", KEYS[:10], VECTORS[:10])
    strict.faults["persistent"] = UnavailableError("disk is gone")
    assert strict.fetch(KEYS[:10])[0].all()
    with pytest.raises(UnavailableError, match=r"10 keys.*disk is gone"):
        strict.fetch(KEYS[10:20])
    with pytest.raises(UnavailableError, match=r"10 keys.*disk is gone"):
        strict.fetch(KEYS[10:20])


def test_a_tier_with_a_broken_table_stays_in_use(make: Callable[..., Stack]) -> None:
    """A StoreError is a fault of the request, not of the tier, which answers checks."""
    stack = make()
    store = stack.server.tiers[0].store
    assert isinstance(store, FaultStore)
    store.fault = lambda verb: StoreError("another width") if verb.startswith("fetch") else None
    for _ in range(3):
        assert stack.fetch(KEYS)[0].all()
    assert stack.tier("volatile")["failure"] is None
    assert stack.tier("volatile")["failures"] >= 3  # type: ignore[operator]
    strict = make(on_store_failure="error")
    strict.faults["persistent"] = StoreError("yet another width")
    with pytest.raises(UnavailableError, match=r"200 keys.*yet another width"):
        strict.fetch(KEYS)


def test_updates_missed_during_an_outage_leave_nothing_stale(
    make: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volatile tier that could not take an update drops its old rows before it is used again."""
    for limit in (1_000_000, 3):
        monkeypatch.setattr(tier_module, "MAX_UNWRITTEN_KEYS", limit)
        stack = make()
        stack.volatile.insert("user", KEYS, VECTORS)
        stack.faults["volatile"] = UnavailableError("gone")
        for i in range(0, 50, 10):
            stack.server.insert("user", KEYS[i : i + 10], -VECTORS[i : i + 10])
        stack.server.erase("user", KEYS[50:60])
        assert stack.tier("volatile")["failure"] == "gone"
        del stack.faults["volatile"]
        wait_until(lambda s=stack: s.tier("volatile")["failure"] is None, "the tier to come back")  # type: ignore[misc]
        found, out = stack.fetch(KEYS)
        np.testing.assert_array_equal(found, (np.arange(200) < 50) | (np.arange(200) >= 60))
        assert_same_bits(out[:50], -VECTORS[:50])
        assert_same_bits(out[60:], VECTORS[60:])


class ReluctantStore(HookedStore):
    """Erases only few keys in a call, and none in every second call."""

    num_calls = 0

    def erase(self, table: str, keys: np.ndarray) -> None:
        self.num_calls += 1
        if len(keys) > 10 or self.num_calls % 2:
            raise LateError("too much at once")
        super().erase(table, keys)


def test_a_tier_comes_back_in_pieces(make: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that it missed are dropped in pieces; finished pieces are not repeated after a failure."""
    monkeypatch.setattr(tier_module, "KEYS_PER_DROP", 10)
    stack = make()
    stack.volatile.insert("user", KEYS, VECTORS)
    tier = stack.server.tiers[0]
    reluctant = ReluctantStore(tier.store)
    tier.store = reluctant
    stack.faults["volatile"] = UnavailableError("gone")
    stack.server.insert("user", KEYS[:95], -VECTORS[:95])
    for key in KEYS[95:150]:
        stack.server.erase("user", keys_of(key))
    del stack.faults["volatile"]
    wait_until(lambda: tier.health.failure is None, "the tier to come back")
    found, out = stack.fetch(KEYS)
    np.testing.assert_array_equal(found, (np.arange(200) < 95) | (np.arange(200) >= 150))
    assert_same_bits(out[:95], -VECTORS[:95])
    assert reluctant.num_calls >= 30


def test_a_late_call_concerns_itself(make: Callable[..., Stack]) -> None:
    """A tier that answers a check stays in use, unless it is late repeatedly; an answer in time resets the count."""
    stack = make()
    stack.volatile.insert("user", KEYS, VECTORS)
    tier = stack.server.tiers[0]
    late = FaultStore(stack.volatile, lambda verb: LateError("late") if verb == "fetch_many" else None)
    sound = tier.store
    for _ in range(2):
        tier.store = late
        for _ in range(tier_health.MAX_TIMES_LATE - 1):
            found, out = stack.fetch(KEYS)
            assert found.all()
            assert_same_bits(out, VECTORS)
        assert tier.health.failure is None
        tier.store = sound
        stack.fetch(KEYS)
    tier.store = late
    for _ in range(tier_health.MAX_TIMES_LATE):
        stack.fetch(KEYS)
    assert tier.health.outages == 1


def test_no_fetch_answers_an_older_row_than_one_to_which_a_tier_was_late(make: Callable[..., Stack]) -> None:
    """The tier below has the new row while a write is under way, and the late one still has the old one."""
    stack = make()
    stack.volatile.insert("user", KEYS, VECTORS)
    begun, may_end = threading.Event(), threading.Event()
    faults: dict[str, Exception] = {}

    def fault(verb: str) -> Exception | None:
        if verb == "insert":
            begun.set()
            assert may_end.wait(PATIENCE_S)
        return faults.pop(verb, None)

    stack.server.tiers[0].store = FaultStore(stack.volatile, fault)
    new, others = KEYS[:5], KEYS[5:]
    writing = threading.Thread(target=stack.server.insert, args=("user", new, NEWEST))
    writing.start()
    assert begun.wait(PATIENCE_S)
    assert_same_bits(stack.fetch(new)[1], VECTORS[:5])

    faults["fetch_many"] = LateError("late")
    assert_same_bits(stack.fetch(new)[1], NEWEST)
    assert_same_bits(stack.fetch(new)[1], NEWEST)
    hits = stack.server.stats().tiers["volatile"].hits
    stack.fetch(others)
    assert stack.server.stats().tiers["volatile"].hits == hits + len(others)  # these are not being written
    may_end.set()
    writing.join()
    hits = stack.server.stats().tiers["volatile"].hits
    assert_same_bits(stack.fetch(new)[1], NEWEST)
    assert stack.server.stats().tiers["volatile"].hits == hits + len(new)


def test_a_late_call_to_a_tier_that_is_down_tells_so(make: Callable[..., Stack]) -> None:
    """It does not answer a small request either."""
    stack = make()
    stack.faults["volatile"] = LateError("late")
    assert stack.fetch(KEYS)[0].all()
    assert stack.tier("volatile")["failure"] == "late"


def test_the_first_write_goes_to_a_known_incarnation(make: Callable[..., Stack]) -> None:
    """A store that is another incarnation right after it is not used until it has dropped the written rows."""
    stack = make()
    tier = stack.server.tiers[0]
    dropped: list[str] = []
    stack.server.on_drop(lambda table, _keys: dropped.append(table))
    replaced = HookedStore(tier.store)
    names = iter(["first"])
    replaced.incarnation = lambda: next(names, "second")  # type: ignore[method-assign]
    tier.store = replaced
    stack.volatile.insert("user", KEYS[:1], -VECTORS[:1])
    stack.server.insert("user", KEYS[:1], VECTORS[:1])
    stack.volatile.insert("user", KEYS[:1], -VECTORS[:1])  # the store has the older row again
    wait_until(lambda: dropped == ["user"] and tier.health.failure is None, "the loss to be noticed")
    assert_same_bits(stack.fetch(KEYS[:1])[1], VECTORS[:1])
    assert tier.health.outages == 1


def test_a_write_that_no_tier_keeps_is_an_error() -> None:
    """If the only store is volatile and down, the caller gets an error; the older rows, the only ones, stay."""
    volatile = MemoryStore(DIMS)
    volatile.insert("user", KEYS, VECTORS)
    faults = [UnavailableError("gone")]
    tier = Tier("volatile", FaultStore(volatile, lambda _: faults[0] if faults else None), volatile=True)
    server = ParameterServer([tier])
    for write in (
        lambda: server.insert("user", KEYS[:5], -VECTORS[:5]),
        lambda: server.erase("user", KEYS[5:8]),
    ):
        with pytest.raises(UnavailableError, match="gone"):
            write()
    faults.clear()
    wait_until(lambda: tier.health.failure is None, "the tier to come back")
    for expected in (VECTORS, -VECTORS):
        out = np.empty((200, 4), np.float32)
        assert fetch_any(server, [FetchRequest("user", KEYS, out)])[0].all()
        assert_same_bits(out, expected)
        server.insert("user", KEYS, -VECTORS)
    server.close()


@pytest.mark.parametrize("call", ["insert", "incarnation"])
def test_the_only_store_is_read_while_it_takes_no_writes(call: str) -> None:
    """As a full or read-only Redis does: nothing else has its rows. Once it answers nothing, it is left out."""
    volatile = MemoryStore(DIMS)
    volatile.insert("user", KEYS, VECTORS)
    refusing = FaultStore(volatile, lambda verb: UnavailableError("OOM") if verb in refused else None)
    refused = {call}
    tier = Tier("volatile", refusing, volatile=True)
    server = ParameterServer([tier])
    for _ in range(3):
        with pytest.raises(UnavailableError, match="OOM"):
            server.insert("user", KEYS, -VECTORS)
        out = np.empty((200, 4), np.float32)
        assert fetch_any(server, [FetchRequest("user", KEYS, out)])[0].all()
        assert_same_bits(out, VECTORS)
    assert (tier.health.failures, tier.health.outages) == (3, 0)
    refused |= {"insert", "check"}
    with pytest.raises(UnavailableError, match="OOM"):
        server.insert("user", KEYS, -VECTORS)
    assert (tier.health.failure, tier.health.outages) == ("OOM", 1)
    server.close()


def test_the_only_store_keeps_its_rows_when_it_is_another_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a restart or a fail-over nothing is dropped from it: no other tier has the rows. The log says so."""
    monkeypatch.setattr(upkeep_module, "ROUND_INTERVAL_S", 0.02)
    volatile, names = HookedStore(MemoryStore(DIMS)), iter(["first"])
    volatile.incarnation = lambda: next(names, "second")  # type: ignore[method-assign]
    server = ParameterServer([Tier("volatile", volatile, volatile=True)])
    server.insert("user", KEYS, VECTORS)
    wait_until(lambda: "may lack some of them" in caplog.text, "the change to be noticed")
    assert fetch_any(server, [FetchRequest("user", KEYS, np.empty((200, 4), np.float32))])[0].all()
    server.close()


def test_a_write_that_the_persistent_tier_refuses_is_an_error(make: Callable[..., Stack]) -> None:
    """Nothing above has the row either: the writer tries again."""
    stack = make()
    stack.faults["persistent"] = UnavailableError("disk is full")
    with pytest.raises(UnavailableError, match="disk is full"):
        stack.server.insert("user", keys_of(99), VECTORS[:1])
    assert stack.volatile.num_rows("user") == 0


@pytest.mark.parametrize("is_out", [False, True], ids=["volatile_in_use", "volatile_out"])
def test_a_write_that_the_persistent_tier_takes_in_part_leaves_no_older_rows_above(
    make: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch, is_out: bool
) -> None:
    """The volatile tier drops its rows of these keys, at once or before it is used again."""
    stack = make(keep=False)
    keys, other = keys_of(1, 2), keys_of(3)
    for key in (*keys, *other):
        stack.server.insert("user", keys_of(key), np.full((1, 4), 1, np.float32))

    def insert_first(table: str, keys: np.ndarray, vectors: np.ndarray) -> None:
        MemoryStore.insert(stack.persistent, table, keys[:1], vectors[:1])
        raise UnavailableError("disk is full")

    monkeypatch.setattr(stack.persistent, "insert", insert_first)
    if is_out:
        stack.faults["volatile"] = UnavailableError("gone")
        stack.fetch(keys)
    with pytest.raises(UnavailableError, match="disk is full"):
        stack.server.insert("user", keys, np.full((2, 4), 2, np.float32))
    assert stack.fetch(keys)[1][:, 0].tolist() == [2, 1]

    stack.faults.clear()
    wait_until(lambda: stack.tier("volatile")["failure"] is None, "the volatile tier to be back")
    assert stack.fetch(keys)[1][:, 0].tolist() == [2, 1]
    assert fetch(stack.volatile, "user", keys_of(1, 2, 3))[0].tolist() == [False, False, True]


def test_background_work_survives_the_unexpected(make: Callable[..., Stack], caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected exception ends one piece of work, not the worker."""
    stack = make()
    stack.volatile.insert_absent = lambda *_: 1 / 0  # type: ignore[method-assign, assignment]
    stack.fetch(KEYS[:5])
    await_promotions(stack.server)
    del stack.volatile.insert_absent
    stack.fetch(KEYS[:5])
    await_promotions(stack.server)
    assert stack.volatile.num_rows("user") == 5
    assert "ZeroDivisionError" in caplog.text


def test_a_tier_that_takes_no_rows_is_still_read(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only or full Redis stays in use; that it refuses promotions is logged once, however often it does."""
    monkeypatch.setattr(tier_module, "PAUSE_S", 0.0)
    volatile, persistent = MemoryStore(DIMS), MemoryStore(DIMS)
    volatile.insert("user", KEYS[:10], VECTORS[:10])
    persistent.insert("user", KEYS, VECTORS)
    read_only = FaultStore(volatile, lambda verb: UnavailableError("READONLY") if verb == "insert_absent" else None)
    tiers = [Tier("volatile", read_only, volatile=True, cache_missed_keys=True), Tier("persistent", persistent)]
    server = ParameterServer(tiers)
    for _ in range(3):
        out = np.zeros((20, 4), np.float32)
        assert fetch_any(server, [FetchRequest("user", KEYS[:20], out)])[0].all()
        assert_same_bits(out, VECTORS[:20])
        await_promotions(server)
    stats = asdict(server.stats())["tiers"]["volatile"]
    server.close()
    assert (stats["failure"], stats["hits"], stats["failures"], stats["promoted"]) == (None, 30, 3, 0)
    assert caplog.text.count("READONLY") == 1


def test_a_tier_that_answers_checks_only_is_tried_less_and_less(
    make: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests do not test it again and again; after a steady time it is tried as soon as any other."""
    monkeypatch.setattr(tier_health, "STEADY_S", 1e6)
    stack = make()
    stack.volatile.insert("user", KEYS, VECTORS)
    tier = stack.server.tiers[0]
    faulty = FaultStore(stack.volatile, lambda verb: UnavailableError("late") if verb == "fetch_many" else None)
    sound, tier.store = tier.store, faulty
    pauses = []
    for _ in range(4):
        wait_until(lambda: tier.health.failure is None, "the tier to come back")
        assert stack.fetch(KEYS)[0].all()
        pauses.append(tier.health.retry_pause_s)
    assert pauses == [0, 0.02, 0.04, 0.08]

    tier.store = sound
    wait_until(lambda: tier.health.failure is None, "the tier to come back")
    tier.health.back_since -= tier_health.STEADY_S
    stack.faults["volatile"] = UnavailableError("gone")
    stack.fetch(KEYS)
    assert tier.health.retry_pause_s == 0


def test_promotions_are_bounded(make: Callable[..., Stack]) -> None:
    """Rows that do not fit in the queue are dropped and counted; requests do not wait."""
    stack = make()
    in_hand = PROMOTIONS_AT_ONCE
    with stack.server.frozen():
        for _ in range(MAX_PENDING_PROMOTIONS + in_hand + 10):
            assert stack.fetch(KEYS[:7])[0].all()
        assert stack.server.stats().dropped_promotions >= 7 * 8
    await_promotions(stack.server)
    assert stack.volatile.num_rows("user") == 7


def test_a_closed_server_refuses(make: Callable[..., Stack]) -> None:
    """After close, which may be called twice, a fetch is an error; nothing waits without end."""
    stack = make()
    stack.server.close()
    stack.server.close()
    await_promotions(stack.server)
    with pytest.raises(SessionClosedError):
        stack.fetch(KEYS)


def test_an_unknown_table_is_no_outage(make: Callable[..., Stack]) -> None:
    """The caller's mistake is the caller's error."""
    stack = make()
    with pytest.raises(TableNotFoundError):
        fetch_any(stack.server, [FetchRequest("nobody", KEYS, np.zeros((200, 4), np.float32))])
    assert stack.tier("volatile")["failure"] is None


STEPS = st.lists(
    st.tuples(st.sampled_from(["insert", "erase", "fetch", "break", "mend"]), st.lists(st.integers(-4, 4), max_size=6)),
    max_size=25,
)


@settings(max_examples=60)
@given(STEPS)
def test_any_sequence_with_outages_answers_as_a_dictionary(steps: list[tuple[str, list[int]]]) -> None:
    """Whatever is written while the volatile tier fails and comes back, every answer is the newest row."""
    stack = Stack()
    rows = {key: vector[0] for key, vector in zip(KEYS.tolist(), VECTORS, strict=True)}
    try:
        for number, (verb, keys) in enumerate(steps):
            array = np.array(keys, np.int64)
            if verb == "insert":
                stack.server.insert("user", array, np.full((len(keys), 4), number, np.float32))
                rows.update(dict.fromkeys(keys, np.float32(number)))
            elif verb == "erase":
                stack.server.erase("user", array)
                rows = {key: row for key, row in rows.items() if key not in keys}
            elif verb == "break":
                stack.faults["volatile"] = UnavailableError("gone")
            elif verb == "mend":
                stack.faults.pop("volatile", None)
                stack.server.refresh()
            found, out = stack.fetch(array)
            assert found.tolist() == [key in rows for key in keys]
            expected = np.array([rows.get(key, np.float32(-7777)) for key in keys], np.float32)
            assert_same_bits(out[:, 0], expected)
    finally:
        stack.server.close()


def test_redis_over_rocksdb_survives_the_death_of_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed, empty after a restart, stopped and continued: every answer is right, and Redis fills up again."""
    monkeypatch.setattr(upkeep_module, "ROUND_INTERVAL_S", 0.05)
    url, namespace = f"rocksdb://{tmp_path}/db", Namespace("ctr", "1")
    with create_store(url, namespace, DIMS, writable=True) as writer:
        writer.insert("user", KEYS, VECTORS)
    with RedisServer() as redis_server:
        volatile: EmbeddingStore = create_store(redis_server.url, namespace, DIMS, timeout_ms=300)
        patient = create_store(redis_server.url, namespace, DIMS, timeout_ms=PATIENCE_MS)
        tiers = [Tier("redis", volatile, volatile=True, cache_missed_keys=True)]
        server = ParameterServer([*tiers, Tier("rocksdb", create_store(url, namespace, DIMS))])

        def right() -> bool:
            out = np.zeros((200, 4), np.float32)
            found = fetch_any(server, [FetchRequest("user", KEYS, out)])[0]
            assert found.all()
            assert_same_bits(out, VECTORS)
            return server.stats().tiers["redis"].failure is None

        def full() -> bool:
            return right() and patient.num_rows("user") == 200

        wait_until(full, "Redis to be filled")
        redis_server.stop(signal.SIGKILL)
        assert not right()
        redis_server.start()
        wait_until(full, "Redis to be used, and filled, again")
        redis_server.send_signal(signal.SIGSTOP)
        assert not right()
        redis_server.send_signal(signal.SIGCONT)
        wait_until(full, "Redis to be used again")
        server.close()
        patient.close()


def test_a_refresh_that_a_close_overtakes_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """It logged a failure of the background work, and returned as if rows were fresh."""
    stack = Stack()
    stack.server.close()
    stack.faults["persistent"] = SessionClosedError("the store has been closed")

    with pytest.raises(SessionClosedError):
        stack.server.refresh()

    assert not caplog.records
