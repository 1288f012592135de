"""The stores and the broker of one deployment, as processes of this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from inference_session.parameter_server.base import EmbeddingStore
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.store_url import create_store
from inference_session.parameter_server.table_push import TablePush
from tests.campaign.contents import MODEL, SPEC, TABLES
from tests.parameter_server.servers import PATIENCE_MS, RedisClusterServers, RedisServer
from tests.update_stream.broker import Broker

DIMS = {table.name: table.spec.embedding_dim for table in TABLES}


@dataclass
class Stores:
    """What a deployment has below its cache; None: nothing of the kind."""

    folder: Path
    redis: RedisServer | None = None
    cluster: RedisClusterServers | None = None
    broker: Broker | None = None
    has_rocksdb: bool = False
    _closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Stores:
        with contextlib.ExitStack() as stack:
            for server in (self.redis, self.cluster, self.broker):
                if server is not None:
                    stack.enter_context(server)
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    @property
    def volatile_url(self) -> str | None:
        """Of the volatile store."""
        server = self.redis or self.cluster
        return None if server is None else server.url

    def database(self, version: int) -> Path:
        """The RocksDB of a version: each has its own, as a database has one writer."""
        return self.folder / f"database-{version}"

    def settings(self, version: int) -> Mapping[str, str]:
        """What session.json of a version says of its stores."""
        found = {"volatile_store": self.volatile_url}
        found["persistent_store"] = f"rocksdb://{self.database(version)}" if self.has_rocksdb else None
        found["update_stream"] = self.broker.url if self.broker else None
        return {name: value for name, value in found.items() if value is not None}

    def open(self, url: str, version: int, *, writable: bool = False) -> EmbeddingStore:
        """A store as another process would open it."""
        namespace = Namespace(MODEL, str(version))
        return create_store(url, namespace, DIMS, writable=writable, timeout_ms=PATIENCE_MS)

    def push(self, directory: Path, url: str) -> None:
        """Fill a store with the rows of a version's files."""
        with self.open(url, int(directory.name), writable=True) as store:
            for table in SPEC.tables:
                TablePush(directory, table, store).run()

    def push_all(self, directory: Path, *, volatile: bool) -> None:
        """Have a version's rows in its persistent store, and in the volatile one if wanted."""
        settings = self.settings(int(directory.name))
        for name in ("persistent_store", "volatile_store") if volatile else ("persistent_store",):
            if name in settings:
                self.push(directory, settings[name])
