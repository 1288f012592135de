"""The content of ps.json as frozen objects with our names: what acts on something here, with its defaults.

The hugectr backend (3.4) and HPS (24.06) disagree about some defaults. A file that holds a field only 24.06 knows,
or a model without `network_file`, is taken as 24.06; any other as 3.4. `PsJson.generation` says which.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

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

_NEWER = {
    "volatile_db": """allocation_rate enable_tls initialize_after_startup max_batch_size num_node_connections
        shared_memory_auto_remove shared_memory_name shared_memory_size tls_ca_certificate tls_client_certificate
        tls_client_key tls_server_name_identification""",
    "persistent_db": "initialize_after_startup max_batch_size",
    "update_source": "max_commit_interval metadata_refresh_interval_ms receive_buffer_size",
    "models": """embedding_cache_type embedding_table_names embedding_vecsize_per_table enable_pagelock fp8_quant
        fuse_embedding_table init_ec maxnum_catfeature_query_per_table_per_sample maxnum_des_feature_per_sample
        refresh_delay refresh_interval thread_pool_size use_context_stream use_hctr_cache_implementation
        use_static_table""",
}
NEWER_NAMES = {block: frozenset(names.split()) for block, names in _NEWER.items()}
"""By block, the fields that only 24.06 knows."""
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

    `default_24_06`: that generation's default where it differs. `acts_on`: "import" if the importer reads it, the name
    of the session's setting that takes it over, or "nothing".
    """
    defaults = {"3.4": default, "24.06": default if default_24_06 is None else default_24_06}
    metadata = {"names": names.split(), "read": read, "defaults": defaults, "acts_on": acts_on}
    return field(default=default, metadata=metadata)


_filter = partial(_setting, "update_filters", values.list_of(values.text), (".+",), default_24_06=("^hps_.+$",))
Readers: TypeAlias = Mapping[str, values.Reader[Any]]


def _readers(*groups: tuple[values.Reader[Any], str]) -> Readers:
    """The fields that have nothing to act on here: they are checked, and named in the log."""
    return {name: read for read, names in groups for name in names.split()}


@dataclass(frozen=True)
class VolatileStore:
    """`volatile_db`: the tier that may forget. Where rows are stored is a setting of hotrow's own."""

    ignored: ClassVar[Readers] = _readers(
        (values.text, "address user_name password tls_ca_certificate tls_client_certificate tls_client_key"),
        (values.text, "tls_server_name_identification algorithm shared_memory_name"),
        (values.whole(1), "num_partitions max_get_batch_size max_set_batch_size max_batch_size num_node_connections"),
        (values.flag, "enable_tls refresh_time_after_fetch shared_memory_auto_remove initialize_after_startup"),
        (values.whole(0, 2**64 - 1), "overflow_margin"),
        (values.choice(_EVICTION_POLICIES), "overflow_policy"),
        (values.number(0, 1), "overflow_resolution_target initial_cache_rate"),
        (values.whole(0), "allocation_rate shared_memory_size"),
    )
    kind: str = _setting(
        "type", values.choice(_VOLATILE_KINDS), "hash_map", default_24_06="disabled", acts_on="nothing"
    )
    """`disabled`, `hash_map` (any of the in-memory kinds) or `redis`."""
    cache_missed_keys: bool = _setting("cache_missed_embeddings", values.flag, False, acts_on="cache_missed_keys")
    update_filters: tuple[str, ...] = _filter(acts_on="update_filter")
    """Regular expressions of the topics whose updates this tier takes."""


@dataclass(frozen=True)
class PersistentStore:
    """`persistent_db`: the tier that keeps everything."""

    ignored: ClassVar[Readers] = _readers(
        (values.text, "path"),
        (values.whole(1), "num_threads max_get_batch_size max_set_batch_size max_batch_size"),
        (values.flag, "read_only initialize_after_startup"),
    )
    kind: str = _setting("type", values.choice(_PERSISTENT_KINDS), "disabled", acts_on="nothing")
    """`disabled` or `rocksdb`."""
    update_filters: tuple[str, ...] = _filter(acts_on="update_filter")
    """Regular expressions of the topics whose updates this tier takes."""


@dataclass(frozen=True)
class UpdateSource:
    """`update_source`: where changed rows are announced while serving."""

    ignored: ClassVar[Readers] = _readers(
        (values.whole(0), "metadata_refresh_interval_ms poll_timeout_ms failure_backoff_ms max_commit_interval"),
        (values.whole(1), "max_receive_buffer_size receive_buffer_size max_batch_size"),
    )
    kind: str = _setting("type", values.choice(_UPDATE_KINDS), "disabled", acts_on="update_stream")
    """`disabled` or `kafka`."""
    brokers: str = _setting("brokers", values.text, "127.0.0.1:9092", acts_on="update_stream")
    """`host:port`, several with semicolons."""


@dataclass(frozen=True)
class PsModel:
    """One element of `models`. Files are absolute paths, or URLs where ps.json has URLs."""

    ignored: ClassVar[Readers] = _readers(
        (values.number(0, 1), "cache_refresh_percentage_per_iteration"),
        (values.list_of(values.whole(0)), "deployed_device_list deployed_devices"),
        (values.list_of(values.whole(0)), "maxnum_catfeature_query_per_table_per_sample"),
        (values.number(0), "refresh_delay"),
        (values.choice(_CACHE_KINDS), "embedding_cache_type"),
        (values.flag, "use_static_table enable_pagelock fp8_quant use_context_stream use_hctr_cache_implementation"),
        (values.flag, "init_ec fuse_embedding_table"),
        (values.whole(0), "num_of_worker_buffer_in_pool num_of_refresher_buffer_in_pool slot_num thread_pool_size"),
        (values.whole(0), "maxnum_des_feature_per_sample"),
        (values.whole(1), "label_dim"),
    )
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
    default_values: tuple[float, ...] = _setting(
        "default_value_for_each_table", values.list_of(values.number(-values.FLOAT32_MAX, values.FLOAT32_MAX)), ()
    )
    """Every element of the vector of an unknown key, per table; 0.0 for tables beyond the list."""
    embedding_dims: tuple[int, ...] = _setting("embedding_vecsize_per_table", values.list_of(values.whole(1)), ())
    table_names: tuple[str, ...] = _setting("embedding_table_names", values.list_of(values.text), ())
    refresh_interval_s: float = _setting("refresh_interval", values.number(0), 0.0, acts_on="refresh_interval_s")

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

    def concerning(self, fields: Iterable[str], model: str) -> list[str]:
        """Those of `ignored` or `unknown` that are not other models'."""
        own = f"'models[{[one.name for one in self.models].index(model)}]."
        return [name for name in fields if name.startswith(own) or not name.startswith("'models[")]

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
