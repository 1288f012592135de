"""A Redis whose master sentinels name: real sentinels, a master and a replica, and fail-overs while rows are served."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from inference_session import InferenceSession
from inference_session.errors import ConfigurationError, StoreError, UnavailableError
from inference_session.parameter_server.create import create_store
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.redis.store import RedisStore, list_redis_tables
from inference_session.urls.store_url import StoreUrl
from tests.testing import small_model
from tests.testing.certificates import new_authority
from tests.testing.redis_contract import RedisContract
from tests.testing.redis_with_tls import TlsServers, tls_redis_binary
from tests.testing.servers import (
    MASTER_NAME,
    PATIENCE_MS,
    RedisSentinelServers,
    RedisServer,
    Sentinel,
    answering,
    encrypting,
    free_port,
    redis_binary,
    valkey_binary,
    wait_until,
)
from tests.testing.store_contract import DIMS, assert_same_bits, fetch, random_keys, random_vectors
from tests.testing.stored_model import push

KEYS, VECTORS = random_keys(500), random_vectors(500, 4)
EVERY = np.arange(50)
_numbers = itertools.count()


def open_store(url: str, *, timeout_ms: int = PATIENCE_MS) -> RedisStore:
    """A store in its own name space."""
    store = create_store(url, Namespace(f"watched{next(_numbers)}", "1"), DIMS, timeout_ms=timeout_ms)
    assert isinstance(store, RedisStore)
    return store


def finds_all(store: RedisStore) -> bool:
    try:
        return bool(fetch(store, "user", KEYS)[0].all())
    except UnavailableError:
        return False


def is_well(store: RedisStore) -> bool:
    """Whether the store answers, after what is done for it in the background."""
    try:
        store.refresh()
        store.check()
    except UnavailableError:
        return False
    return finds_all(store)


@pytest.fixture(scope="module")
def servers() -> Iterator[RedisSentinelServers]:
    """None of which a test stops."""
    with RedisSentinelServers(down_after_ms=60_000) as servers:
        yield servers


class TestSentinel(RedisContract):
    """The stores' contract, by way of sentinels."""

    @pytest.fixture
    def store(self, servers: RedisSentinelServers) -> Iterator[RedisStore]:
        with servers.client(servers.master) as self.client, open_store(servers.url) as self.bound:
            yield self.bound


def fail_over(servers: RedisSentinelServers, store: RedisStore, number: signal.Signals) -> None:
    """Send the master a signal that ends or stops it; the store, which holds VECTORS, answers them from the replica."""
    servers.wait_for_replica()
    servers.master.send_signal(number)
    with pytest.raises(UnavailableError):
        fetch(store, "user", KEYS)
    wait_until(lambda: is_well(store), "the replica to take over")
    assert_same_bits(fetch(store, "user", KEYS)[1], VECTORS)


@pytest.mark.parametrize(
    ("number", "binary"), [(signal.SIGKILL, redis_binary), (signal.SIGSTOP, valkey_binary)], ids=["killed", "stopped"]
)
def test_the_new_master_answers_after_a_fail_over(number: signal.Signals, binary: Callable[[], str]) -> None:
    """All rows that the replica had are there, new ones are written to it, and the old master is not asked again."""
    with (
        RedisSentinelServers(binary=binary()) as servers,
        open_store(servers.url, timeout_ms=2000) as store,
    ):
        store.insert("user", KEYS, VECTORS)
        before = store.incarnation()
        fail_over(servers, store, number)
        assert store.incarnation() != before
        store.insert("user", KEYS, -VECTORS)
        if number is signal.SIGKILL:
            servers.master.stop(number)
            servers.master.start()
        else:
            servers.master.send_signal(signal.SIGCONT)
        store.refresh()
        assert_same_bits(fetch(store, "user", KEYS)[1], -VECTORS)
        store.check()


def test_a_replica_is_never_read(servers: RedisSentinelServers) -> None:
    """A server that sentinels name but that is no longer a master, as briefly in a fail-over, is not used."""
    port = servers.replica.port
    said = b"*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%d\r\n" % (len(str(port)), port)
    with answering(said) as sentinel, open_store(f"redis+sentinel://127.0.0.1:{sentinel}/rows") as store:
        for call in (store.check, lambda: fetch(store, "user", KEYS)):
            with pytest.raises(UnavailableError, match=f"{port} is no longer the master"):
                call()


def test_one_sentinel_is_enough(servers: RedisSentinelServers) -> None:
    """Others may be dead, or hang; once the master is known, all may be."""
    good = servers.sentinels[0].port
    with answering(b"") as silent:
        url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{silent},127.0.0.1:{good}/{MASTER_NAME}"
        with open_store(url, timeout_ms=4000) as store:
            store.insert("user", KEYS, VECTORS)
            store.refresh()
            assert finds_all(store)
    with RedisSentinelServers() as alone, open_store(alone.url) as store:
        store.insert("user", KEYS, VECTORS)
        for sentinel in alone.sentinels:
            sentinel.stop(signal.SIGKILL)
        store.refresh()
        store.check()
        assert finds_all(store)


def test_what_is_wrong_is_said(servers: RedisSentinelServers) -> None:
    """No sentinel, an unknown master, and a Redis that is no sentinel are told apart."""
    port = free_port()
    for url, kind, said in (
        (f"redis+sentinel://127.0.0.1:{port}/rows", UnavailableError, str(port)),
        (servers.url.replace("/rows", "/others"), UnavailableError, "knows no master 'others'"),
        (f"redis+sentinel://127.0.0.1:{servers.master.port}/rows", StoreError, "unknown command"),
    ):
        with open_store(url) as store, pytest.raises(kind, match=said):
            store.check()


def test_passwords_of_servers_and_sentinels_are_apart(tmp_path: Path) -> None:
    """The URL's is the servers'; that of the sentinels stands in a file. Neither is shown."""
    secret = tmp_path / "secret"
    secret.write_text("of-sentinels", encoding="utf-8")
    options = "--requirepass", "of-servers", "--masterauth", "of-servers"
    lines = f"sentinel auth-pass {MASTER_NAME} of-servers", "requirepass of-sentinels"
    with RedisSentinelServers(*options, settings=lines, passwords=("of-servers", "of-sentinels")) as servers:
        hosts = servers.url.removeprefix("redis+sentinel://")
        for login, query, lets_in in (
            (":of-servers@", f"?sentinel_password_file={secret}", True),
            (":of-servers@", "", False),
            (":of-sentinels@", f"?sentinel_password_file={secret}", False),
        ):
            with open_store(f"redis+sentinel://{login}{hosts}/1{query}") as store:
                if lets_in:
                    store.insert("user", KEYS, VECTORS)
                    assert finds_all(store)
                    continue
                with pytest.raises(StoreError, match=r"NOAUTH|WRONGPASS") as caught:
                    store.check()
                assert not any(text in f"{caught.value}{store!r}" for text in ("of-servers", "of-sentinels"))
        url = StoreUrl.parse(f"redis+sentinel://:of-servers@{hosts}/1?sentinel_password_file={secret}")
        assert [table.num_rows for table in list_redis_tables(url, timeout_ms=PATIENCE_MS)] == [500]
        assert "of-servers" not in f"{url}{url!r}"


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("redis+sentinel://host:1", "names no master"),
        ("redis+sentinel:///rows", "needs hosts"),
        ("redis+sentinel://a:1,:2/rows", "needs hosts"),
        ("redis+sentinel://a:1,b:x/rows", "malformed host or port"),
        ("redis+sentinel://a:1/rows/one", "a database that is not a whole number"),
        ("redis+sentinel://a:1/rows?tls_server_name=x", "unknown option 'tls_server_name'"),
        ("redis+sentinel://a:1/rows?sentinel_password_file=relative", "allowed: an absolute path"),
    ],
)
def test_urls_that_mean_nothing_are_refused(url: str, match: str) -> None:
    """With what is wrong, and no password."""
    with pytest.raises(ConfigurationError, match=match) as caught:
        StoreUrl.parse(url.replace("://", "://:secret@", 1))
    assert "secret" not in str(caught.value)


def test_a_url_of_sentinels_is_shown_as_it_was_written() -> None:
    """But for the password."""
    text = "redis+sentinel://me:secret@[::1]:1,b:2/rows/3?partitions=4"
    assert str(StoreUrl.parse(text)) == text.replace("secret", "***")
    assert StoreUrl.parse("redis+sentinel://a,b:2/rows").sentinels == (("a", 26379), ("b", 2))


@pytest.mark.parametrize("has_rocksdb", [True, False], ids=["over RocksDB", "alone"])
def test_a_version_is_served_through_a_fail_over(
    tmp_path: Path, has_rocksdb: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Over a RocksDB every answer is the newest row; alone no row that the replica had is missing afterwards."""
    directory = tmp_path / "repository" / "small" / "1"
    rows = small_model.write(directory)["user_weight"]
    with RedisSentinelServers() as servers:
        stores = {"volatile_store": servers.url}
        if has_rocksdb:
            stores["persistent_store"] = f"rocksdb://{tmp_path}/db"
        for url in stores.values():
            push(directory, url)
        shutil.rmtree(directory / "tables")
        with InferenceSession.open(directory, cache_bytes=0, store_timeout_ms=2000, **stores) as session:
            session.update("user.weight", EVERY, -rows)
            servers.wait_for_replica()
            servers.master.stop(signal.SIGKILL)

            def is_back() -> bool:
                answer = session.lookup("user.weight", EVERY)
                assert not has_rocksdb or (answer == -rows).all()
                tier = session.stats()["tiers"]["volatile"]
                return tier["outages"] > 0 and tier["failure"] is None

            wait_until(is_back, "the replica to be used")
            np.testing.assert_array_equal(session.lookup("user.weight", EVERY), -rows)
            session.update("user.weight", EVERY, rows)
            np.testing.assert_array_equal(session.lookup("user.weight", EVERY), rows)
            if not has_rocksdb:
                wait_until(lambda: "may lack some of them" in caplog.text, "the warning")


def test_the_redis_package_agrees(servers: RedisSentinelServers) -> None:
    """Another client that asks the sentinels finds what was written."""
    with open_store(servers.url) as store:
        store.insert("user", KEYS, VECTORS)
        watched = redis.Sentinel([("127.0.0.1", sentinel.port) for sentinel in servers.sentinels], protocol=2)
        tag = store.namespace.tag("user")
        with watched.master_for(MASTER_NAME) as client:
            assert sum(client.hlen(f"hps_et{{{tag}/p{p}}}v") for p in range(8)) == len(KEYS)


def watch(sentinel: Sentinel, port: int) -> None:
    """Let a sentinel name the master at this port, whatever it thinks of it: it cannot speak TLS itself."""
    with sentinel.client() as client:
        client.execute_command("SENTINEL", "REMOVE", MASTER_NAME)
        client.execute_command("SENTINEL", "MONITOR", MASTER_NAME, "127.0.0.1", port, 1)
        client.execute_command("SENTINEL", "SET", MASTER_NAME, "down-after-milliseconds", PATIENCE_MS)


def keeps_rows(store: RedisStore) -> bool:
    """Whether it takes rows, and gives them back."""
    try:
        store.refresh()
        store.insert("user", KEYS, VECTORS)
    except UnavailableError:
        return False
    return finds_all(store)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_fail_over_of_servers_that_speak_tls_alone(tmp_path: Path, number: signal.Signals) -> None:
    """Sentinels, master and replica take no connection without TLS: the store finds the new master, and its rows."""
    authority = new_authority(tmp_path / "authority")
    tls = TlsServers(authority.issue("127.0.0.1", "localhost"), authority)
    with RedisSentinelServers(binary=tls_redis_binary(), tls=tls) as servers:
        url = f"{servers.url}?tls_ca_certificate={authority.file}"
        with open_store(url, timeout_ms=2000) as store:
            store.insert("user", KEYS, VECTORS)
            fail_over(servers, store, number)
            store.insert("user", KEYS, -VECTORS)
            assert_same_bits(fetch(store, "user", KEYS)[1], -VECTORS)
        for bad in (servers.url, servers.url.replace("rediss", "redis")):
            with open_store(bad, timeout_ms=2000) as store, pytest.raises(UnavailableError):
                store.check()


def test_sentinels_and_masters_over_tls(tmp_path: Path) -> None:
    """All connections are encrypted, also to a master that is named later; the name in the certificate counts."""
    authority = new_authority(tmp_path / "authority")
    certificate = authority.issue("redis.internal")
    trusted = f"?tls_ca_certificate={authority.file}"
    with contextlib.ExitStack() as stack:
        masters = [stack.enter_context(RedisServer()) for _ in range(2)]
        sentinel = stack.enter_context(Sentinel(masters[0]))
        ports = [
            stack.enter_context(encrypting(server.port, certificate.file, certificate.key))
            for server in (sentinel, *masters)
        ]
        url = f"//127.0.0.1:{ports[0]}/{MASTER_NAME}"
        watch(sentinel, ports[1])
        with open_store(f"rediss+sentinel:{url}{trusted}&tls_server_name=redis.internal") as store:
            for master, port in zip(masters, ports[1:], strict=True):
                watch(sentinel, port)
                wait_until(lambda: keeps_rows(store), "rows in this master")
                with master.client() as client:
                    assert client.dbsize() > 0
                master.stop()
        for bad in (f"rediss+sentinel:{url}{trusted}", f"redis+sentinel:{url}"):
            with open_store(bad, timeout_ms=2000) as store, pytest.raises(UnavailableError):
                store.check()
