"""Where a Redis's rows are, and the `redis` package's client for everything but rows: topology, counting, scanning."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from inference_session.errors import ConfigurationError, StoreError, UnavailableError
from inference_session.parameter_server import redis_layout as layout
from inference_session.parameter_server.namespace import StoredTable
from inference_session.parameter_server.redis_connection import PASSING_CODES, Address, RedirectedError
from inference_session.parameter_server.store_url import StoreUrl

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.cluster import RedisCluster
    from redis.crc import key_slot
    from redis.credentials import CredentialProvider
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.exceptions import SlotNotCoveredError
    from redis.exceptions import TimeoutError as RedisTimeoutError
    from redis.retry import Retry
except ImportError as missing:
    raise ConfigurationError("a Redis store needs the package `redis`: pip install 'hotrow[redis]'") from missing

SCAN_STEP = 1000
"""Names or fields that one command of a scan goes through, about: little enough to be no other client's delay."""
_MIN_REFRESH_S = 0.1


class RedisServers:
    """Where a Redis's rows are, and the `redis` package's client for everything but rows. Thread-safe."""

    def __init__(self, url: StoreUrl, timeout_ms: int) -> None:
        self._url = url
        self._timeout_s = timeout_ms / 1000
        self._lock = threading.Lock()
        self._client: Any = None
        self._addresses: dict[bytes, Address] = {}
        self._refreshed = 0.0

    def address(self, name: bytes) -> Address:
        """The server that has the hash of this name."""
        if not self._url.is_cluster:
            return self._url.host, self._url.port
        address = self._addresses.get(name)
        if address is None:
            with self.client() as client:
                try:
                    node = client.nodes_manager.get_node_from_slot(key_slot(name))
                except SlotNotCoveredError as error:  # at the time when we last asked
                    raise RedirectedError(f"no node of {str(self._url)!r} has the slot of {name!r}") from error
            address = self._addresses[name] = (node.host, node.port)
        return address

    def refresh(self) -> None:
        """Ask a Cluster anew which node has what; at most ten times a second, however many threads ask."""
        if not self._url.is_cluster:
            return
        with self.client() as client, self._lock:
            if time.monotonic() - self._refreshed >= _MIN_REFRESH_S:
                client.nodes_manager.initialize()
                self._refreshed = time.monotonic()
            self._addresses = {}

    def ping(self) -> None:
        """Raise unless all servers answer that have rows, by what a Cluster says now: one that hangs may have been
        replaced, which the package learns from errors only that we do not leave to it.
        """
        self.refresh()
        with self.client() as client, _unsaved_is_well():
            if self._url.is_cluster:
                client.ping(target_nodes=RedisCluster.PRIMARIES)
            else:
                client.ping()

    def run_ids(self) -> str:
        """What tells the processes that have rows from those that came before or come after them."""
        with self.client() as client:
            if not self._url.is_cluster:
                return str(client.info("server")["run_id"])
            answers = client.info("server", target_nodes=RedisCluster.PRIMARIES)
            # Of a single node the package gives its answer as it is.
            nodes = [answers] if "run_id" in answers else answers.values()
            return " ".join(sorted(str(node["run_id"]) for node in nodes))

    @contextmanager
    def client(self) -> Iterator[Any]:
        """The package's client, its errors translated into ours."""
        try:
            with self._lock:
                if self._client is None:
                    self._client = self._connect()
            yield self._client
        except (redis.RedisError, redis.exceptions.RedisClusterException) as error:
            raise self._translated(error) from None  # the package's texts and frames may hold the password
        except OSError as error:
            raise UnavailableError(f"store {str(self._url)!r} cannot be reached: {error}") from error

    def close(self) -> None:
        """Close the package's connections."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connect(self) -> Any:
        url = self._url
        settings: dict[str, Any] = {
            "socket_timeout": self._timeout_s,
            "socket_connect_timeout": self._timeout_s,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
        }
        if (url.user, url.password) != (None, None):
            settings["credential_provider"] = _Credentials(url)
        if url.uses_tls:
            settings |= _tls_settings(url)
        if url.is_cluster:
            return RedisCluster(host=url.host, port=url.port, require_full_coverage=False, **settings)
        if url.path:
            return redis.Redis(unix_socket_path=url.path, db=url.db, **settings)
        return redis.Redis(host=url.host, port=url.port, db=url.db, **settings)

    def _translated(self, error: Exception) -> Exception:
        text = str(error)
        for password in filter(None, (self._url.password, self._url.current_password())):
            text = text.replace(password, "***")
        if isinstance(error, redis.exceptions.MovedError) and not self._url.is_cluster:
            text = f"this is a node of a Cluster ({text}); write {self._url.scheme}+cluster:// for its URL"
        denied = redis.AuthenticationError, redis.exceptions.AuthorizationError
        passing = (
            RedisConnectionError,
            RedisTimeoutError,
            redis.exceptions.InvalidResponse,
            redis.exceptions.ReadOnlyError,
            redis.exceptions.OutOfMemoryError,
            redis.exceptions.RedisClusterException,
            redis.exceptions.ClusterError,
            redis.exceptions.TryAgainError,
        )
        passes = isinstance(error, passing) or not PASSING_CODES.isdisjoint(text.split())
        kind = UnavailableError if passes and not isinstance(error, denied) else StoreError
        return kind(f"store {str(self._url)!r}: {text}")


class _Credentials(CredentialProvider):
    """Asked by the package for each connection."""

    def __init__(self, url: StoreUrl) -> None:
        self._url = url

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._url.current_password() or ""
        return (password,) if self._url.user is None else (self._url.user, password)


@contextmanager
def _unsaved_is_well() -> Iterator[None]:
    """A Redis whose disk takes no snapshot refuses PING, as it refuses writes; rows can be read all the same."""
    try:
        yield
    except redis.ResponseError as error:
        if not str(error).startswith("MISCONF"):
            raise


def list_redis_tables(url: StoreUrl, *, timeout_ms: int) -> list[StoredTable]:
    """All tables of all models in a Redis; looks through its whole key space, in small steps."""
    servers = RedisServers(url, timeout_ms)
    counts: dict[str, int] = {}
    widths: dict[str, int] = {}
    try:
        with servers.client() as client:
            for name in client.scan_iter(match="hps_et{*}v", count=SCAN_STEP):
                parts = layout.split_name(name)
                if parts is not None:
                    num_rows, widths[parts[0]] = _rows_and_bytes(client, name)
                    counts[parts[0]] = counts.get(parts[0], 0) + num_rows
    finally:
        servers.close()
    return [StoredTable(tag, counts[tag], widths[tag] // 4) for tag in sorted(counts)]


def _rows_and_bytes(client: Any, name: bytes) -> tuple[int, int]:
    """How many rows a hash has, and how many bytes one of them."""
    try:
        _, rows = client.hscan(name, 0, count=1)
        return int(client.hlen(name)), len(next(iter(rows.values()), b""))
    except redis.ResponseError as error:
        raise redis.ResponseError(f"{name!r}, which is named as a table's rows: {error}") from None


def _tls_settings(url: StoreUrl) -> dict[str, Any]:
    options = url.options
    return {
        "ssl": True,
        "ssl_ca_certs": options.get("tls_ca_certificate"),
        "ssl_certfile": options.get("tls_client_certificate"),
        "ssl_keyfile": options.get("tls_client_key"),
    }
