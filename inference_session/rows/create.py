"""Which rows a session reads, by its settings."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from inference_session.config import SessionConfig
from inference_session.device.base import Device
from inference_session.device.host import HOST
from inference_session.embedding_cache import cpu_budget, gpu_budget
from inference_session.embedding_cache.base import EmbeddingCache
from inference_session.embedding_cache.cpu import CpuEmbeddingCache
from inference_session.embedding_cache.null import NullEmbeddingCache
from inference_session.model_spec import ModelSpec
from inference_session.parameter_server.create import create_parameter_server
from inference_session.rows.base import Rows
from inference_session.rows.files import FileRows, changing_rows
from inference_session.rows.stored import StoredRows
from inference_session.rows.updated import UpdatedRowWriter
from inference_session.tables.base import DeviceTables
from inference_session.tables.host_tables import HostTables
from inference_session.tables.table_file import TableFile
from inference_session.version_directory.version import VersionDirectory

if TYPE_CHECKING:
    from inference_session.device.cuda import CudaDevice


def create_rows(version: VersionDirectory, config: SessionConfig, devices: Sequence[Device] = (HOST,)) -> Rows:
    """The rows of a version directory: its own files, or with a store in the settings that store's, through a cache.

    Over a store, each device has its own cache. Of rows that an update stream changes and no store keeps, each device
    has a copy of those that were updated.

    Raises what `TableFile.open`, `create_parameter_server` and the caches do.
    """
    if config.has_store:
        return _stored_rows(version, config, devices)
    files = version.open_tables(verify_indexes=config.verify == "full")
    if config.update_stream is not None:
        return _updated_rows(files, config, devices)
    return FileRows(files, open_device_tables(files, config, devices))


def resolved_cache_bytes(spec: ModelSpec, config: SessionConfig, *, on_device: bool = False) -> int:
    """The bytes of the cache over stores that these settings ask for, in a process or on a GPU; 0: none."""
    if config.cache_bytes is not None:
        return config.cache_bytes
    if not config.cache_fraction:
        return 0
    dims = {table.folder: table.embedding_dim for table in spec.tables}
    parts = {table.folder: math.ceil(table.num_rows * config.cache_fraction) for table in spec.tables}
    bytes_to_hold = gpu_budget.bytes_to_hold if on_device else cpu_budget.bytes_to_hold
    return bytes_to_hold(dims, parts)


def _stored_rows(version: VersionDirectory, config: SessionConfig, devices: Sequence[Device]) -> Rows:
    """The rows of one parameter server, with a cache on each device."""
    may_default = config.insert_mode == "async" and config.unknown_keys == "default_vector"
    async_from = config.hit_rate_threshold if may_default else None
    with contextlib.ExitStack() as opened:
        caches = [opened.enter_context(create_cache(version.spec, config, device)) for device in devices]
        server = create_parameter_server(version, config)
        opened.callback(server.close)
        rows = StoredRows(
            version.spec.tables, caches, server, refresh_interval_s=config.refresh_interval_s, async_from=async_from
        )
        opened.pop_all()
    return rows


def _updated_rows(files: Sequence[TableFile], config: SessionConfig, devices: Sequence[Device]) -> Rows:
    """The rows of files, and one set of changes to them."""
    if devices[0] is HOST:
        return changing_rows(files, num_threads=config.num_lookup_threads)
    tables = open_device_tables(files, config, devices, rows_change=True)
    return FileRows(files, tables, UpdatedRowWriter(files, tables))


def open_device_tables(
    files: Sequence[TableFile], config: SessionConfig, devices: Sequence[Device], *, rows_change: bool = False
) -> Sequence[DeviceTables]:
    if devices[0] is HOST:
        return [HostTables(files, num_threads=config.num_lookup_threads)]
    from inference_session.device.peers import check_equal, check_visible
    from inference_session.tables.cuda.placed_tables import open_cuda_tables

    check_visible(config.shard_device_ids, "shard_devices")
    check_equal(config.shard_device_ids, "shard_devices")
    gpus = cast("Sequence[CudaDevice]", devices)
    return open_cuda_tables(
        files,
        gpus,
        cache_bytes=config.cache_bytes,
        shard=config.shard,
        shard_devices=config.shard_device_ids,
        rows_change=rows_change,
    )


def create_cache(spec: ModelSpec, config: SessionConfig, device: Device) -> EmbeddingCache:
    dims = {table.folder: table.embedding_dim for table in spec.tables}
    num_rows = {table.folder: table.num_rows for table in spec.tables}
    cache_bytes = resolved_cache_bytes(spec, config, on_device=device is not HOST)
    if cache_bytes == 0 or not dims:
        return NullEmbeddingCache(dims, num_threads=config.num_lookup_threads)
    if device is HOST:
        return CpuEmbeddingCache(dims, cache_bytes, num_rows=num_rows, num_threads=config.num_lookup_threads)
    from inference_session.embedding_cache.gpu import GpuEmbeddingCache

    row_numbers = {table.folder: table.num_rows for table in spec.tables if table.keys == "row_number"}
    return GpuEmbeddingCache(dims, cache_bytes, cast("CudaDevice", device), num_rows=num_rows, row_numbers=row_numbers)
