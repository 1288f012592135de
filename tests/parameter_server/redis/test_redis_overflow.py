"""A Redis that may hold a limited number of rows: which rows are evicted, and that recently used ones stay."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import redis

from inference_session.errors import ConfigurationError
from inference_session.parameter_server.base import FetchRequest
from inference_session.parameter_server.create import create_store
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.redis import layout
from inference_session.parameter_server.redis.store import RedisStore
from inference_session.parameter_server.server import ParameterServer
from inference_session.parameter_server.tier import Tier
from inference_session.tables.ordered_updates import OrderedUpdates, SourceProgress
from tests.testing.memory_store import MemoryStore
from tests.testing.server_calls import fetch_any
from tests.testing.servers import PATIENCE_MS, RedisClusterServers, RedisServer, wait_until
from tests.testing.store_contract import DIMS, assert_same_bits, fetch, keys_of, packed, random_keys, random_vectors

KEYS, VECTORS = random_keys(400), random_vectors(400, 4)
POLICIES = ("evict_oldest", "evict_random", "evict_least_used")
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def open_store(url: str, policy: str, *, margin: int = 40, target: float = 0.5, partitions: int = 2) -> RedisStore:
    """A store in its own name space."""
    options = f"overflow_margin={margin}&overflow_policy={policy}&overflow_resolution_target={target}"
    namespace = Namespace(f"overflow{next(_numbers)}", "1")
    store = create_store(f"{url}?partitions={partitions}&{options}", namespace, DIMS, timeout_ms=PATIENCE_MS)
    assert isinstance(store, RedisStore)
    return store


def marks(store: RedisStore, client: redis.Redis, table: str = "user") -> dict[int, bytes]:
    """The mark that is stored for each row."""
    found: dict[bytes, bytes] = {}
    for partition in range(store.num_partitions(table)):
        found |= client.hgetall(layout.times_name(store.namespace.tag(table), partition))
    return {int.from_bytes(key, "little", signed=True): mark for key, mark in found.items()}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("absent", [False, True], ids=["insert", "insert_absent"])
def test_no_partition_holds_more_than_it_may(server: RedisServer, policy: str, absent: bool) -> None:
    """After an insert each partition is within its margin, or down at the target; rows and marks go together."""
    with open_store(server.url, policy) as store, server.client() as client:
        for begin in range(0, 400, 25):
            insert = store.insert_absent if absent else store.insert
            insert("user", KEYS[begin : begin + 25], VECTORS[begin : begin + 25])
            sizes = [client.hlen(layout.rows_name(store.namespace.tag("user"), p)) for p in (0, 1)]
            assert max(sizes) <= 40
        found, out = fetch(store, "user", KEYS)
        assert 40 <= found.sum() <= 80
        assert_same_bits(out[found], VECTORS[found])
        assert set(marks(store, client)) == set(KEYS[found].tolist())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("margin", "target"), [(40, 0.0), (1, 0.8)], ids=["target of 0", "margin of 1"])
def test_an_eviction_leaves_a_row(server: RedisServer, policy: str, margin: int, target: float) -> None:
    """Otherwise the note of an update would go with the hash, and the next update find that Redis has lost this one."""
    with open_store(server.url, policy, margin=margin, target=target, partitions=1) as store:
        for begin in range(0, 400, 100):
            part = slice(begin, begin + 100)
            progress = [SourceProgress("topic/0", "id", 0, begin, begin + 100)]
            none, sources = np.zeros(0, np.intp), np.zeros(100, np.intp)
            updates = OrderedUpdates(KEYS[part], VECTORS[part], KEYS[:0], sources, none, progress)
            assert not store.apply("user", updates).lost
            assert store.num_rows("user") == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_room_is_made_in_a_cluster(policy: str) -> None:
    """Partitions on different nodes are evicted from alike."""
    with RedisClusterServers() as cluster, open_store(cluster.url, policy) as store:
        store.insert("user", KEYS, VECTORS)
        assert store.num_rows("user") == 40


def test_the_oldest_rows_leave(server: RedisServer) -> None:
    """Rows whose last insert or touch is longest ago go first."""
    with open_store(server.url, "evict_oldest", partitions=1) as store, server.client() as client:
        store.insert("user", KEYS[:40], VECTORS[:40])
        name = layout.times_name(store.namespace.tag("user"), 0)
        for age, key in enumerate(KEYS[:40].tolist()):
            client.hset(name, packed(key), (1_000_000 - age).to_bytes(8, "little"))
        store.touch("user", KEYS[35:40])

        store.insert("user", KEYS[40:41], VECTORS[40:41])

        assert fetch(store, "user", KEYS[:41])[0].tolist() == [True] * 14 + [False] * 21 + [True] * 6


def test_the_least_used_rows_leave(server: RedisServer) -> None:
    """Rows that were touched less often go first; times from before do not count."""
    with open_store(server.url, "evict_least_used", partitions=1) as store, server.client() as client:
        store.insert("user", KEYS[:40], VECTORS[:40])
        client.hset(
            layout.times_name(store.namespace.tag("user"), 0), packed(int(KEYS[7])), (10**9).to_bytes(8, "little")
        )
        store.touch("user", np.repeat(KEYS[:20], 3))
        store.touch("user", np.delete(KEYS[:20], 7))
        store.insert("user", KEYS[:1], VECTORS[:1])  # which keeps its uses
        assert marks(store, client)[int(KEYS[0])] == b"5"
        assert marks(store, client)[int(KEYS[7])] == b"3"

        store.insert("user", KEYS[40:41], VECTORS[40:41])

        assert fetch(store, "user", KEYS[:20])[0].all()
        assert store.num_rows("user") == 20


def test_rows_without_marks_leave_as_well(server: RedisServer) -> None:
    """Rows that others have written without a time are evicted in the end."""
    with open_store(server.url, "evict_oldest", partitions=1) as store, server.client() as client:
        name = layout.rows_name(store.namespace.tag("user"), 0)
        client.hset(name, mapping={packed(key): VECTORS[0].tobytes() for key in KEYS[:60].tolist()})
        store.insert("user", KEYS[60:61], VECTORS[60:61])
        assert store.num_rows("user") == 20


@pytest.mark.parametrize(
    ("option", "allowed"),
    [
        ("overflow_margin=0", "whole numbers from 1"),
        ("overflow_policy=evict_newest", "evict_oldest, evict_random, evict_least_used"),
        ("overflow_resolution_target=1.5", "numbers from 0 to 1"),
        ("overflow_resolution_target=half", "numbers from 0 to 1"),
    ],
)
def test_options_that_mean_nothing_are_refused(option: str, allowed: str) -> None:
    """A wrong value is named with those allowed, before anything is sent, and the password is not."""
    with pytest.raises(ConfigurationError, match=allowed) as raised:
        create_store(f"redis://:secret@127.0.0.1?{option}", Namespace("m", "1"), DIMS)
    assert "secret" not in str(raised.value)


def test_rows_that_are_read_are_touched(server: RedisServer) -> None:
    """In the background their time becomes that of the read; rows erased meanwhile get no time back."""
    with open_store(server.url, "evict_oldest") as store, server.client() as client:
        store.insert("user", KEYS[:20], VECTORS[:20])
        for partition in (0, 1):
            name = layout.times_name(store.namespace.tag("user"), partition)
            client.hset(name, mapping=dict.fromkeys(client.hkeys(name), (1000).to_bytes(8, "little")))
        tiers = [Tier("volatile", store, volatile=True, touches=True), Tier("persistent", MemoryStore(DIMS))]
        parameter_server = ParameterServer(tiers)
        asked = np.concatenate([KEYS[:10], keys_of(4321)])
        with parameter_server.frozen():  # the background has to wait
            fetch_any(parameter_server, [FetchRequest("user", asked, np.empty((11, 4), np.float32))])
        parameter_server.erase("user", KEYS[:2])

        wait_until(lambda: parameter_server.stats().tiers["volatile"].touched > 0, "rows to be touched")

        times = {key: int.from_bytes(mark, "little") for key, mark in marks(store, client).items()}
        assert set(times) == set(KEYS[2:20].tolist())
        assert [times[key] > 1000 for key in KEYS[2:20].tolist()] == [True] * 8 + [False] * 10
        parameter_server.close()


def test_a_redis_that_takes_no_writes_is_read_all_the_same(server: RedisServer) -> None:
    """Rows that cannot be touched are still answered, and the tier stays in use."""
    user = f"reader{next(_numbers)}"
    with server.client() as client, open_store(server.url, "evict_oldest") as store:
        store.insert("user", KEYS, VECTORS[:, :4])
        client.execute_command("ACL", "SETUSER", user, "on", ">pass", "~*", "+@read", "+@connection")
        url = server.url.replace("redis://", f"redis://{user}:pass@")
        reader = create_store(url + "?partitions=2", store.namespace, DIMS, timeout_ms=PATIENCE_MS)
        parameter_server = ParameterServer([Tier("volatile", reader, volatile=True, touches=True)])
        held = fetch(store, "user", KEYS)[0]

        def failed() -> bool:
            found = fetch_any(parameter_server, [FetchRequest("user", KEYS, np.empty((400, 4), np.float32))])[0]
            assert (found == held).all()
            return bool(parameter_server.stats().tiers["volatile"].failures)

        wait_until(failed, "the touch to fail")
        assert parameter_server.stats().tiers["volatile"].failure is None
        parameter_server.close()
