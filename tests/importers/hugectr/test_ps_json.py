"""ps.json of both generations, in every spelling; what is wrong is named with its line."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_session.errors import ConfigurationError
from inference_session.importers.hugectr.ps_fields import (
    NEWER_NAMES,
    TAKEN_OVER,
    PersistentStore,
    PsJson,
    PsModel,
    UpdateSource,
    VolatileStore,
    acting_settings,
)
from inference_session.importers.hugectr.ps_json import read_ps_json
from tests.testing.json_places import setting

Document = dict[str, Any]

WDL: Document = {
    "supportlonglong": True,
    "models": [
        {
            "model": "wdl",
            "sparse_files": ["wdl/0_sparse_2000.model", "/models/1_sparse_2000.model"],
            "dense_file": "wdl/_dense_2000.model",
            "network_file": "wdl/wdl.json",
            "num_of_worker_buffer_in_pool": "4",
            "num_of_refresher_buffer_in_pool": "1",
            "deployed_device_list": ["0"],
            "max_batch_size": "64",
            "default_value_for_each_table": ["0.5", "0.0"],
            "hit_rate_threshold": "0.9",
            "gpucacheper": "0.5",
            "gpucache": "true",
            "cache_refresh_percentage_per_iteration": 0.2,
        }
    ],
}

HPS: Document = {
    "supportlonglong": True,
    "volatile_db": {"type": "redis_cluster", "address": "10.0.0.1:7000,10.0.0.2:7000", "enable_tls": "true"},
    "persistent_db": {"type": "rocks_db", "path": "/data/rocks", "read_only": "true", "num_threads": 8},
    "update_source": {"type": "kafka_message_queue", "brokers": "k1:9092;k2:9092", "receive_buffer_size": 4096},
    "models": [
        {
            "model": "hps_wdl",
            "sparse_files": ["a.model", "b.model"],
            "embedding_table_names": ["wide", "deep"],
            "embedding_vecsize_per_table": [1, 16],
            "maxnum_catfeature_query_per_table_per_sample": [2, 26],
            "default_value_for_each_table": [0.0],
            "deployed_device_list": [0],
            "max_batch_size": 1024,
        }
    ],
}


def read(document: Document | str, folder: Path) -> PsJson:
    path = folder / "ps.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document, indent=1), encoding="utf-8")
    return read_ps_json(path)


def changed(document: Document, *field: str | int, value: Any) -> Document:
    copy: Document = json.loads(json.dumps(document))
    setting(*field, value=value)(copy)
    return copy


def test_a_file_of_3_4_with_everything_as_strings_is_read(tmp_path: Path) -> None:
    """As HugeCTR's own samples write it; relative files count from the folder of ps.json."""
    parsed = read(WDL, tmp_path)
    model = parsed.model("wdl")

    assert (parsed.generation, parsed.key_type) == ("3.4", "int64")
    assert model.sparse_files == (f"{tmp_path}/wdl/0_sparse_2000.model", "/models/1_sparse_2000.model")
    assert (model.graph_file, model.dense_file) == (f"{tmp_path}/wdl/wdl.json", f"{tmp_path}/wdl/_dense_2000.model")
    assert (model.max_batch_size, model.use_cache, model.cache_fraction) == (64, True, 0.5)
    assert model.hit_rate_threshold == 0.9
    assert [model.default_value(table) for table in range(3)] == [0.5, 0.0, 0.0]
    assert parsed.volatile.kind == "hash_map"
    assert parsed.persistent.kind == parsed.updates.kind == "disabled"


def test_a_file_of_24_06_is_read(tmp_path: Path) -> None:
    """Tables by name and width, stores, TLS, and the newer names of fields."""
    parsed = read(HPS, tmp_path)
    model = parsed.models[0]

    assert parsed.generation == "24.06"
    assert (model.table_names, model.embedding_dims) == (("wide", "deep"), (1, 16))
    assert (parsed.volatile.kind, parsed.persistent.kind) == ("redis", "rocksdb")
    assert (parsed.updates.kind, parsed.updates.brokers) == ("kafka", "k1:9092;k2:9092")
    assert parsed.unknown == ()
    for name in ("address", "enable_tls"):
        assert f"'volatile_db.{name}'" in parsed.ignored


def test_defaults_are_those_of_the_generation(tmp_path: Path) -> None:
    """The two generations disagree; the file decides which one counts."""
    old = changed(WDL, "volatile_db", value={})
    for name in ("hit_rate_threshold", "gpucacheper"):
        del old["models"][0][name]
    older = read(old, tmp_path)
    newer = read(changed(HPS, "volatile_db", value={}), tmp_path)

    found = [(p.volatile.kind, p.volatile.update_filters) for p in (older, newer)]
    assert found == [("hash_map", (".+",)), ("disabled", ("^hps_.+$",))]
    models = [(m.cache_fraction, m.hit_rate_threshold) for m in (older.models[0], newer.models[0])]
    assert models == [(0.55, 0.55), (0.2, 0.9)]


def test_one_field_of_24_06_makes_the_file_24_06(tmp_path: Path) -> None:
    """In a model, in a store, or at the top."""
    assert read(changed(WDL, "models", 0, "init_ec", value=True), tmp_path).generation == "24.06"
    assert read(changed(WDL, "volatile_db", value={"max_batch_size": 10}), tmp_path).generation == "24.06"
    assert read(changed(WDL, "fuse_embedding_table", value=False), tmp_path).generation == "24.06"


@pytest.mark.parametrize(
    ("block", "field", "spelling", "kind"),
    [
        ("volatile_db", "type", "Disable", "disabled"),
        ("volatile_db", "type", "none", "disabled"),
        ("volatile_db", "type", "Hash Map", "hash_map"),
        ("volatile_db", "type", "map", "hash_map"),
        ("volatile_db", "type", "Parallel-HashMap", "hash_map"),
        ("volatile_db", "type", "multi_process_hash_map", "hash_map"),
        ("volatile_db", "type", "REDIS", "redis"),
        ("volatile_db", "overflow_policy", "Evict Oldest", "hash_map"),
        ("volatile_db", "overflow_policy", "random", "hash_map"),
        ("volatile_db", "overflow_policy", "evict-least-used", "hash_map"),
        ("persistent_db", "type", "RocksDB", "rocksdb"),
        ("persistent_db", "type", "disabled", "disabled"),
        ("update_source", "type", "Kafka", "kafka"),
        ("update_source", "type", "kafka mq", "kafka"),
        ("update_source", "type", "null", "disabled"),
    ],
)
def test_every_spelling_of_a_choice_is_understood(
    block: str, field: str, spelling: str, kind: str, tmp_path: Path
) -> None:
    """Case, spaces and dashes do not count, and every alias is known."""
    parsed = read(changed(WDL, block, value={field: spelling}), tmp_path)
    stores = {"volatile_db": parsed.volatile, "persistent_db": parsed.persistent, "update_source": parsed.updates}
    store: Any = stores[block]

    assert store.kind == kind


@pytest.mark.parametrize(("value", "key_type"), [("false", "uint32"), (0, "uint32"), ("TRUE", "int64"), (1, "int64")])
def test_the_key_type_follows_supportlonglong(value: Any, key_type: str, tmp_path: Path) -> None:
    """In any spelling of a truth value."""
    assert read(changed(WDL, "supportlonglong", value=value), tmp_path).key_type == key_type


def test_the_misspelt_persistent_block_of_the_readme_counts(tmp_path: Path) -> None:
    """HugeCTR's documentation says `peristent_db`; a store must not be lost because of that."""
    parsed = read(changed(WDL, "peristent_db", value={"type": "rocks_db"}), tmp_path)

    assert parsed.persistent.kind == "rocksdb"
    assert parsed.unknown == ()


def test_a_block_without_filters_subscribes_as_documented(tmp_path: Path) -> None:
    """HugeCTR cleared the list and received nothing; here the default holds, and an explicit empty list counts."""
    assert read(changed(WDL, "persistent_db", value={"type": "rocks_db"}), tmp_path).persistent.update_filters == (
        ".+",
    )
    assert read(changed(WDL, "persistent_db", value={"update_filters": []}), tmp_path).persistent.update_filters == ()


def test_what_has_no_effect_here_is_listed(tmp_path: Path) -> None:
    """Worker buffers and the like, and whatever this release has no setting for; the caller says so once."""
    document = changed(changed(WDL, "db_type", value="local"), "volatile_db", value={"type": "redis"})
    ignored = read(document, tmp_path).ignored

    assert {"'db_type'", "'volatile_db.type'", "'models[0].num_of_worker_buffer_in_pool'"} <= set(ignored)
    assert not {"'models[0].model'", "'models[0].sparse_files'", "'models[0].max_batch_size'"} & set(ignored)
    assert "'models[0].hit_rate_threshold'" not in ignored


def test_settings_of_ours_are_filled_from_the_file(tmp_path: Path) -> None:
    """A cache that is switched off has no room."""
    parsed = read(changed(WDL, "volatile_db", value={"cache_missed_embeddings": "true"}), tmp_path)
    off = read(changed(WDL, "models", 0, "gpucache", value=False), tmp_path)

    assert parsed.session_settings(parsed.models[0]) == {
        "cache_fraction": "0.5",
        "cache_missed_keys": "true",
        "hit_rate_threshold": "0.9",
        "refresh_interval_s": "0.0",
    }
    assert off.session_settings(off.models[0])["cache_fraction"] == "0.0"


@pytest.mark.parametrize(
    ("tiers", "pattern"),
    [
        ({}, "(?:.+)"),
        ({"volatile_db": {"type": "disabled"}, "persistent_db": {"type": "rocks_db"}}, "(?:.+)"),
        ({"volatile_db": {"update_filters": ["^a$", "^b$"]}}, "(?:^a$)|(?:^b$)"),
        ({"volatile_db": {"type": "hash_map", "num_node_connections": 3}}, "(?:^hps_.+$)"),
    ],
)
def test_updates_are_followed_where_the_file_says(tiers: dict[str, Any], pattern: str, tmp_path: Path) -> None:
    """Brokers stand between semicolons; the filters are those of the tiers that are on, or the generation's own."""
    source = {"type": "kafka_message_queue", "brokers": "one:9092;two"}
    parsed = read({**WDL, **tiers, "update_source": source}, tmp_path)
    settings = parsed.session_settings(parsed.models[0])
    assert set(settings) == acting_settings() == TAKEN_OVER
    assert settings["update_stream"] == "kafka://one:9092,two"
    assert settings["update_filter"] == pattern


def test_unknown_fields_are_listed_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A misspelt setting is logged, and does not stop a server."""
    document = changed(changed(WDL, "volatile_db", value={"adress": "x"}), "models", 0, "gpu_cache", value=1)

    with caplog.at_level(logging.WARNING):
        parsed = read(document, tmp_path)

    assert parsed.unknown == ("'volatile_db.adress'", "'models[0].gpu_cache'")
    assert caplog.text.count("volatile_db.adress") == 1
    assert "'volatile_db.adress', 'models[0].gpu_cache'" in caplog.text


def test_urls_stay_as_they_are(tmp_path: Path) -> None:
    """24.06 takes tables from HDFS, S3 and GCS."""
    document = changed(HPS, "models", 0, "sparse_files", value=["hdfs://namenode:9000/a", "b"])

    assert read(document, tmp_path).models[0].sparse_files == ("hdfs://namenode:9000/a", f"{tmp_path}/b")


WRONG: list[tuple[Document, str]] = [
    (changed(WDL, "supportlonglong", value=None), "'supportlonglong': required, but missing"),
    (changed(WDL, "supportlonglong", value="yes"), "'supportlonglong': value 'yes'; allowed: true or false"),
    (changed(WDL, "models", value={}), "'models': expected a list of at least one model, found {}"),
    (changed(WDL, "models", value=[]), r"'models': expected a list of at least one model, found \[\]"),
    (changed(WDL, "models", 0, value=5), r"'models\[0\]': expected an object, found 5"),
    (changed(WDL, "models", 0, "model", value="a/b"), r"model': 'a/b'; allowed: 1 to 120 letters"),
    (changed(WDL, "models", 0, "model", value=""), "allowed: 1 to 120 letters"),
    (changed(WDL, "models", value=WDL["models"] * 2), r"'models\[1\]\.model': 'wdl' is used twice"),
    (changed(WDL, "models", 0, "sparse_files", value=[]), "expected a list of one folder per embedding table"),
    (changed(WDL, "models", 0, "sparse_files", value="x"), "sparse_files': value 'x'; allowed: a list"),
    (changed(WDL, "models", 0, "sparse_files", value=[1]), r"sparse_files': value \[1\]; allowed: a string"),
    (changed(WDL, "models", 0, "network_file", value="a\0b"), "allowed: a string without NUL"),
    (changed(WDL, "models", 0, "dense_file", value=""), "dense_file': required together with network_file"),
    (changed(WDL, "models", 0, "max_batch_size", value=0), "max_batch_size': value 0; allowed: whole numbers from 1"),
    (changed(WDL, "models", 0, "max_batch_size", value="1.5"), "value '1.5'; allowed: whole numbers"),
    (changed(WDL, "models", 0, "max_batch_size", value=True), "value True; allowed: whole numbers"),
    (changed(WDL, "models", 0, "max_batch_size", value=[64]), r"value \[64\]; allowed: whole numbers"),
    (changed(WDL, "models", 0, "gpucacheper", value="1.5"), "gpucacheper': value '1.5'; allowed: numbers from 0 to 1"),
    (changed(WDL, "models", 0, "hit_rate_threshold", value="nan"), "allowed: numbers from 0"),
    (changed(WDL, "models", 0, "hit_rate_threshold", value=None), "value None; allowed: numbers from 0"),
    (changed(WDL, "models", 0, "default_value_for_each_table", value=["x"]), "allowed: numbers"),
    (changed(WDL, "models", 0, "gpucache", value=2), "value 2; allowed: true or false"),
    (changed(HPS, "models", 0, "embedding_vecsize_per_table", value=[1]), "1 values, but sparse_files has 2"),
    (changed(HPS, "models", 0, "embedding_vecsize_per_table", value=3), "value 3; allowed: a list"),
    (changed(HPS, "models", 0, "embedding_table_names", value=["a", "a"]), "a name is used twice"),
    (changed(HPS, "volatile_db", value=[]), "'volatile_db': expected an object, found a list"),
    (
        changed(HPS, "volatile_db", "type", value="memcached"),
        "'volatile_db.type': value 'memcached'; allowed: disabled, ",
    ),
    (changed(HPS, "volatile_db", "type", value=7), "value 7; allowed: disabled"),
    (changed(HPS, "update_source", "brokers", value=9092), "'update_source.brokers': value 9092; allowed: a string"),
    (changed(HPS, "persistent_db", "num_threads", value="8 threads"), "allowed: whole numbers from 1"),
]


@pytest.mark.parametrize(("document", "expected"), WRONG)
def test_a_wrong_value_is_named_with_file_line_field_and_what_is_allowed(
    document: Document, expected: str, tmp_path: Path
) -> None:
    """An operator reads what to change, and where."""
    with pytest.raises(ConfigurationError, match=expected) as error:
        read(document, tmp_path)

    assert str(error.value).startswith(f"{tmp_path / 'ps.json'}:")


@pytest.mark.parametrize("block", [{"type": "redis", "password": 20406080}, [{"password": "20406080"}], "20406080"])
def test_a_password_is_in_no_message(block: Any, tmp_path: Path) -> None:
    """Whatever is wrong with the block that holds it."""
    with pytest.raises(ConfigurationError) as error:
        read(changed(HPS, "volatile_db", value=block), tmp_path)

    assert "20406080" not in str(error.value)


def test_the_line_is_that_of_the_field_at_fault(tmp_path: Path) -> None:
    """Not that of the same name elsewhere, nor of text that looks like it."""
    text = """{
 "supportlonglong": true, "note": "\\"gpucache\\": [{,",
 "volatile_db": {"type": "hash_map", "gpucache": {"x": [1, 2]}},
 "models": [
  {"model": "a", "sparse_files": ["a"], "gpucache": true},
  {"model": "b", "sparse_files": ["b"],
   "gpucache": "perhaps"}
 ]
}"""

    with pytest.raises(ConfigurationError, match=r"ps.json:7: field 'models\[1\].gpucache': value 'perhaps'"):
        read(text, tmp_path)


def test_a_missing_comma_is_found(tmp_path: Path) -> None:
    """NVIDIA's own samples lack some."""
    with pytest.raises(ConfigurationError, match=r"ps.json:3: not valid JSON"):
        read('{\n "supportlonglong": true\n "models": []}', tmp_path)


def test_a_graph_in_place_of_ps_json_is_named(tmp_path: Path) -> None:
    """Both are JSON, and lie in the same folder."""
    with pytest.raises(ConfigurationError, match=r"the file is a graph: give the ps\.json that names it"):
        read({"layers": []}, tmp_path)


def test_a_missing_file_or_model_is_named(tmp_path: Path) -> None:
    """The error lists the models that exist."""
    with pytest.raises(ConfigurationError, match=r"none.json: cannot be read"):
        read_ps_json(tmp_path / "none.json")
    with pytest.raises(ConfigurationError, match="has no model 'dcn'; its models: 'wdl'"):
        read(WDL, tmp_path).model("dcn")


def test_every_field_of_the_reference_is_known(tmp_path: Path) -> None:
    """All fields of both generations at once leave nothing unknown."""
    fields = {
        "volatile_db": """type address user_name password algorithm num_partitions max_get_batch_size max_set_batch_size
            max_batch_size allocation_rate shared_memory_size shared_memory_name shared_memory_auto_remove
            num_node_connections enable_tls tls_ca_certificate tls_client_certificate tls_client_key
            tls_server_name_identification refresh_time_after_fetch overflow_margin overflow_policy
            overflow_resolution_target initial_cache_rate initialize_after_startup cache_missed_embeddings
            update_filters""",
        "persistent_db": """type path num_threads read_only max_get_batch_size max_set_batch_size max_batch_size
            initialize_after_startup update_filters""",
        "update_source": """type brokers metadata_refresh_interval_ms poll_timeout_ms max_receive_buffer_size
            receive_buffer_size max_batch_size failure_backoff_ms max_commit_interval""",
        "models": """model network_file dense_file sparse_files non_trainable_params_file max_batch_size gpucache
            gpucacheper hit_rate_threshold num_of_worker_buffer_in_pool num_of_refresher_buffer_in_pool
            cache_refresh_percentage_per_iteration deployed_device_list default_value_for_each_table
            maxnum_catfeature_query_per_table_per_sample embedding_vecsize_per_table embedding_table_names
            maxnum_des_feature_per_sample refresh_delay refresh_interval label_dim slot_num use_gpu_embedding_cache
            embedding_cache_type use_static_table enable_pagelock fp8_quant use_context_stream
            use_hctr_cache_implementation thread_pool_size init_ec fuse_embedding_table""",
    }
    kinds: dict[str, Any] = {
        "volatile_db": VolatileStore,
        "persistent_db": PersistentStore,
        "update_source": UpdateSource,
        "models": PsModel,
    }
    for block, kind in kinds.items():
        assert set(fields[block].split()) <= _names(kind)
        assert NEWER_NAMES[block] <= _names(kind)
    assert read(changed(WDL, "fuse_embedding_table", value=True), tmp_path).unknown == ()


def test_every_field_is_on_the_page_of_compatibility() -> None:
    """docs/reference/hugectr.md says what becomes of each field of ps.json."""
    guide = (Path(__file__).parents[3] / "docs/reference/hugectr.md").read_text(encoding="utf-8")
    blocks = (VolatileStore, PersistentStore, UpdateSource, PsModel)
    names = set[str]().union(*map(_names, blocks))

    assert {name for name in names if f"`{name}`" not in guide} == set()


def _names(kind: Any) -> set[str]:
    """All fields of a block by their names in ps.json."""
    return {*kind.ignored, *(name for item in dataclasses.fields(kind) for name in item.metadata["names"])}


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200)
@given(data=st.data(), value=_JSON)
def test_no_replaced_value_does_worse_than_an_error(data: st.DataObject, value: Any, tmp_path: Path) -> None:
    """Any value in any place gives a configuration, or an error that names file and line."""
    places: list[tuple[str | int, ...]] = [(name,) for name in HPS]
    places += [(block, name) for block in ("volatile_db", "persistent_db", "update_source") for name in HPS[block]]
    places += [("models", 0, name) for name in HPS["models"][0]]
    document = changed(HPS, *data.draw(st.sampled_from(places)), value=value)
    path = tmp_path / "ps.json"
    path.write_text(json.dumps(document), encoding="utf-8")

    try:
        read_ps_json(path)
    except ConfigurationError as error:
        message = str(error)
    else:
        message = f"{path}:"

    assert message.startswith(f"{path}:")
