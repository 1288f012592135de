"""Which store a URL opens (urls/store_url.py says what may be written)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from inference_session.urls.store_url import DEFAULT_TIMEOUT_MS, StoreUrl

if TYPE_CHECKING:
    from inference_session.parameter_server.base import EmbeddingStore
    from inference_session.parameter_server.namespace import Namespace, StoredTable


def create_store(
    url: str | StoreUrl,
    namespace: Namespace,
    embedding_dims: Mapping[str, int],
    *,
    writable: bool | Literal["later"] = False,
    timeout_ms: int = DEFAULT_TIMEOUT_MS,
) -> EmbeddingStore:
    """The store that a URL names, bound to one model's tables. Redis is contacted when first needed.

    Args:
        url: see urls/store_url.py.
        namespace: whose tables; decides their tags.
        embedding_dims: the tables by folder, and the number of elements of their vectors.
        writable: whether `insert` and `erase` will be used. A RocksDB has one writer at a time, and any number of
            readers in addition; `later`: it is opened as a reader and becomes the writer at the first write.
        timeout_ms: longest time one call waits for Redis.

    Raises:
        ConfigurationError: the URL is malformed, or the package that the store needs is not installed.
        UnavailableError: the RocksDB is in use by another writer.
        StoreError: the RocksDB is not there, or cannot be written to. One that is damaged is an UnavailableError of
            each call to a reader.
    """
    url = StoreUrl.parse(url) if isinstance(url, str) else url
    if url.scheme == "rocksdb":
        from inference_session.parameter_server.rocksdb.store import RocksDbStore

        return RocksDbStore(Path(url.path), namespace, embedding_dims, writable=writable)
    from inference_session.parameter_server.redis.store import RedisStore

    return RedisStore(url, namespace, embedding_dims, timeout_ms=timeout_ms)


def list_tables(url: str | StoreUrl, *, timeout_ms: int = 30_000) -> list[StoredTable]:
    """All tables of all models that a store holds, sorted by tag. Counts the rows of a RocksDB one by one."""
    url = StoreUrl.parse(url) if isinstance(url, str) else url
    if url.scheme == "rocksdb":
        from inference_session.parameter_server.rocksdb.store import list_rocksdb_tables

        return list_rocksdb_tables(Path(url.path))
    from inference_session.parameter_server.redis.store import list_redis_tables

    return list_redis_tables(url, timeout_ms=timeout_ms)
