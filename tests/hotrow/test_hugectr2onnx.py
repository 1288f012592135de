"""HugeCTR's converter: its ONNX files predict what the imported model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from hotrow.training import hugectr2onnx
from hotrow.training.hugectr.arguments.enums import Layer_t
from inference_session import InferenceSession
from inference_session.errors import ConfigurationError, ModelFormatError, UnsupportedModelError
from inference_session.importers.hugectr import import_hugectr
from tests.testing.hugectr_graphs import GraphMaker
from tests.testing.hugectr_source import Source

NUM_KEYS = 3
"""Keys of a slot."""


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """Two tables, whose combiners are sum and mean; keys of any size; one key twice."""
    source = Source(tmp_path / "source", num_rows=(7, 9))
    for item in source.graph.layers[0]["sparse"]:
        item["nnz_per_slot"] = NUM_KEYS
    source.graph.layers[2]["sparse_embedding_hparam"]["combiner"] = "mean"
    source.graph.write(source.folder)
    source.keys[1][:4] = [-5, 1 << 62, 40, 40]
    source.write_table(1)
    return source


def converted(source: Source, **arguments: Any) -> ort.InferenceSession:
    folder = source.folder
    hugectr2onnx.converter.convert(
        str(folder / "model.onnx"), str(folder / "graph.json"), str(folder / "dense.model"), **arguments
    )
    return ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])


def tables_of(source: Source) -> list[str]:
    return [str(source.table_folder(table)) for table in range(2)]


def served(source: Source, dense: NDArray[np.float32], keys: list[NDArray[np.int64]]) -> NDArray[np.float32]:
    """The answers of the imported model, with zeros for unknown keys."""
    source.model["default_value_for_each_table"] = [0.0, 0.0]
    (report,) = import_hugectr(source.ps_json(), source.folder / "repository")
    with InferenceSession.open(report.version_dir) as session:
        inputs = {
            "DES": dense.reshape(1, -1),
            "CATCOLUMN": np.concatenate([part for sample in zip(*keys, strict=True) for part in map(np.ravel, sample)]),
            "ROWINDEX": np.concatenate(
                [np.arange(array[..., 0].size + 1) * NUM_KEYS for array in keys], dtype=np.int32
            ),
        }
        return np.asarray(session.predict({name: array.reshape(1, -1) for name, array in inputs.items()}))


def test_a_model_with_its_tables_predicts_as_the_imported_one(source: Source) -> None:
    session = converted(source, convert_embedding=True, sparse_models=tables_of(source))
    random = np.random.default_rng(0)
    dense = random.random((16, 2), np.float32)
    keys = [
        random.choice([*known, 777, -1, 0], (16, slots, NUM_KEYS))
        for known, slots in zip(source.keys, (2, 3), strict=True)
    ]

    assert [item.name for item in session.get_inputs()] == ["dense", "data_wide", "data_deep"]
    assert [item.shape[1:] for item in session.get_inputs()] == [[2], [2, NUM_KEYS], [3, NUM_KEYS]]
    (answers,) = session.run(["label"], {"dense": dense, "data_wide": keys[0], "data_deep": keys[1]})
    np.testing.assert_allclose(answers, served(source, dense, keys).reshape(16, 1), atol=1e-6)


def test_a_model_without_its_tables_takes_vectors(source: Source) -> None:
    session = converted(source, graph_name="mine")
    inputs = {"dense": np.zeros((3, 2)), "wide": np.ones((3, 2, 1)), "deep": np.ones((3, 3, 4))}

    assert [item.name for item in session.get_inputs()] == list(inputs)
    (answers,) = session.run(None, {name: array.astype(np.float32) for name, array in inputs.items()})
    assert answers.shape == (3, 1)
    assert onnx.load(source.folder / "model.onnx").graph.name == "mine"


@pytest.mark.parametrize("convert_embedding", [False, True])
def test_dense_features_are_the_first_input_also_where_there_are_none(tmp_path: Path, convert_embedding: bool) -> None:
    """HugeCTR's scripts address inputs by position."""
    graph = hugectr_graph(tmp_path)
    arguments = {"sparse_models": [str(tmp_path / "sparse")], "convert_embedding": convert_embedding}
    hugectr2onnx.converter.convert(str(tmp_path / "model.onnx"), graph, str(tmp_path / "dense.model"), **arguments)
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])

    assert [item.name for item in session.get_inputs()] == ["dense", "data_only" if convert_embedding else "only"]
    other = np.zeros((4, 2, 1), np.int64 if convert_embedding else np.float32)
    (answers,) = session.run(None, {"dense": np.zeros((4, 0), np.float32), session.get_inputs()[1].name: other})
    np.testing.assert_array_equal(answers, np.full((4, 1), answers[0, 0]))


def hugectr_graph(folder: Path) -> str:
    """A graph without dense features, whose table is empty."""
    maker = GraphMaker(1, dense_dim=0, embeddings=[("only", 2, 1)])
    maker.loss(maker.add("InnerProduct", maker.add("Reshape", "only", leading_dim=2), fc_param={"num_output": 1}))
    maker.write(folder)
    (folder / "sparse").mkdir()
    for name in ("key", "emb_vector"):
        (folder / "sparse" / name).write_bytes(b"")
    return str(folder / "graph.json")


def test_misfits_are_refused_and_leave_no_file(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"1 sparse_models for the 2 tables of .*graph.json"):
        converted(source, convert_embedding=True, sparse_models=tables_of(source)[:1])
    with pytest.raises(ModelFormatError, match="emb_vector"):
        converted(source, convert_embedding=True, sparse_models=tables_of(source)[::-1])
    monkeypatch.setattr("hotrow.training.hugectr2onnx.converter._MAX_BYTES", 100)
    with pytest.raises(UnsupportedModelError, match=r"the tables take about \d+ bytes.*convert_embedding=False"):
        converted(source, convert_embedding=True, sparse_models=tables_of(source))
    assert not (source.folder / "model.onnx").exists()


def test_every_kind_of_layer_is_converted_or_refused() -> None:
    """As HugeCTR's own test of its converter asks."""
    names = hugectr2onnx.hugectr_loader.ONNX_LAYER_TYPES | hugectr2onnx.hugectr_loader.EXEMPTION_LAYER_TYPES
    assert names == set(Layer_t.__members__)
