"""Which rows a session reads, by its settings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from inference_session.config import SessionConfig
from inference_session.embedding_cache import gpu_budget
from inference_session.embedding_cache.base import EmbeddingCache
from inference_session.embedding_cache.cpu import CpuEmbeddingCache, bytes_to_hold
from inference_session.embedding_cache.null import NullEmbeddingCache
from inference_session.model_spec import ModelSpec
from inference_session.parameter_server.create import create_parameter_server
from inference_session.parameter_server.server import ParameterServer
from inference_session.rows.base import RowSource
from inference_session.rows.cached import CachedRows, HostCache
from inference_session.rows.mapped import MappedRows
from inference_session.rows.updated import UpdatableRows
from inference_session.tables.table_file import open_tables

if TYPE_CHECKING:
    from inference_session.device.cuda import GpuContext
    from inference_session.embedding_cache.gpu_session import SessionGpuCache


def create_row_source(
    spec: ModelSpec, config: SessionConfig, directory: Path, gpu: GpuContext | None = None
) -> RowSource:
    """The rows of a version directory: its own files, or with a store in the settings that store's, through a cache.

    With a GPU, rows that do not change are looked up there, and those that a cache holds over stores.

    Raises what `open_tables`, `create_parameter_server` and `create_embedding_cache` do.
    """
    num_threads = config.num_lookup_threads
    if not config.has_store:
        files = open_tables(directory, spec, verify_indexes=config.verify == "full")
        if gpu is not None and config.has_fixed_rows:
            from inference_session.rows.gpu_mapped import GpuRows

            return GpuRows(files, gpu, num_threads=num_threads, cache_bytes=config.cache_bytes)
        source = MappedRows if config.update_stream is None else UpdatableRows
        return source(files, num_threads=num_threads)
    may_default = config.insert_mode == "async" and config.unknown_keys == "default_vector"
    refresh_interval_s, async_from = config.refresh_interval_s, config.hit_rate_threshold if may_default else None
    if gpu is not None and spec.tables and resolved_cache_bytes(spec, config):
        from inference_session.rows.gpu_cached import GpuCachedRows

        on_device = _create_gpu_cache(spec, config, gpu)
        server = _create_server(spec, config, directory, on_device)
        return GpuCachedRows(
            spec.tables, on_device, server, gpu, refresh_interval_s=refresh_interval_s, async_from=async_from
        )
    cache = _create_cache(spec, config)
    server = _create_server(spec, config, directory, cache)
    return CachedRows(
        spec.tables,
        cache,
        server,
        num_threads=num_threads,
        refresh_interval_s=refresh_interval_s,
        async_from=async_from,
    )


def resolved_cache_bytes(spec: ModelSpec, config: SessionConfig, *, on_device: bool = False) -> int:
    """The bytes of the cache over stores that these settings ask for, in a process or on a GPU; 0: none."""
    if config.cache_bytes is not None:
        return config.cache_bytes
    if not config.cache_fraction:
        return 0
    dims = {table.folder: table.embedding_dim for table in spec.tables}
    parts = {table.folder: math.ceil(table.num_rows * config.cache_fraction) for table in spec.tables}
    return gpu_budget.bytes_to_hold(dims, parts) if on_device else bytes_to_hold(dims, parts)


def _create_cache(spec: ModelSpec, config: SessionConfig) -> HostCache:
    dims = {table.folder: table.embedding_dim for table in spec.tables}
    num_rows = {table.folder: table.num_rows for table in spec.tables}
    cache_bytes = resolved_cache_bytes(spec, config)
    if cache_bytes == 0 or not dims:
        return NullEmbeddingCache(dims)
    return CpuEmbeddingCache(dims, cache_bytes, num_rows=num_rows, num_threads=config.num_lookup_threads)


def _create_gpu_cache(spec: ModelSpec, config: SessionConfig, gpu: GpuContext) -> SessionGpuCache:
    from inference_session.embedding_cache.gpu_session import SessionGpuCache

    dims = {table.folder: table.embedding_dim for table in spec.tables}
    num_rows = {table.folder: table.num_rows for table in spec.tables}
    return SessionGpuCache(dims, resolved_cache_bytes(spec, config, on_device=True), gpu, num_rows=num_rows)


def _create_server(spec: ModelSpec, config: SessionConfig, directory: Path, cache: EmbeddingCache) -> ParameterServer:
    """The server under a cache, which is closed where there can be none."""
    try:
        return create_parameter_server(spec, config, directory)
    except BaseException:
        cache.close()
        raise
