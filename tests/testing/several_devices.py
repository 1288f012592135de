"""Devices that stand in for GPUs where there are none: sessions over them take the path of several GPUs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from inference_session import session
from inference_session.config import SessionConfig
from inference_session.dense_engine.create import create_engine
from inference_session.device.base import Device
from inference_session.device.host import HOST, HostDevice
from inference_session.embedding_cache.cpu import CpuEmbeddingCache
from inference_session.errors import UnavailableError
from inference_session.execution import model
from inference_session.kernels.records import Lookup
from inference_session.model_spec import ModelSpec
from inference_session.rows import create
from inference_session.rows.files import changing_rows
from inference_session.tables.base import DeviceTables, UpdatedRows
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
    def request(self) -> Iterator[None]:
        with self._lock:
            if self.broken is not None:
                raise UnavailableError(self.broken)
            yield


class StandInCache(CpuEmbeddingCache):
    """Only the thread that holds its device reads or writes it, and missing rows come late, as on GPUs."""

    inserts_late = True

    def _write_checked(self, *arguments: Any, **settings: Any) -> None:
        with self.device.request():
            super()._write_checked(*arguments, **settings)

    def erase(self, *arguments: Any) -> None:
        with self.device.request():
            super().erase(*arguments)


class StandInTables(DeviceTables):
    """Rows of files, and a copy of those that were updated. As on GPUs, it outgrows its memory, and fills another."""

    def __init__(self, files: Sequence[TableFile], device: Device, *, rows_change: bool) -> None:
        self.device = device
        self._files, self._rows_change = files, rows_change
        self._rows = [changing_rows([file]) for file in files]
        self._room = 4

    def look_up(self, lookup: Lookup) -> None:
        for segment in range(len(lookup.segments)):
            part = slice(segment, segment + 1)
            segments = lookup.segments[part].copy()
            rows = self._rows[int(segments["table"][0])]
            segments["table"] = 0
            rows.readers[0].look_up(Lookup(segments, lookup.num_keys[part], lookup.num_unknown[part]))

    def put(self, table: int, updated: UpdatedRows, all_updated: Callable[[], UpdatedRows]) -> None:
        assert self._rows_change
        with self.device.request():
            rows = self._rows[table]
            if sum(each.rows for each in (rows.stats().updated or {}).values()) + len(updated.keys) > self._room:
                rows, updated = changing_rows([self._files[table]]), all_updated()
                self._room = 2 * len(updated.keys)
            folder, live = self._files[table].spec.folder, updated.where(~updated.deleted)
            rows.writer.update(folder, live.keys, live.vectors)
            rows.writer.erase(folder, updated.where(updated.deleted).keys)
            self._rows[table] = rows

    def close(self) -> None:
        """See DeviceTables."""


def stand_in(patch: pytest.MonkeyPatch, count: int = 2) -> list[StandIn]:
    """Let sessions open this many devices that stand in for GPUs; returns them."""
    devices = [StandIn(number) for number in range(count)]

    def cache_on(spec: ModelSpec, config: SessionConfig, device: Device) -> CpuEmbeddingCache:
        dims = {table.folder: table.embedding_dim for table in spec.tables}
        cache = StandInCache(dims, create.resolved_cache_bytes(spec, config))
        cache.device = device  # type: ignore[assignment]  # it stands in for the host
        return cache

    def tables_on(
        files: Sequence[TableFile], _: SessionConfig, devices: Sequence[Device], *, rows_change: bool = False
    ) -> list[StandInTables]:
        return [StandInTables(files, device, rows_change=rows_change) for device in devices]

    patch.setattr(session, "open_devices", lambda _: [*devices])
    patch.setattr(model, "create_engine", lambda path, config, *_: create_engine(path, config, HOST))
    patch.setattr(create, "create_cache", cache_on)
    patch.setattr(create, "open_device_tables", tables_on)
    return devices
