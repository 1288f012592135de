"""HugeCTR's files become versions that answer as HugeCTR did; misfits are refused and leave nothing behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_session import InferenceSession
from inference_session.errors import (
    ConfigurationError,
    HotrowError,
    InvalidRequestError,
    ModelFormatError,
    UnsupportedModelError,
)
from inference_session.importers.hugectr.importer import import_hugectr
from inference_session.model_spec import TensorSpec
from inference_session.requests.batch import Request
from inference_session.version_directory.manifest import read_manifest
from inference_session.version_directory.session_file import read_spec
from tests.testing.example_models import ExampleModels
from tests.testing.hugectr_evaluator import Evaluator
from tests.testing.hugectr_graphs import GraphMaker
from tests.testing.hugectr_source import Source, array_of, requests_of


@pytest.mark.parametrize(
    ("model", "version"), [("wide_and_deep", "."), ("wide_and_deep", "v2"), ("cross_network", ".")]
)
def test_a_model_answers_as_hugectr_would(model: str, version: str, models: ExampleModels, tmp_path: Path) -> None:
    """Every request, by plain NumPy and by a session: variable bags, empty slots, unknown keys, sum and mean."""
    folder: Path = getattr(models, model)
    (report,) = import_hugectr(folder / version / "ps.json", tmp_path)
    evaluator = Evaluator(report.version_dir)
    requests = requests_of(folder / "requests.npz")

    with np.load(folder / version / "expected.npz") as answers, InferenceSession.open(report.version_dir) as session:
        assert set(answers) == set(requests)
        for name, inputs in requests.items():
            np.testing.assert_allclose(evaluator.predict(inputs), answers[name], rtol=0, atol=1e-5)
            np.testing.assert_allclose(session.predict(inputs), answers[name], rtol=0, atol=1e-5)


def test_tables_alone_answer_as_hps_would(models: ExampleModels, tmp_path: Path) -> None:
    """The vectors themselves, table by table; keys that no table has get the default value."""
    folder = models.wide_and_deep
    (report,) = import_hugectr(folder / "hps_ps.json", tmp_path)
    evaluator = Evaluator(report.version_dir)

    with np.load(folder / "hps_expected.npz") as answers, InferenceSession.open(report.version_dir) as session:
        for name, inputs in requests_of(folder / "hps_requests.npz").items():
            np.testing.assert_array_equal(evaluator.vectors(inputs), answers[name])
            np.testing.assert_array_equal(session.run(inputs)["OUTPUT0"].reshape(-1), answers[name])


def _answer(session: InferenceSession, inputs: dict[str, NDArray[Any]], outputs: list[str]) -> NDArray[Any] | None:
    """OUTPUT0, or None where the request was refused."""
    (answer,) = session.run_many([Request(inputs, outputs)])
    if isinstance(answer, HotrowError):
        assert isinstance(answer, InvalidRequestError)
        return None
    return answer["OUTPUT0"]


def test_malformed_requests_get_what_they_must(models: ExampleModels, tmp_path: Path) -> None:
    """Each is refused, or answered correctly where that is allowed; the session keeps answering the others."""
    folder = models.wide_and_deep
    cases = json.loads((folder / "malformed.json").read_text(encoding="utf-8"))["cases"]
    with ExitStack() as stack:
        sessions = {
            report.version_dir.parent.name: stack.enter_context(InferenceSession.open(report.version_dir))
            for name in ("ps.json", "hps_ps.json")
            for report in import_hugectr(folder / name, tmp_path)
        }
        for case in cases:
            inputs = {name: array_of(tensor) for name, tensor in case["inputs"].items()}
            answer = _answer(sessions[case["model"]], inputs, case["requested_outputs"])
            expect = case["expect"]
            assert expect["outcome"] in ("either", "error" if answer is None else "ok"), case["id"]
            for row, expected in zip(expect.get("check_rows", ()), expect.get("expected_rows", ()), strict=True):
                if answer is not None:
                    np.testing.assert_allclose(np.atleast_1d(answer[row]), expected, rtol=0, atol=1e-5)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path / "source")


def test_an_imported_version_says_what_it_is(source: Source, tmp_path: Path) -> None:
    """Inputs as HugeCTR's clients send them, tables by the names of their layers, the defaults of ps.json."""
    (report,) = import_hugectr(source.ps_json(), tmp_path / "repository")
    spec = read_spec(report.version_dir)

    assert report.version_dir == tmp_path / "repository/small/1"
    assert "'deep': 9 rows x 4 float32, read by 'CATCOLUMN/1', sum\nPredictions: label" in str(report)
    assert [tensor.name for tensor in spec.inputs] == ["DES", "CATCOLUMN", "ROWINDEX"]
    assert spec.outputs == (TensorSpec("label", "float32", (-1, 1)),)
    assert [(t.name, t.num_rows, t.embedding_dim, t.keys, t.default_vector) for t in spec.tables] == [
        ("wide", 5, 1, "stored", 0.25),
        ("deep", 9, 4, "stored", -1.0),
    ]
    assert [(lookup.keys, lookup.dense_input, lookup.pooling) for lookup in spec.lookups] == [
        ("CATCOLUMN/0", "wide", "sum"),
        ("CATCOLUMN/1", "deep", "sum"),
    ]
    assert spec.layout == "hugectr"
    assert spec.layout_options == {
        "dense_dim": 2,
        "slots": [2, 3],
        "key_type": "int64",
        "max_samples": 16,
        "dense_input": "dense",
    }
    assert {str(entry.path) for entry in read_manifest(report.version_dir)} >= {"session.json", "tables/wide/key"}


def test_duplicate_keys_are_reported(source: Source, tmp_path: Path) -> None:
    """If a sparse folder has equal keys, the last row is found; the report counts the others."""
    source.keys[1][[0, 3]] = source.keys[1][8]
    source.write_table(1)

    (report,) = import_hugectr(source.ps_json(), tmp_path / "repository")

    assert report.notes == ("table 'deep': 2 rows are never found, because a later row has the same key",)


def test_tables_are_linked_not_converted(source: Source, tmp_path: Path) -> None:
    """The sparse folder is our table format: the files are the same files."""
    (report,) = import_hugectr(source.ps_json(), tmp_path / "repository")

    for table, name in enumerate(("wide", "deep")):
        for file in ("key", "emb_vector"):
            assert (report.version_dir / "tables" / name / file).samefile(source.table_folder(table) / file)


def test_tables_are_copied_where_links_are_not_possible(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file system refuses the link; the bytes are the same."""

    def refuse(*_: object) -> None:
        raise OSError("Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    (report,) = import_hugectr(source.ps_json(), tmp_path / "repository")

    copy = report.version_dir / "tables/deep/emb_vector"
    assert not copy.samefile(source.table_folder(1) / "emb_vector")
    assert copy.read_bytes() == (source.table_folder(1) / "emb_vector").read_bytes()


@pytest.mark.parametrize("num_rows", [0, 1, 2, 63, 64, 65])
@pytest.mark.parametrize("fraction", [0.01, 1.0])
def test_tables_of_any_size_are_served(num_rows: int, fraction: float, tmp_path: Path) -> None:
    """HugeCTR divided by zero for small tables; here the size does not matter, whatever the cache's."""
    source = Source(tmp_path / "source", (num_rows, num_rows))
    source.model["gpucacheper"] = fraction
    (report,) = import_hugectr(source.ps_json(), tmp_path / "repository")
    expected = Evaluator(report.version_dir).predict(source.request())

    with InferenceSession.open(report.version_dir) as session:
        np.testing.assert_allclose(session.predict(source.request()), expected, atol=1e-6)


@pytest.mark.parametrize("is_wide", [False, True])
def test_keys_of_a_uint32_model_are_found_by_their_low_bits(is_wide: bool, source: Source, tmp_path: Path) -> None:
    """HugeCTR stores int64 and casts on load: -1 is found as 4294967295. Files that fit are still linked."""
    source.settings["supportlonglong"] = "false"
    if is_wide:
        source.keys[1][0] = -1
        source.write_table(1)
    (report,) = import_hugectr(source.ps_json(), tmp_path / "repository")
    found = np.fromfile(report.version_dir / "tables/deep/key", np.int64)

    assert found.tolist() == [key % 2**32 for key in source.keys[1].tolist()]
    assert (report.version_dir / "tables/deep/key").samefile(source.table_folder(1) / "key") == (not is_wide)
    assert (report.version_dir / "tables/wide/key").samefile(source.table_folder(0) / "key")
    expected = Evaluator(report.version_dir).predict(source.request("uint32"))
    with InferenceSession.open(report.version_dir) as session:
        np.testing.assert_allclose(session.predict(source.request("uint32")), expected, atol=1e-6)
        with pytest.raises(InvalidRequestError, match="'CATCOLUMN': data type int64, expected uint32"):
            session.predict(source.request("int64"))


def test_tables_alone_take_their_widths_from_their_files(source: Source, tmp_path: Path) -> None:
    """Without network_file the model is one of HPS; widths and names may be left out."""
    del source.model["network_file"], source.model["dense_file"]
    (report,) = import_hugectr(source.ps_json(), tmp_path / "repository")

    assert [(table.name, table.embedding_dim) for table in report.spec.tables] == [
        ("sparse_embedding0", 1),
        ("sparse_embedding1", 4),
    ]
    assert not (report.version_dir / "dense.onnx").exists()


def test_the_width_of_an_empty_table_must_be_given(tmp_path: Path) -> None:
    """Empty files do not give the width."""
    source = Source(tmp_path / "source", (0, 1))
    del source.model["network_file"]

    with pytest.raises(ConfigurationError, match="needs 'embedding_vecsize_per_table'"):
        import_hugectr(source.ps_json(), tmp_path / "repository")


def test_one_model_of_several_is_imported_by_name(source: Source, tmp_path: Path) -> None:
    """Or all of them; a second import is the next version, and an existing one is refused."""
    source.settings["models"].append({**source.model, "model": "other"})
    repository = tmp_path / "repository"

    assert [report.version_dir.parent.name for report in import_hugectr(source.ps_json(), repository)] == [
        "small",
        "other",
    ]
    (report,) = import_hugectr(source.ps_json(), repository, model="other")
    assert report.version_dir == repository / "other/2"
    with pytest.raises(ConfigurationError, match=r"other/2: already exists"):
        import_hugectr(source.ps_json(), repository, model="other", version=2)
    with pytest.raises(ConfigurationError, match="has no model 'none'"):
        import_hugectr(source.ps_json(), repository, model="none")


def test_all_models_are_imported_or_none(source: Source, tmp_path: Path) -> None:
    """A wrong one leaves no others behind, which a second import would take for an earlier version."""
    wrong = {**source.model, "model": "wrong", "dense_file": "nowhere.model"}
    source.settings["models"].append(wrong)
    repository = tmp_path / "repository"

    def configure(draft: Path, *_: object) -> None:
        (draft.parent / "config.pbtxt").touch()

    with pytest.raises(ModelFormatError, match=r"nowhere\.model: cannot be read"):
        import_hugectr(source.ps_json(), repository, complete=configure)
    assert not repository.exists()

    wrong["dense_file"] = source.model["dense_file"]
    reports = import_hugectr(source.ps_json(), repository, version=7, complete=configure)
    assert [report.version_dir for report in reports] == [repository / "small/7", repository / "wrong/7"]


def test_what_has_no_meaning_here_is_in_the_report(source: Source, tmp_path: Path) -> None:
    """For the caller to say once."""
    source.model.update({"num_of_worker_buffer_in_pool": "4", "colour": "blue"})
    (report,) = import_hugectr(source.ps_json(), tmp_path / "repository")

    ignored, unknown = report.notes
    assert "'models[0].num_of_worker_buffer_in_pool'" in ignored
    assert "'models[0].max_batch_size'" not in ignored
    assert unknown == "unknown fields of ps.json: 'models[0].colour'"
    assert f"Note: {unknown}" in str(report)


def test_a_report_has_no_fields_of_other_models(source: Source, tmp_path: Path) -> None:
    """A ps.json may have many models: each one's report names its own fields, and those of the whole file."""
    source.settings["models"].append({**source.model, "model": "other", "slot_num": 2, "colour": "blue"})
    source.settings["db_type"] = "local"

    reports = import_hugectr(source.ps_json(), tmp_path / "repository")

    (first,), (ignored, unknown) = (report.notes for report in reports)
    assert first == "fields of ps.json that hotrow ignores: 'db_type'"
    assert ignored == f"{first}, 'models[1].slot_num'"
    assert unknown == "unknown fields of ps.json: 'models[1].colour'"


def test_progress_is_told(source: Source, tmp_path: Path) -> None:
    """The bytes of keys and files, to fill a bar."""
    told: list[int] = []
    import_hugectr(source.ps_json(), tmp_path / "repository", progress=told.append)

    assert sum(told) > sum(keys.nbytes for keys in source.keys)


def test_statistics_named_in_ps_json_are_used(source: Source, tmp_path: Path) -> None:
    """BatchNorm needs the file that `non_trainable_params_file` names."""
    graph = GraphMaker(5, dense_dim=2, embeddings=[("wide", 2, 1), ("deep", 3, 4)])
    normal = graph.add(
        "BatchNorm", graph.add("InnerProduct", "dense", fc_param={"num_output": 1}), bn_param={"eps": 0.1}
    )
    graph.loss(normal)
    graph.write(source.folder)

    with pytest.raises(ModelFormatError, match="name their file as 'non_trainable_params_file'"):
        import_hugectr(source.ps_json(), tmp_path / "repository")
    source.model["non_trainable_params_file"] = "statistics.json"
    (report,) = import_hugectr(source.ps_json(), tmp_path / "repository")
    assert report.spec.labels == ("label",)


def _truncate(file: str, num_bytes: int) -> Callable[[Source], None]:
    return lambda source: os.truncate(source.folder / file, num_bytes)


def _set(name: str, value: Any) -> Callable[[Source], None]:
    return lambda source: source.model.update({name: value})


def _cut_graph(source: Source) -> None:
    source.graph.layers[4]["type"] = "GRU"
    source.graph.write(source.folder)


DAMAGES: list[tuple[Callable[[Source], None], type[Exception], str]] = [
    (_truncate("1_sparse.model/key", 71), ModelFormatError, "key: 71 bytes are not a whole number of int64 keys"),
    (
        _truncate("1_sparse.model/emb_vector", 140),
        ModelFormatError,
        r"140 bytes, expected 144 \(9 keys, embedding_dim 4",
    ),
    (_truncate("dense.model", 64), ModelFormatError, "dense.model: layer 6 InnerProduct"),
    (lambda source: (source.table_folder(0) / "key").unlink(), ModelFormatError, "0_sparse.model/key: cannot be read"),
    (_set("dense_file", "none.model"), ModelFormatError, "none.model: cannot be read: No such file or directory$"),
    (_set("network_file", "none.json"), ModelFormatError, "none.json: cannot be read"),
    (
        _set("sparse_files", ["0_sparse.model"]),
        ConfigurationError,
        "has 1 sparse_files, but .* has 2 tables in 2 embedding layers",
    ),
    (_set("sparse_files", ["s3://a/b", "c"]), ConfigurationError, "files cannot be read from s3:// URLs"),
    (_cut_graph, UnsupportedModelError, "layers of type 'GRU' are not supported"),
]


@pytest.mark.parametrize(("damage", "error", "expected"), DAMAGES)
def test_what_does_not_fit_is_refused_and_leaves_nothing(
    damage: Callable[[Source], None], error: type[Exception], expected: str, source: Source, tmp_path: Path
) -> None:
    """The file and what was expected of it are named; no half of a version stays."""
    damage(source)

    with pytest.raises(error, match=expected):
        import_hugectr(source.ps_json(), tmp_path / "repository")

    assert not (tmp_path / "repository").exists()
