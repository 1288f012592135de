"""The stores and the broker of one deployment, as processes of this machine."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from inference_session.parameter_server.base import EmbeddingStore
from inference_session.parameter_server.create import create_store
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.table_push import TablePush
from tests.campaign.contents import MODEL, SPEC, TABLES
from tests.campaign.expectations import Writer
from tests.campaign.plan import Plan
from tests.testing.broker import Broker
from tests.testing.proxy import Proxy
from tests.testing.servers import PATIENCE_MS, RedisClusterServers, RedisSentinelServers, RedisServer

DIMS = {table.name: table.spec.embedding_dim for table in TABLES}


class Stores:
    """The stores and the broker below a deployment's cache; None: it has none of this kind. A context manager."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.folder = folder
        self.is_redis_alone = plan.is_redis_alone
        self.has_rocksdb = plan.has_rocksdb
        self.redis = RedisServer() if plan.volatile == "redis" else None
        self.cluster = RedisClusterServers(node_timeout_ms=3000) if plan.volatile == "cluster" else None
        self.sentinels = RedisSentinelServers() if plan.volatile == "sentinel" else None
        self.broker = Broker() if plan.writer is Writer.STREAM else None
        self.redis_proxy = Proxy(self.redis.port) if self.redis and plan.by_proxy else None
        self.broker_proxy = Proxy(self.broker.port) if self.broker and plan.by_proxy else None
        if self.broker and self.broker_proxy:
            self.broker.advertised_port = self.broker_proxy.port
        self.small_disk: Path | None = None
        """Where RocksDBs are on a file system that can be filled; None: they are not, or mounting is not permitted."""
        self._wants_small_disk = plan.has_small_disk
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> Stores:
        with contextlib.ExitStack() as stack:
            for server in (self.redis, self.cluster, self.sentinels, self.broker, self.redis_proxy, self.broker_proxy):
                if server is not None:
                    stack.enter_context(server)
            if self._wants_small_disk:
                self.small_disk = stack.enter_context(_mounted(self.folder / "databases"))
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    @property
    def volatile_url(self) -> str | None:
        """The URL of the volatile store in the model's settings."""
        if self.redis_proxy is not None:
            return f"redis://127.0.0.1:{self.redis_proxy.port}"
        server = self.redis or self.cluster or self.sentinels
        return None if server is None else server.url

    @property
    def stream_url(self) -> str | None:
        """Of the broker."""
        if self.broker_proxy is not None:
            return f"kafka://127.0.0.1:{self.broker_proxy.port}"
        return self.broker.url if self.broker else None

    def database(self, version: int) -> Path:
        """The RocksDB of a version: each has its own, as a database has one writer."""
        return (self.small_disk or self.folder) / f"database-{version}"

    def settings(self, version: int) -> Mapping[str, str]:
        """The stores in session.json of a version."""
        found = {"volatile_store": self.volatile_url, "update_stream": self.stream_url}
        found["persistent_store"] = f"rocksdb://{self.database(version)}" if self.has_rocksdb else None
        return {name: value for name, value in found.items() if value is not None}

    def open(self, url: str, version: int, *, writable: bool = False) -> EmbeddingStore:
        """A store as another process would open it."""
        namespace = Namespace(MODEL, str(version))
        return create_store(url, namespace, DIMS, writable=writable, timeout_ms=PATIENCE_MS)

    def push(self, directory: Path, *, volatile: bool) -> None:
        """Write the rows of a version's files to its persistent store, and to the volatile one if wanted."""
        settings = self.settings(int(directory.name))
        for name in ("persistent_store", "volatile_store") if volatile else ("persistent_store",):
            if name in settings:
                with self.open(settings[name], int(directory.name), writable=True) as store:
                    for table in SPEC.tables:
                        TablePush(directory, table, store).run()


@contextlib.contextmanager
def _mounted(folder: Path) -> Iterator[Path | None]:
    """A small separate file system in memory; None if that is not permitted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128m", "campaign", str(folder)]
    is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield folder if is_mounted else None
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
