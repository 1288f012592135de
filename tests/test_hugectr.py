"""HugeCTR's Python names, as offline scripts use them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_session import InferenceSession, hugectr
from inference_session.errors import ConfigurationError, HotrowError
from inference_session.hugectr import (
    HPS,
    CreateInferenceSession,
    DatabaseType_t,
    InferenceParams,
    ParameterServerConfig,
    PersistentDatabaseParams,
    UpdateSourceParams,
    UpdateSourceType_t,
    VolatileDatabaseParams,
)
from tests.testing.example_models import ExampleModels
from tests.testing.hugectr_source import Source, requests_of


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTROW_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """A small model of HugeCTR."""
    return Source(tmp_path / "source")


def params_of(source: Source, **more: Any) -> InferenceParams:
    """The nine positional parameters of 3.4, and more."""
    tables = [str(source.table_folder(table)) for table in range(2)]
    dense = str(source.folder / "dense.model")
    return InferenceParams("small", 16, 1.0, dense, tables, 0, True, 0.5, True, **more)


def session_of(source: Source, **more: Any) -> CreateInferenceSession:
    """The small model, opened."""
    return CreateInferenceSession(str(source.folder / "graph.json"), params_of(source, **more))


def flat(source: Source) -> list[list[float]]:
    """A request as 3.4 takes it."""
    return [array.ravel().tolist() for array in source.request().values()]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_nothing_opened_is_copied(source: Source, copied: Callable[[object], object]) -> None:
    """The sessions of a copy would be closed with the original; the error names what was to be copied."""
    for opened in (session_of(source), HPS(source.ps_json())):
        with pytest.raises(TypeError, match=r"^<(CreateInferenceSession|HPS) of .* can be neither copied nor pickled"):
            copied(opened)
    assert copied(params_of(source))


def test_a_model_predicts_as_hugectr_would(models: ExampleModels) -> None:
    """Flat lists in, num_samples x label_dim floats out."""
    folder = models.wide_and_deep
    params = InferenceParams(
        model_name="hugectr_wdl",
        max_batchsize=64,
        hit_rate_threshold=1.0,
        dense_model_file=str(folder / "hugectr_wdl_dense_0.model"),
        sparse_model_files=[str(folder / f"hugectr_wdl{table}_sparse_0.model") for table in range(2)],
        device_id=0,
        use_gpu_embedding_cache=True,
        cache_size_percentage=0.5,
        i64_input_key=True,
        use_mixed_precision=False,
    )
    session = CreateInferenceSession(str(folder / "graph.json"), params)

    with np.load(folder / "expected.npz") as answers:
        for name, inputs in requests_of(folder / "requests.npz").items():
            arrays = (inputs[tensor].ravel().tolist() for tensor in ("DES", "CATCOLUMN", "ROWINDEX"))
            np.testing.assert_allclose(session.predict(*arrays), answers[name].ravel(), rtol=0, atol=1e-5)


def test_tables_are_looked_up(models: ExampleModels) -> None:
    """A ps.json of HPS, and one of the hugectr backend."""
    folder = models.wide_and_deep
    keys = np.fromfile(folder / "hugectr_wdl1_sparse_0.model/key", np.int64)
    vectors = np.fromfile(folder / "hugectr_wdl1_sparse_0.model/emb_vector", np.float32).reshape(-1, 16)

    for name, model in (("hps_ps.json", "hugectr_wdl_hps"), ("ps.json", "hugectr_wdl")):
        found = HPS(str(folder / name)).lookup(keys[:500], model, 1)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, vectors[:500])


def test_several_labels_come_by_sample(tmp_path: Path) -> None:
    """Two samples of three labels are six numbers."""
    source = Source(tmp_path / "source", label_dim=3)

    assert len(session_of(source).predict(*flat(source))) == 6


def test_a_refresh_reads_what_was_written_since(source: Source) -> None:
    """New rows answer after `refresh_embedding_cache`, not before."""
    session = session_of(source)
    before = session.predict(*flat(source))
    source.vectors[1] += 1
    source.write_table(1)

    assert session.predict(*flat(source)) == before
    session.refresh_embedding_cache()
    assert session.predict(*flat(source)) != before


def test_a_refresh_leaves_predictions_under_way_alone(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end with the rows that were read before, though another thread refreshes meanwhile."""
    session, predict = session_of(source), InferenceSession.predict
    before = session.predict(*flat(source))

    def predict_late(opened: InferenceSession, inputs: Any) -> Any:
        monkeypatch.undo()
        session.refresh_embedding_cache()
        return predict(opened, inputs)

    monkeypatch.setattr(InferenceSession, "predict", predict_late)
    assert session.predict(*flat(source)) == before


def test_parameters_of_both_generations_are_taken(source: Source) -> None:
    """Stores, BatchNorm statistics, and what 24.06 added."""
    session = session_of(
        source,
        default_value_for_each_table=[0.25, -1],
        volatile_db=VolatileDatabaseParams(type=DatabaseType_t.parallel_hash_map, num_partitions=4),
        persistent_db=PersistentDatabaseParams(backend=DatabaseType_t.disabled),
        update_source=UpdateSourceParams(type=UpdateSourceType_t.null),
        embedding_cache_type="dynamic",
        non_trainable_params_file="",
    )

    assert len(session.predict(*flat(source))) == 2


def test_repr_tells_what_but_no_password(source: Source) -> None:
    """A notebook shows the model or kind of these objects, and never their settings."""
    redis = VolatileDatabaseParams(type=DatabaseType_t.redis_cluster, password="hidden")  # noqa: S106

    assert repr(HPS(source.ps_json())) == "<HPS of models 'small'>"
    assert repr(session_of(source)) == "<CreateInferenceSession of model 'small'>"
    assert repr(redis).startswith("<VolatileDatabaseParams ")
    assert "redis_cluster" in repr(redis)
    assert "hidden" not in repr(params_of(source, volatile_db=redis))


def test_tables_are_described_in_python(source: Source) -> None:
    """ParameterServerConfig in place of a ps.json."""
    config = ParameterServerConfig(
        emb_table_name={"small": ["wide", "deep"]},
        embedding_vec_size={"small": [1, 4]},
        max_feature_num_per_sample_per_emb_table={"small": [2, 3]},
        inference_params_array=[params_of(source, default_value_for_each_table=[0.25, -1])],
    )

    found = HPS(config).lookup(np.array([source.keys[1][0], 10**9]), "small", 1, 0)

    np.testing.assert_array_equal(found, [source.vectors[1][0], [-1] * 4])


def test_scripts_of_later_versions_run(source: Source) -> None:
    """No `device_id`, kinds of caches as an enumeration, fields of stores set one by one, the submodule `inference`."""
    store = hugectr.inference.VolatileDatabaseParams()
    store.type = DatabaseType_t.hash_map
    store.num_partitions = 4
    params = hugectr.inference.InferenceParams(
        model_name="small",
        max_batchsize=10,
        hit_rate_threshold=1.0,
        dense_model_file="",
        sparse_model_files=[str(source.table_folder(table)) for table in range(2)],
        deployed_devices=[0],
        use_gpu_embedding_cache=True,
        cache_size_percentage=0.5,
        embedding_cache_type=hugectr.inference.EmbeddingCacheType_t.UVM,
        i64_input_key=True,
    )
    tables = ({"small": ["wide", "deep"]}, {"small": [1, 4]}, {"small": [2, 3]})
    hps = HPS(ParameterServerConfig(*tables, [params], volatile_db=store))

    np.testing.assert_array_equal(hps.lookup(list(source.keys[1][:2]), "small", 1), source.vectors[1][:2])


def test_a_table_may_be_called_as_the_folder_of_another(source: Source) -> None:
    """Each number has its own rows, whatever folders the names give."""
    tables = ({"small": ["a.b", "a_b"]}, {"small": [1, 4]}, {"small": [2, 3]})
    params = params_of(source)
    hps = HPS(ParameterServerConfig(*tables, [params]))

    for table in range(2):
        found = hps.lookup(source.keys[table][:3], "small", table)
        np.testing.assert_array_equal(found, source.vectors[table][:3])


def test_parameters_without_a_default_must_be_given() -> None:
    """Although `device_id`, which precedes them, has one."""
    with pytest.raises(TypeError, match="of model 'm' needs cache_size_percentage, i64_input_key"):
        InferenceParams("m", 1, 1.0, "", [], use_gpu_embedding_cache=True)


def test_capsules_are_read_and_filled(source: Source) -> None:
    """DLPack tensors of any library, which may go on using them."""
    out = np.full((1, 13), -7, np.float32)
    capsule = out.__dlpack__()

    HPS(source.ps_json()).lookup_fromdlpack(np.array(source.keys[1][:3]).__dlpack__(), capsule, "small", 1)

    np.testing.assert_array_equal(out[0, :12], source.vectors[1][:3].ravel())
    assert out[0, 12] == -7
    assert '"dltensor"' in repr(capsule)  # and not "used_dltensor"


@pytest.mark.parametrize(
    ("keys", "out", "message"),
    [
        (np.arange(2), np.empty(3, np.float32), "out_tensor has room for 3 elements, but the vectors need 8"),
        (np.arange(2, dtype=np.int32), np.empty(8, np.float32), "keys holds elements 'i4'; expected int64"),
        (np.arange(2), np.empty(8), "out_tensor holds elements 'f8'; expected float32"),
        (np.arange(4)[::2], np.empty(8, np.float32), "keys has gaps between its elements"),
    ],
)
def test_capsules_of_other_tensors_are_refused(
    source: Source, keys: NDArray[Any], out: NDArray[Any], message: str
) -> None:
    """The error says what is found and what is expected."""
    with pytest.raises(HotrowError, match=message):
        HPS(source.ps_json()).lookup_fromdlpack(keys.__dlpack__(), out.__dlpack__(), "small", 1)


def test_what_is_no_capsule_is_refused(source: Source) -> None:
    """An array in a capsule's place."""
    with pytest.raises(HotrowError, match="keys is not an unused DLPack capsule, found"):
        HPS(source.ps_json()).lookup_fromdlpack(np.arange(2), None, "small", 1)


BAD: list[tuple[Callable[[Source], Any], str]] = [
    (lambda s: session_of(s).predict([1.0], [1], [0]), "ROWINDEX"),
    (
        lambda s: session_of(s).predict(flat(s)[0], [0.5] * 9, flat(s)[2]),
        ("embeddingcolumns holds a value that is not a whole"),
    ),
    (lambda s: session_of(s).predict(["x"], [1], [0]), "dense_feature holds a value that is not a number"),
    (
        lambda s: session_of(s).predict(np.ma.masked_array([1.0], mask=True), [1], [0]),
        "dense_feature has masked elements",
    ),
    (lambda s: session_of(s).predict([None], [1], [0]), "dense_feature holds a value that is not a number"),
    (lambda s: session_of(s).predict([[1], [2, 3]], [1], [0]), "dense_feature cannot be converted to a flat array of"),
    (lambda s: session_of(s).predict(flat(s)[0], [2**63] * 9, flat(s)[2]), "embeddingcolumns holds"),
    (lambda s: HPS(s.ps_json()).lookup([1], "other", 0), "no model 'other'; known models: 'small'"),
    (lambda s: HPS(s.ps_json()).lookup([1], "small", 2), "has no table 2; it has 2"),
    (lambda s: HPS(s.ps_json()).lookup([1], "small", -1), "has no table -1"),
    (lambda s: HPS(s.ps_json()).lookup([1], "small", "0"), "has no table '0'"),  # type: ignore[arg-type]
    (lambda s: HPS(s.ps_json()).lookup(["a"], "small", 0), "keys holds a value that is not a whole number"),
    (lambda s: HPS(s.folder / "absent.json"), r"absent\.json"),
    (lambda s: session_of(s, volatile_db=VolatileDatabaseParams(type="floppy")), "volatile_db.type"),
    (lambda s: CreateInferenceSession("absent.json", params_of(s)), r"absent\.json"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_what_is_malformed_raises(source: Source, call: Callable[[Source], Any], message: str) -> None:
    """Every mistake is an error that names it."""
    with pytest.raises(HotrowError, match=message):
        call(source)


@pytest.mark.parametrize("kind", ["DataSourceType_t", "FileSystemType_t"])
def test_a_data_source_is_named_as_in_each_release(kind: str) -> None:
    """3.9 and later: `source`, `server` and `port`, by name or position, and the type's name until 4.2 and since."""
    types = getattr(hugectr, kind)
    for params in (
        hugectr.DataSourceParams(source=types.HDFS, server="node", port=9000),
        hugectr.DataSourceParams(types.HDFS, "node", 9000),
        hugectr.DataSourceParams(type=types.HDFS, server="node", port=9000),
        hugectr.DataSourceParams(True, "node", 9000),
    ):
        assert params.place_of("/a/b") == "hdfs://node:9870/a/b"
        assert params.place_of("hdfs://node:9000/a/b") == "hdfs://node:9870/a/b"
        assert params.place_of("hdfs://other:9000/a/b") == "hdfs://other:9000/a/b"
    for params in (hugectr.DataSourceParams(), hugectr.DataSourceParams(types.Local, "node", 9000)):
        assert params.place_of("/a/b") == "/a/b"
    for other in ("S3", "GCS", "Other"):
        with pytest.raises(ConfigurationError, match=f"source {other} is not supported; expected Local or HDFS"):
            hugectr.DataSourceParams(getattr(types, other), "us-east-1", 9000)
