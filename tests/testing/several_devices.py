"""Devices that stand in for GPUs where there are none: sessions over them take the path of several GPUs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from inference_session import session
from inference_session.config import SessionConfig
from inference_session.dense_engine import create_engine
from inference_session.device.base import Device
from inference_session.device.host import HOST, HostDevice
from inference_session.embedding_cache.cpu import CpuEmbeddingCache
from inference_session.errors import UnavailableError
from inference_session.execution import model
from inference_session.model_spec import ModelSpec
from inference_session.rows import create
from inference_session.tables.host_tables import HostTables
from inference_session.tables.table_file import TableFile


class StandIn(HostDevice):
    """A part of the processor that has one request at a time, and that can fail."""

    def __init__(self, number: int) -> None:
        self.name = f"cuda:{number}"
        self.broken: str | None = None
        self._lock = threading.RLock()

    @property
    def failure(self) -> str | None:
        """See Device: `broken`."""
        return self.broken

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:  # type: ignore[override]
        """See Device."""
        with self._lock:
            if self.broken is not None:
                raise UnavailableError(self.broken)
            yield


class StandInCache(CpuEmbeddingCache):
    """Only the thread that holds its device reads or writes it, and missing rows come late, as on GPUs."""

    inserts_at_once = 64

    def insert(self, *arguments: Any) -> None:
        """See EmbeddingCache."""
        with self.device.request():
            super().insert(*arguments)

    def update(self, *arguments: Any) -> None:
        """See EmbeddingCache."""
        with self.device.request():
            super().update(*arguments)

    def erase(self, *arguments: Any) -> None:
        """See EmbeddingCache."""
        with self.device.request():
            super().erase(*arguments)


def stand_in(patch: pytest.MonkeyPatch, count: int = 2) -> list[StandIn]:
    """Let sessions open this many devices that stand in for GPUs; returns them."""
    devices = [StandIn(number) for number in range(count)]

    def cache_on(spec: ModelSpec, config: SessionConfig, device: Device) -> CpuEmbeddingCache:
        dims = {table.folder: table.embedding_dim for table in spec.tables}
        cache = StandInCache(dims, create.resolved_cache_bytes(spec, config))
        cache.device = device
        return cache

    def tables_on(files: Sequence[TableFile], config: SessionConfig, devices: Sequence[Device]) -> list[HostTables]:
        opened = [HostTables(files, num_threads=config.num_lookup_threads) for _ in devices]
        for tables, device in zip(opened, devices, strict=True):
            tables.device = device
        return opened

    patch.setattr(session, "open_devices", lambda _: [*devices])
    patch.setattr(model, "create_engine", lambda path, config, _: create_engine(path, config, HOST))
    patch.setattr(create, "create_cache", cache_on)
    patch.setattr(create, "open_device_tables", tables_on)
    return devices
