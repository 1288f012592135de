"""The content of ps.json as frozen objects with our names: every field of both generations, with its default.

The hugectr backend (3.4) and HPS (24.06) disagree about some defaults. A file that holds a field only 24.06 knows,
or a model without `network_file`, is taken as 24.06; any other as 3.4. `PsJson.generation` says which.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from inference_session.errors import ConfigurationError
from inference_session.importers.hugectr import values

Generation = Literal["3.4", "24.06"]
KeyType = Literal["int64", "uint32"]

_VOLATILE_KINDS = {
    **dict.fromkeys(("disabled", "disable", "none"), "disabled"),
    **dict.fromkeys(("hash_map", "hashmap", "hash", "map"), "hash_map"),
    **dict.fromkeys(("parallel_hash_map", "parallel_hashmap", "parallel_hash", "parallel_map"), "hash_map"),
    **dict.fromkeys(("multi_process_hash_map", "multi_process_hashmap"), "hash_map"),
    **dict.fromkeys(("redis_cluster", "redis"), "redis"),
}
_PERSISTENT_KINDS = {
    **dict.fromkeys(("disabled", "disable", "none"), "disabled"),
    **dict.fromkeys(("rocks_db", "rocksdb", "rocks"), "rocksdb"),
}
_UPDATE_KINDS = {
    **dict.fromkeys(("null", "none"), "disabled"),
    **dict.fromkeys(("kafka_message_queue", "kafka_mq", "kafka"), "kafka"),
}
_EVICTION_POLICIES = {
    **dict.fromkeys(("evict_oldest", "oldest"), "oldest"),
    **dict.fromkeys(("evict_random", "random"), "random"),
    **dict.fromkeys(("evict_least_used", "least_used"), "least_used"),
}
_CACHE_KINDS = {"dynamic": "dynamic", "static": "static", "uvm": "uvm", "stochastic": "stochastic"}

_OF_UPDATES = frozenset({"update_stream", "update_filter"})
TAKEN_OVER = _OF_UPDATES | {"cache_fraction", "cache_missed_keys", "hit_rate_threshold", "refresh_interval_s"}
"""Settings of a session that `PsJson.session_settings` fills from ps.json, where it can."""


def acting_settings() -> frozenset[str]:
    """The settings that have an effect in this environment: updates need the package `confluent-kafka`."""
    has_kafka = importlib.util.find_spec("confluent_kafka") is not None
    return TAKEN_OVER if has_kafka else TAKEN_OVER - _OF_UPDATES


def _setting(
    names: str, read: values.Reader[Any], default: Any, *, default_24_06: Any = None, acts_on: str = "import"
) -> Any:
    """A field of ps.json: its names (the first is the usual one), its reader, its default.

    A `+` before a name: only 24.06 knows it. `default_24_06`: that generation's default where it differs.
    `acts_on`: "import" if the importer reads it, the name of a session's setting that takes it over, or "nothing".
    """
    metadata = {
        "names": [name.removeprefix("+") for name in names.split()],
        "newer_names": {name[1:] for name in names.split() if name.startswith("+")},
        "read": read,
        "defaults": {"3.4": default, "24.06": default if default_24_06 is None else default_24_06},
        "acts_on": acts_on,
    }
    return field(default=default, metadata=metadata)


_volatile = partial(_setting, acts_on="volatile_store")
_persistent = partial(_setting, acts_on="persistent_store")
_update = partial(_setting, acts_on="update_stream")
_filter = partial(_setting, "update_filters", values.list_of(values.text), (".+",), default_24_06=("^hps_.+$",))


@dataclass(frozen=True)
class VolatileStore:
    """`volatile_db`: the tier that may forget."""

    kind: str = _volatile("type", values.choice(_VOLATILE_KINDS), "hash_map", default_24_06="disabled")
    """`disabled`, `hash_map` (any of the in-memory kinds) or `redis`."""
    address: str = _volatile("address", values.text, "127.0.0.1:7000")
    """`host:port`, several with commas."""
    user_name: str = _volatile("user_name", values.text, "default")
    password: str = _volatile("password", values.text, "")
    num_partitions: int = _volatile("num_partitions", values.whole(1), 16)
    max_fetch_keys: int = _volatile("max_get_batch_size +max_batch_size", values.whole(1), 10_000, default_24_06=65_536)
    """Keys per read request to the store."""
    max_insert_keys: int = _volatile(
        "max_set_batch_size +max_batch_size", values.whole(1), 10_000, default_24_06=65_536
    )
    """Keys per write request to the store."""
    num_connections: int = _volatile("+num_node_connections", values.whole(1), 5)
    tls: bool = _volatile("+enable_tls", values.flag, False)
    tls_ca_file: str = _volatile("+tls_ca_certificate", values.text, "cacertbundle.crt")
    tls_certificate_file: str = _volatile("+tls_client_certificate", values.text, "client_cert.pem")
    tls_key_file: str = _volatile("+tls_client_key", values.text, "client_key.pem")
    tls_server_name: str = _volatile("+tls_server_name_identification", values.text, "redis.localhost")
    refresh_time_after_fetch: bool = _volatile("refresh_time_after_fetch", values.flag, False)
    overflow_margin: int | None = _volatile("overflow_margin", values.whole(0, 2**64 - 1), None)
    """Rows per partition and table before rows are evicted; None: no limit."""
    eviction_policy: str = _volatile(
        "overflow_policy", values.choice(_EVICTION_POLICIES), "oldest", default_24_06="random"
    )
    overflow_resolution_target: float = _volatile("overflow_resolution_target", values.number(0, 1), 0.8)
    """Fraction of `overflow_margin` that is left after an eviction."""
    cache_missed_keys: bool = _setting("cache_missed_embeddings", values.flag, False, acts_on="cache_missed_keys")
    update_filters: tuple[str, ...] = _filter(acts_on="update_filter")
    """Regular expressions of the topics whose updates this tier takes."""
    algorithm: str = _setting("algorithm", values.text, "phm", acts_on="nothing")
    allocation_rate: int = _setting("+allocation_rate", values.whole(0), 256 << 20, acts_on="nothing")
    shared_memory_bytes: int = _setting("+shared_memory_size", values.whole(0), 16 << 30, acts_on="nothing")
    shared_memory_name: str = _setting(
        "+shared_memory_name", values.text, "hctr_mp_hash_map_database", acts_on="nothing"
    )
    shared_memory_auto_remove: bool = _setting("+shared_memory_auto_remove", values.flag, True, acts_on="nothing")
    initial_cache_rate: float = _setting("initial_cache_rate", values.number(0, 1), 1.0, acts_on="nothing")
    initialize_after_startup: bool = _setting("+initialize_after_startup", values.flag, True, acts_on="nothing")


@dataclass(frozen=True)
class PersistentStore:
    """`persistent_db`: the tier that keeps everything."""

    kind: str = _persistent("type", values.choice(_PERSISTENT_KINDS), "disabled")
    """`disabled` or `rocksdb`."""
    path: str = _persistent("path", values.text, "")
    """Folder of the database; empty: none given."""
    num_threads: int = _persistent("num_threads", values.whole(1), 16)
    read_only: bool = _persistent("read_only", values.flag, False)
    max_fetch_keys: int = _persistent(
        "max_get_batch_size +max_batch_size", values.whole(1), 10_000, default_24_06=65_536
    )
    max_insert_keys: int = _persistent(
        "max_set_batch_size +max_batch_size", values.whole(1), 10_000, default_24_06=65_536
    )
    update_filters: tuple[str, ...] = _filter(acts_on="update_filter")
    """Regular expressions of the topics whose updates this tier takes."""
    initialize_after_startup: bool = _setting("+initialize_after_startup", values.flag, True, acts_on="nothing")


@dataclass(frozen=True)
class UpdateSource:
    """`update_source`: where changed rows are announced while serving."""

    kind: str = _update("type", values.choice(_UPDATE_KINDS), "disabled")
    """`disabled` or `kafka`."""
    brokers: str = _update("brokers", values.text, "127.0.0.1:9092")
    """`host:port`, several with semicolons."""
    metadata_refresh_ms: int = _setting("+metadata_refresh_interval_ms", values.whole(0), 30_000, acts_on="nothing")
    poll_timeout_ms: int = _setting("poll_timeout_ms", values.whole(0), 500, acts_on="nothing")
    receive_buffer: int = _setting(
        "max_receive_buffer_size +receive_buffer_size",
        values.whole(1),
        2000,
        default_24_06=262_144,
        acts_on="nothing",
    )
    """Messages in 3.4, bytes in 24.06."""
    max_insert_keys: int = _setting("max_batch_size", values.whole(1), 1000, default_24_06=8192, acts_on="nothing")
    failure_backoff_ms: int = _setting("failure_backoff_ms", values.whole(0), 50, acts_on="nothing")
    max_commit_interval: int = _setting("+max_commit_interval", values.whole(0), 32, acts_on="nothing")


@dataclass(frozen=True)
class PsModel:
    """One element of `models`. Files are absolute paths, or URLs where ps.json has URLs."""

    name: str = _setting("model", values.text, "")
    sparse_files: tuple[str, ...] = _setting("sparse_files", values.list_of(values.text), ())
    """One folder per table, in the order of the embedding layers."""
    graph_file: str = _setting("network_file", values.text, "")
    """The graph JSON; empty for a model of tables alone."""
    dense_file: str = _setting("dense_file", values.text, "")
    statistics_file: str = _setting("non_trainable_params_file", values.text, "")
    """Running means and variances of the BatchNorm layers; empty where there are none."""
    max_batch_size: int = _setting("max_batch_size", values.whole(1, 2**31 - 1), 64)
    use_cache: bool = _setting("gpucache use_gpu_embedding_cache", values.flag, True, acts_on="cache_fraction")
    cache_fraction: float = _setting(
        "gpucacheper cache_size_percentage", values.number(0, 1), 0.55, default_24_06=0.2, acts_on="cache_fraction"
    )
    """Rows of a table that the cache has room for, as a fraction of all."""
    hit_rate_threshold: float = _setting(
        "hit_rate_threshold", values.number(0), 0.55, default_24_06=0.9, acts_on="hit_rate_threshold"
    )
    refresh_fraction: float = _setting(
        "cache_refresh_percentage_per_iteration", values.number(0, 1), 0.1, default_24_06=0.0, acts_on="nothing"
    )
    device_ids: tuple[int, ...] = _setting(
        "deployed_device_list deployed_devices", values.list_of(values.whole(0)), (), acts_on="nothing"
    )
    default_values: tuple[float, ...] = _setting(
        "default_value_for_each_table", values.list_of(values.number(-values.FLOAT32_MAX, values.FLOAT32_MAX)), ()
    )
    """Every element of the vector of an unknown key, per table; 0.0 for tables beyond the list."""
    embedding_dims: tuple[int, ...] = _setting("+embedding_vecsize_per_table", values.list_of(values.whole(1)), ())
    table_names: tuple[str, ...] = _setting("+embedding_table_names", values.list_of(values.text), ())
    refresh_delay_s: float = _setting("+refresh_delay", values.number(0), 0.0, acts_on="nothing")
    refresh_interval_s: float = _setting("+refresh_interval", values.number(0), 0.0, acts_on="refresh_interval_s")
    cache_kind: str = _setting("+embedding_cache_type", values.choice(_CACHE_KINDS), "dynamic", acts_on="nothing")
    static_table: bool = _setting("+use_static_table", values.flag, False, acts_on="nothing")
    num_worker_buffers: int = _setting("num_of_worker_buffer_in_pool", values.whole(0), 1, acts_on="nothing")
    num_refresher_buffers: int = _setting("num_of_refresher_buffer_in_pool", values.whole(0), 1, acts_on="nothing")
    max_keys_per_table: tuple[int, ...] = _setting(
        "+maxnum_catfeature_query_per_table_per_sample",
        values.list_of(values.whole(0)),
        (),
        acts_on="nothing",
    )
    max_dense_features: int = _setting(
        "+maxnum_des_feature_per_sample",
        values.whole(0),
        26,
        acts_on="nothing",
    )
    label_dim: int = _setting("label_dim", values.whole(1), 1, acts_on="nothing")
    num_slots: int = _setting("slot_num", values.whole(0), 10, acts_on="nothing")
    enable_pagelock: bool = _setting("+enable_pagelock", values.flag, False, acts_on="nothing")
    fp8_quant: bool = _setting("+fp8_quant", values.flag, False, acts_on="nothing")
    use_context_stream: bool = _setting("+use_context_stream", values.flag, True, acts_on="nothing")
    use_hctr_cache_implementation: bool = _setting(
        "+use_hctr_cache_implementation", values.flag, True, acts_on="nothing"
    )
    thread_pool_size: int = _setting("+thread_pool_size", values.whole(0), 16, acts_on="nothing")
    init_ec: bool = _setting("+init_ec", values.flag, True, acts_on="nothing")
    fuse_tables: bool = _setting("+fuse_embedding_table", values.flag, True, acts_on="nothing")

    def default_value(self, table: int) -> float:
        """The default of one table, 0.0 beyond the list."""
        return self.default_values[table] if table < len(self.default_values) else 0.0


@dataclass(frozen=True)
class PsJson:
    """The whole file."""

    path: Path
    generation: Generation
    key_type: KeyType
    """`supportlonglong`: int64, otherwise uint32."""
    volatile: VolatileStore
    persistent: PersistentStore
    updates: UpdateSource
    models: tuple[PsModel, ...]
    ignored: tuple[str, ...]
    """Fields of the file that have nothing to act on here, e.g. `'models[0].num_of_worker_buffer_in_pool'`."""
    unknown: tuple[str, ...]
    """Fields of the file that neither generation knows."""

    def model(self, name: str) -> PsModel:
        """The model of that name; ConfigurationError otherwise."""
        for model in self.models:
            if model.name == name:
                return model
        known = ", ".join(repr(model.name) for model in self.models)
        raise ConfigurationError(f"{self.path}: has no model {name!r}; its models: {known}")

    def session_settings(self, model: PsModel) -> dict[str, str]:
        """ps.json in the words of hotrow's own settings, those of `acting_settings`."""
        settings = {
            "cache_fraction": str(model.cache_fraction if model.use_cache else 0.0),
            "cache_missed_keys": str(self.volatile.cache_missed_keys).lower(),
            # A value above 1, which HPS allows, means the same as 1: no look-up may miss a key.
            "hit_rate_threshold": str(min(model.hit_rate_threshold, 1.0)),
            "refresh_interval_s": str(model.refresh_interval_s),
        }
        if self.updates.kind == "kafka":
            settings["update_stream"] = f"kafka://{','.join(re.split('[;,]', self.updates.brokers))}"
            settings["update_filter"] = "|".join(f"(?:{pattern})" for pattern in self._update_filters())
        return {name: value for name, value in settings.items() if name in acting_settings()}

    def _update_filters(self) -> tuple[str, ...]:
        """The filters of all tiers that are switched on: topics that match one of them are followed."""
        tiers: tuple[VolatileStore | PersistentStore, ...] = (self.volatile, self.persistent)
        found = [pattern for tier in tiers if tier.kind != "disabled" for pattern in tier.update_filters]
        return tuple(dict.fromkeys(found or self.volatile.update_filters))
