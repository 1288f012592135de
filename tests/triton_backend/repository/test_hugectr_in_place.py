"""Model folders as HugeCTR's users have them: which files count, and which messages the others cause."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from inference_session.errors import ConfigurationError, HotrowError
from inference_session.model_spec import ModelSpec, TensorSpec
from inference_session.version_directory.session_file import read_spec
from tests.testing.hugectr_source import Source
from triton_backend.repository.config_checks import check_config
from triton_backend.repository.config_writer import write_model_config
from triton_backend.repository.in_place import InPlaceModel, contradictions, read_model_folder
from triton_backend.repository.model_config import ModelConfig, TensorConfig
from triton_backend.repository.servable import ps_json_variables


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """A small model of HugeCTR with its ps.json next to it."""
    source = Source(tmp_path / "small")
    source.ps_json()
    return source


def read(
    source: Source, backend: str = "hugectr", environment: dict[str, str] | None = None, **parameters: str
) -> InPlaceModel:
    """The folder as the server reads it."""
    return read_model_folder(source.folder, "small", parameters, backend, environment=environment or {})  # type: ignore[arg-type]


def spec_of(found: InPlaceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    """The result of the import."""
    monkeypatch.setenv("HOTROW_CACHE_DIR", str(tmp_path / "cache"))
    with found.imported(3) as version_dir:
        assert version_dir.name == "3"
        return read_spec(version_dir)


def test_ps_json_is_found_in_three_places(source: Source, tmp_path: Path) -> None:
    """The parameter `ps` comes first, then the environment, then the model's own folder; its paths count from it."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("a.json", "b.json"):
        shutil.copyfile(source.folder / "ps.json", elsewhere / name)
    environment = {"HOTROW_PS_CONFIG": str(elsewhere / "b.json")}

    assert read(source).ps_json.path == source.folder / "ps.json"
    assert read(source, environment=environment).ps_json.path == elsewhere / "b.json"
    by_parameter = read(source, environment=environment, ps="../elsewhere/a.json")
    assert by_parameter.ps_json.path.resolve() == elsewhere / "a.json"
    assert Path(by_parameter.model.dense_file).resolve() == elsewhere / "dense.model"


def test_triton_s_flags_name_ps_json_by_backend(source: Source, tmp_path: Path) -> None:
    """HugeCTR's `--backend-config=<backend>,ps=` counts before what is for all, and in either form of a flag."""
    shutil.copyfile(source.folder / "ps.json", tmp_path / "flag.json")
    flags = (
        "--log-verbose=1",
        f"--backend-config=hugectr,ps={tmp_path}/flag.json",
        *("--backend-config", "hps,ps=there.json"),
        "--backend-config=python,shm-default-byte-size=1",
    )

    environment = {"HOTROW_PS_CONFIG": "/nowhere.json", **ps_json_variables(flags)}

    assert read(source, environment=environment).ps_json.path == tmp_path / "flag.json"
    assert environment["HOTROW_PS_CONFIG_HPS"] == str(Path.cwd() / "there.json")


def test_parameters_point_at_other_files(source: Source) -> None:
    """Paths in config.pbtxt are relative to the model's folder; spaces between them are ignored."""
    found = read(source, config="v2/graph.json", dense_file="v2.model", sparse_files="a, b", keep_rows_of="0,1")

    assert found.model.graph_file == str(source.folder / "v2/graph.json")
    assert found.model.dense_file == str(source.folder / "v2.model")
    assert found.model.sparse_files == (str(source.folder / "a"), str(source.folder / "b"))
    assert found.keep_rows_of == (source.folder / "0", source.folder / "1")


def test_hotrows_own_settings_reach_the_session(source: Source) -> None:
    """They stand next to HugeCTR's; those in capitals are Triton's."""
    found = read(source, unknown_keys="reject", gpucache="true", EXECUTION_ENV_PATH="x")

    assert found.session_settings == {"unknown_keys": "reject"}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"gpucash": "true"}, r"unknown parameter 'gpucash'; known: .*gpucache.*unknown_keys"),
        ({"ps": "absent.json"}, r"absent\.json"),
        ({"sparse_files": "one"}, r"names 1 folders, ps\.json has 2"),
    ],
)
def test_wrong_parameters_are_errors(source: Source, parameters: dict[str, str], message: str) -> None:
    """The message says what there is."""
    with pytest.raises(HotrowError, match=message):
        read(source, **parameters)


def test_a_missing_ps_json_says_where_it_may_be(source: Source) -> None:
    """All three ways are named."""
    (source.folder / "ps.json").unlink()

    with pytest.raises(ConfigurationError, match=r"ps\.json: no such file; .*'ps'.*HOTROW_PS_CONFIG"):
        read(source)


def test_a_model_that_ps_json_does_not_have_is_an_error(source: Source) -> None:
    """As with HugeCTR, names have to agree."""
    with pytest.raises(ConfigurationError, match=r"no model 'other'; its models: 'small'"):
        read_model_folder(source.folder, "other", {}, "hugectr", environment={})


def test_contradictions_are_told_and_the_files_hold(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fields that agree are not mentioned."""
    found = read(source, slots="5", des_feature_num="99", label_dim="1", mixed_precision="true", max_nnz="7")
    spec = spec_of(found, tmp_path, monkeypatch)

    assert contradictions(found, spec, max_batch_size=64) == [
        "des_feature_num is '99' in config.pbtxt, but 2 in the model",
        "mixed_precision is 'true' in config.pbtxt, but false (computed in float32) in the model",
        "max_batch_size is 64, but 16 in ps.json, which is used",
    ]


def test_hps_takes_the_tables_alone(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even of a ps.json that names a graph."""
    spec = spec_of(read(source, "hps"), tmp_path, monkeypatch)

    assert spec.layout == "hps"
    assert [tensor.name for tensor in spec.inputs] == ["KEYS", "NUMKEYS"]


def test_copies_of_a_folder_under_other_names_have_one_import(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton copies models of repositories in the cloud to a new folder at each load: imports must not pile up."""
    monkeypatch.setenv("HOTROW_CACHE_DIR", str(tmp_path / "cache"))
    imports = set()
    for name in ("folderX2mA9e", "folderb7Qk0d"):
        source.folder = source.folder.rename(tmp_path / name)
        with read(source).imported(1) as version_dir:
            imports.add(version_dir)

    assert len(imports) == 1


def test_hugectr_needs_a_graph(source: Source) -> None:
    """A model of tables alone is for the other backend."""
    source.model["network_file"] = ""
    source.ps_json()

    with pytest.raises(ConfigurationError, match="has no graph"):
        read(source)


def test_inputs_of_another_type_are_refused(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config.pbtxt for uint32 keys and a ps.json for int64 do not go together."""
    spec = spec_of(read(source), tmp_path, monkeypatch)
    types = {"DES": "TYPE_FP32", "CATCOLUMN": "TYPE_UINT32", "ROWINDEX": "TYPE_INT32"}

    with pytest.raises(ConfigurationError, match=r"'CATCOLUMN' TYPE_UINT32.*'CATCOLUMN' TYPE_INT64"):
        check_config({"input": [{"name": name, "data_type": kind} for name, kind in types.items()]}, spec)


def test_an_imported_model_is_described_as_its_clients_know_it(tmp_path: Path) -> None:
    """Packed inputs of any length, one output, requests joined by Triton."""
    spec = ModelSpec(
        inputs=(TensorSpec("DES", "float32", (-1,)), TensorSpec("CATCOLUMN", "uint32", (-1,))),
        outputs=(TensorSpec("a", "float32", (-1, 1)), TensorSpec("b", "float32", (-1, 1))),
        tables=(),
        lookups=(),
        labels=("a", "b"),
        label_outputs=("a", "b"),
        layout="hugectr",
    )
    draft = tmp_path / "ctr" / ".tmp-1"
    draft.mkdir(parents=True)

    path = write_model_config(draft, spec, "ctr", max_batch_size=64)

    config = ModelConfig.read(path)
    assert config.max_batch_size == 64
    assert config.inputs == (TensorConfig("DES", "TYPE_FP32", (-1,)), TensorConfig("CATCOLUMN", "TYPE_UINT32", (-1,)))
    assert config.outputs == (TensorConfig("OUTPUT0", "TYPE_FP32", (-1,)),)
    assert path.read_text(encoding="utf-8").count("allow_ragged_batch: true") == 2
    assert "dynamic_batching" in path.read_text(encoding="utf-8")
