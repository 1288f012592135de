"""The parameter server of a version as its settings describe it, and the store that a URL names."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from inference_session.config import SessionConfig
from inference_session.errors import UnavailableError, fresh, without_frames
from inference_session.model_spec import TABLES_FOLDER
from inference_session.parameter_server.base import ERASED_SUFFIX, EmbeddingStore
from inference_session.parameter_server.file_store import TableFileStore
from inference_session.parameter_server.known_incarnation import NOTE_TABLE, KnownIncarnation
from inference_session.parameter_server.namespace import Namespace, StoredTable
from inference_session.parameter_server.retirement import Retirement
from inference_session.parameter_server.server import ParameterServer
from inference_session.parameter_server.table_source import TableSources
from inference_session.parameter_server.tier import Tier
from inference_session.platform.file_names import as_file_name
from inference_session.urls.store_url import DEFAULT_TIMEOUT_MS, StoreUrl
from inference_session.version_directory.version import VersionDirectory

_LIST_TIMEOUT_MS = 30_000
"""The longest time one call waits for Redis while its tables are listed."""

_log = logging.getLogger(__name__)


def create_parameter_server(version: VersionDirectory, config: SessionConfig) -> ParameterServer:
    """The stores that the settings name, and below them the version's own table files where it has them.

    Rows in a store come before those in the files: they may have been updated since. A store that is down is no
    error as long as another one answers.

    Raises:
        ConfigurationError: a URL's package is not installed, or a store was filled from other files than the version's.
        StoreError: a store refuses us for good, as with a wrong password, or is not there.
        UnavailableError: no store can be reached.
    """
    with contextlib.ExitStack() as opened:
        tiers = _store_tiers(version, config, opened)
        _check(tiers)
        if version.tables_folder.exists():
            tiers.append(Tier("files", _file_store(version, tiers[-1], config)))
        opened.pop_all()
    return ParameterServer(
        tiers,
        on_store_failure="error" if config.unknown_keys == "reject" else config.on_store_failure,
        retirement=_retirement(tiers, config, version),
        known=KnownIncarnation(next((tier.store for tier in tiers if tier.durable), None)),
    )


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

        return RocksDbStore(Path(as_file_name(url.path)), namespace, embedding_dims, writable=writable)
    from inference_session.parameter_server.redis.store import RedisStore

    return RedisStore(url, namespace, embedding_dims, timeout_ms=timeout_ms)


def list_tables(url: str | StoreUrl) -> list[StoredTable]:
    """All tables of all models that a store holds, sorted by tag. Counts the rows of a RocksDB one by one."""
    url = StoreUrl.parse(url) if isinstance(url, str) else url
    if url.scheme == "rocksdb":
        from inference_session.parameter_server.rocksdb.store import list_rocksdb_tables

        return list_rocksdb_tables(Path(as_file_name(url.path)))
    from inference_session.parameter_server.redis.store import list_redis_tables

    return list_redis_tables(url, timeout_ms=_LIST_TIMEOUT_MS)


def _store_tiers(version: VersionDirectory, config: SessionConfig, opened: contextlib.ExitStack) -> list[Tier]:
    """The stores that the settings name, from the top; `opened` closes them."""
    namespace = Namespace(version.model, None if config.store_namespace == "shared" else version.version)
    has_files = version.tables_folder.exists()
    sources = TableSources(version) if has_files and namespace.version is not None else None
    dims = {table.folder: table.embedding_dim for table in version.spec.tables}
    if has_files:
        dims |= {table.folder + ERASED_SUFFIX: 1 for table in version.spec.tables}

    def open_store(url: StoreUrl, held: Mapping[str, int]) -> EmbeddingStore:
        store = create_store(url, namespace, held, writable="later", timeout_ms=config.store_timeout_ms)
        opened.callback(store.close)
        return store

    tiers: list[Tier] = []
    if config.volatile_store is not None:
        caches, touches = config.cache_missed_keys, config.touch_rows
        store = open_store(config.volatile_store, dims)
        tiers.append(Tier("volatile", store, sources=sources, volatile=True, cache_missed_keys=caches, touches=touches))
    if config.persistent_store is not None:
        store = open_store(config.persistent_store, dims | {NOTE_TABLE: 1})
        tiers.append(Tier("persistent", store, sources=sources, durable=True))
    return tiers


def _file_store(version: VersionDirectory, above: Tier, config: SessionConfig) -> TableFileStore:
    """The table files, and the tier above that knows which of their rows were erased.

    Of those who follow a stream and share that tier, another one may be the first to erase a row that this process has
    answered. Its row of before, in the files, must not come back until this process has followed.
    """
    follows_stream = config.update_stream is not None

    def asks_for_erased() -> bool:
        is_out = above.health.failure is not None  # each look-up would wait for it
        return follows_stream and above.store.is_shared and not is_out

    return TableFileStore(version, above.store, verify_indexes=config.verify == "full", asks_for_erased=asks_for_erased)


def _retirement(tiers: Sequence[Tier], config: SessionConfig, version: VersionDirectory) -> Retirement | None:
    """The removal of older versions from the volatile store, where the version is one of several and has a tier below.

    A version that is still in the repository stays unless its rows are somewhere else as well.
    """
    if not (config.keep_versions and version.version.isdecimal() and config.store_namespace == "version"):
        return None
    if len(tiers) < 2 or not tiers[0].volatile:
        return None

    def is_safe(other: str) -> bool:
        folder = version.sibling(other)
        below = (tier.store.versions() for tier in tiers[1:])
        return not folder.exists() or (folder / TABLES_FOLDER).exists() or any(other in held for held in below)

    return Retirement(tiers[0].store, version.version, config.keep_versions, is_safe)


def _check(tiers: list[Tier]) -> None:
    """Leave out tiers whose store does not answer, unless that is all of them; refuse rows of other files."""
    failures = [(tier, error) for tier in tiers if (error := _failure(tier))]
    if failures and len(failures) == len(tiers):
        raise fresh(failures[0][1])
    for tier, error in failures:
        _log.warning(
            "the version was opened without its %s store, because the store does not answer: %s", tier.name, error
        )
        tier.health.begin_outage(str(error))


def _failure(tier: Tier) -> UnavailableError | None:
    """Why the tier's store does not answer at present; None if it does."""
    try:
        tier.store.check()
        tier.refuse_other_rows()
    except UnavailableError as error:
        return without_frames(error)
    return None
