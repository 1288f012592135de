"""Graph JSON and dense files: damaged or hostile parts are named, and never crash the importer."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_session.errors import ModelFormatError, UnsupportedModelError
from inference_session.importers.hugectr.dense_weights import BatchStatistics, DenseWeights
from inference_session.importers.hugectr.graph import Graph, read_graph
from inference_session.importers.hugectr.onnx_graph import build_dense_network
from tests.testing.hugectr_graphs import GraphMaker
from tests.testing.json_places import dropping, places, setting

Document = dict[str, Any]


def document() -> Document:
    """A small graph, all parts of which can be damaged."""
    graph = GraphMaker(1, dense_dim=3, embeddings=[("emb", 2, 4), ("emb2", 1, 2)])
    wide = graph.add("Concat", ["dense", graph.add("Reshape", "emb", leading_dim=8)], "wide")
    graph.loss(graph.add("InnerProduct", wide, "logit", fc_param={"num_output": 1}))
    return {"layers": graph.layers}


def read(content: Document | str, folder: Path) -> Graph:
    path = folder / "graph.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1), encoding="utf-8")
    return read_graph(path)


def test_a_graph_is_read_in_our_words(tmp_path: Path) -> None:
    """Dense width, labels, embeddings with their slots, then the layers in order."""
    graph = read(document(), tmp_path)

    assert (graph.dense_name, graph.dense_dim) == ("dense", 3)
    assert [(e.name, e.slot_num, e.embedding_dim, e.combiner) for e in graph.embeddings] == [
        ("emb", 2, 4, "sum"),
        ("emb2", 1, 2, "sum"),
    ]
    assert [layer.type for layer in graph.layers] == ["Reshape", "Concat", "InnerProduct", "BinaryCrossEntropyLoss"]


def test_fields_of_other_times_are_no_concern(tmp_path: Path) -> None:
    """Solver, optimizer, old inference blocks, per-layer names and initializers change nothing."""
    content = document()
    content.update({"inference": {"max_batchsize": 4096}, "solver": {"lr_policy": "fixed"}})
    for layer in content["layers"]:
        layer.update({"name": "x", "optimizer": {"type": "Adam"}, "weight_init": "Zero"})

    assert len(read(content, tmp_path).layers) == 4


def test_a_key_count_may_be_a_number_or_a_list_per_slot(tmp_path: Path) -> None:
    """nnz_per_slot sizes buffers in HugeCTR; here it is only looked at for contradictions."""
    content = document()
    content["layers"][0]["sparse"][0]["nnz_per_slot"] = [3, 1]
    assert read(content, tmp_path).embeddings[0].slot_num == 2

    content["layers"][0]["sparse"][0]["nnz_per_slot"] = [3, 1, 1]
    with pytest.raises(ModelFormatError, match=r"layers\[0\].sparse\[0\].nnz_per_slot': 3 values for 2 slots"):
        read(content, tmp_path)


DAMAGES: list[tuple[Callable[[Document], None], str]] = [
    (setting("layers", value={}), "'layers': expected a list of layers, found"),
    (setting("layers", value=[]), "'layers': expected a list of layers, found"),
    (setting("layers", 3, value=7), r"'layers\[3\]': expected an object, found 7"),
    (dropping("layers", 3, "type"), r"'layers\[3\]\.type': layer 3: expected a name or a list of names, found"),
    (setting("layers", 0, "type", value="Add"), "the first layer must be of type 'Data'"),
    (dropping("layers", 0, "dense"), r"dense\.top': layer 0: expected a name or a list of names, found"),
    (
        setting("layers", 3, "top", value="\ud800"),
        r"layers\[3\]\.top': layer 3: expected a name or a list of names, found",
    ),
    (
        setting("layers", 3, "top", value=["ok", ""]),
        r"layers\[3\]\.top': layer 3: expected a name or a list of names, found",
    ),
    (setting("layers", 0, "dense", "dense_dim", value=-1), "dense_dim': layer 0 Data: found -1; allowed: whole"),
    (setting("layers", 0, "dense", "dense_dim", value=1e30), "dense_dim"),
    (setting("layers", 0, "dense", "dense_dim", value=True), "dense_dim"),
    (setting("layers", 0, "label", "label_dim", value=0), "label_dim': layer 0 Data: found 0"),
    (setting("layers", 0, "label", value={"top": ["a", "b"], "label_dim": [1]}), "2 names, but the dimensions"),
    (setting("layers", 0, "label", "top", value="dense"), "the label and the dense input need different names"),
    (setting("layers", 0, "sparse", value="x"), "sparse': layer 0 Data: expected a list, found"),
    (setting("layers", 0, "sparse", 0, value=[]), r"sparse\[0\]': expected an object, found"),
    (setting("layers", 0, "sparse", 0, "top", value="data_emb2"), "'data_emb2' is used twice"),
    (setting("layers", 0, "sparse", 0, "top", value=[1]), r"sparse\[0\].top': layer 0: expected a name"),
    (setting("layers", 0, "sparse", 0, "slot_num", value=0), "slot_num': found 0"),
    (setting("layers", 0, "sparse", 0, "slot_num", value="2"), "slot_num': found '2'"),
    (setting("layers", 1, "bottom", value="nothing"), "must be one of the sparse inputs: 'data_emb', 'data_emb2'"),
    (setting("layers", 1, "top", value=["a", "b"]), "expected one name, found"),
    (setting("layers", 2, "top", value="emb"), "the name 'emb' is used twice"),
    (dropping("layers", 1, "sparse_embedding_hparam"), "embedding_vec_size': layer 1"),
    (setting("layers", 1, "sparse_embedding_hparam", "combiner", value="max"), "found 'max'; allowed: 'sum', 'mean'"),
    (
        setting("layers", 1, "sparse_embedding_hparam", "embedding_vec_size", value=16_000_000),
        "elements are too many; at most",
    ),
    (setting("layers", 3, "bottom", value="later"), "no layer before this one produces 'later'"),
    (setting("layers", 3, "bottom", value="reshape3"), "no layer before this one produces 'reshape3'"),
    (
        setting("layers", 3, "bottom", value=[["x"]]),
        r"'layers\[3\]\.bottom': layer 3: expected a name or a list of names, found",
    ),
    (setting("layers", 4, "top", value="dense"), "the name 'dense' is used twice"),
    (setting("layers", 4, "bottom", value=["dense", "label"]), "no layer before this one produces 'label'"),
]


@pytest.mark.parametrize(("damage", "expected"), DAMAGES)
def test_a_damaged_graph_is_an_error_with_line_layer_and_field(
    damage: Callable[[Document], None], expected: str, tmp_path: Path
) -> None:
    """Wrong types, missing bottoms, loops, sizes out of range: the message says where."""
    content = document()
    damage(content)

    with pytest.raises(ModelFormatError, match=expected) as error:
        read(content, tmp_path)

    assert str(error.value).startswith(f"{tmp_path / 'graph.json'}:")


def test_an_error_names_the_line_of_the_field(tmp_path: Path) -> None:
    """The line is that of the field itself, although its name occurs in many layers."""
    content = document()
    content["layers"][5]["fc_param"]["num_output"] = "many"
    graph = read(content, tmp_path)
    lines = (tmp_path / "graph.json").read_text(encoding="utf-8").splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "many" in text)

    with pytest.raises(ModelFormatError, match=f"graph.json:{line}: field 'layers\\[5\\].fc_param.num_output'"):
        graph.layers[2].whole("fc_param", "num_output")


def test_an_embedding_behind_a_dense_layer_is_an_error(tmp_path: Path) -> None:
    """HugeCTR stops looking for embeddings at the first other layer; the importer says so."""
    content = document()
    content["layers"].insert(4, content["layers"].pop(2))

    with pytest.raises(ModelFormatError, match="embedding layers must follow the data layer directly"):
        read(content, tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "not valid JSON"),
        ("[]", "expected an object at the top, found list"),
        ('{"layers": [NaN]}', "NaN is not a number"),
        ('{"layers": ' + "[" * 100_000, "not valid JSON"),
        ('{"layers": [' + "9" * 5000 + "]}", "not valid JSON|an object is required"),
        ('{\n"layers": [1\n 2]}', ":3: not valid JSON"),
    ],
)
def test_what_is_no_json_is_an_error_with_its_line(text: str, expected: str, tmp_path: Path) -> None:
    """Broken syntax, deep nesting and endless numbers end in a message."""
    with pytest.raises(ModelFormatError, match=expected):
        read(text, tmp_path)


def test_too_many_layers_are_refused(tmp_path: Path) -> None:
    """No file makes the importer work without end."""
    content = document()
    content["layers"] += [{"type": "ReLU", "bottom": "emb", "top": "x"}] * 10_001

    with pytest.raises(ModelFormatError, match="at most 10000 are allowed"):
        read(content, tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A missing file, one that is not text, or a pipe, whose writer nobody waits for."""
    with pytest.raises(ModelFormatError, match=r"none.json: cannot be read as text: No such file or directory$"):
        read_graph(tmp_path / "none.json")
    (tmp_path / "graph.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelFormatError, match=r"graph.json: cannot be read as text"):
        read_graph(tmp_path / "graph.json")
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ModelFormatError, match=r"pipe.json: cannot be read as text: .*not a regular file"):
        read_graph(tmp_path / "pipe.json")


LOSSES: list[tuple[Document, str]] = [
    ({"bottom": ["logit"]}, r"needs a tensor and a label"),
    ({"bottom": ["label", "logit"]}, "needs a tensor and a label"),
    ({"bottom": ["wide", "label"]}, "does not match label 'label', which has 1 columns"),
    ({"bottom": ["emb", "label"]}, r"one row per sample, \[samples, columns\], found \[samples, 2, 4\]"),
]


@pytest.mark.parametrize(("change", "expected"), LOSSES)
def test_a_loss_that_does_not_fit_is_an_error(change: Document, expected: str, tmp_path: Path) -> None:
    """A loss takes a prediction, one row per sample, and a label of the same width."""
    content = document()
    content["layers"][-1].update(change)
    (tmp_path / "dense.model").write_bytes(bytes(4 * 12))

    with pytest.raises(ModelFormatError, match=expected):
        build_dense_network(read(content, tmp_path), tmp_path / "dense.model")


def test_a_label_with_two_losses_is_an_error(tmp_path: Path) -> None:
    """It would be unclear which of the two is the answer."""
    content = document()
    content["layers"].append(content["layers"][-1])
    (tmp_path / "dense.model").write_bytes(bytes(4 * 12))

    with pytest.raises(ModelFormatError, match="label 'label' already has a loss"):
        build_dense_network(read(content, tmp_path), tmp_path / "dense.model")


def test_a_graph_without_layers_predicts_nothing(tmp_path: Path) -> None:
    """Embeddings alone are a model of HPS, not of HugeCTR."""
    content = document()
    content["layers"] = content["layers"][:3]
    (tmp_path / "dense.model").write_bytes(b"")

    with pytest.raises(ModelFormatError, match="no layer produces a prediction"):
        build_dense_network(read(content, tmp_path), tmp_path / "dense.model")


def test_dense_features_that_are_not_there_cannot_be_used(tmp_path: Path) -> None:
    """With dense_dim 0 the tensor is empty."""
    content = document()
    content["layers"][0]["dense"]["dense_dim"] = 0
    (tmp_path / "dense.model").write_bytes(bytes(4 * 12))

    with pytest.raises(ModelFormatError, match="'dense' is empty, because dense_dim is 0"):
        build_dense_network(read(content, tmp_path), tmp_path / "dense.model")


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (44, "logit.*bias.*needs 1 elements from element 11 on, but only 0 of 11 are left"),
        (52, r"take 12 elements \(48 bytes\), the file has 13 \(52 bytes\)"),
        (46, "46 bytes are not a whole number of float32"),
        (0, "weight.*needs 11 elements"),
    ],
)
def test_a_dense_file_of_another_size_is_an_error(num_bytes: int, expected: str, tmp_path: Path) -> None:
    """The file holds the weights of the graph, all of them and nothing else."""
    (tmp_path / "dense.model").write_bytes(bytes(num_bytes))

    with pytest.raises(ModelFormatError, match=expected):
        build_dense_network(read(document(), tmp_path), tmp_path / "dense.model")


def test_a_dense_file_beyond_onnx_is_refused(tmp_path: Path) -> None:
    """A sparse file of 2 GB is never read."""
    with (tmp_path / "dense.model").open("wb") as file:
        file.truncate(1 << 31)

    with pytest.raises(UnsupportedModelError, match="a dense network is limited to"):
        DenseWeights(tmp_path / "dense.model")
    with pytest.raises(ModelFormatError, match="cannot be read"):
        DenseWeights(tmp_path / "none.model")


STATISTICS: list[tuple[Any, str]] = [
    ({"layers": 3}, "expected a list, found 3"),
    ({"layers": [3]}, "expected an object, found 3"),
    ({"layers": []}, "holds no statistics for layer 3 BatchNorm"),
    ({"layers": [{"mean": [1, 2], "var": [1, 1, 1]}]}, "mean': expected a list of 3 numbers"),
    ({"layers": [{"mean": [1, 2, "x"], "var": [1, 1, 1]}]}, "mean': expected a list of 3 numbers"),
    ({"layers": [{"mean": [1, 2, 3], "var": [1, -1, 1]}]}, "a variance cannot be negative"),
    ({"layers": [{"mean": [1, 2, 1e39], "var": [1, 1, 1]}]}, "too large for float32"),
    ({"layers": [{"mean": [1, 2, 10**400], "var": [1, 1, 1]}]}, "too large for float32"),
    ({"layers": [{"mean": [1, 2, 3], "var": [1, 1, 1]}] * 2}, "the graph has no BatchNorm layer for this"),
]


@pytest.mark.parametrize(("content", "expected"), STATISTICS)
def test_statistics_that_do_not_fit_are_an_error(content: Any, expected: str, tmp_path: Path) -> None:
    """Mean and variance per BatchNorm layer, of its width, as many as there are layers."""
    graph = GraphMaker(1, dense_dim=3, embeddings=[("emb", 1, 1), ("emb2", 1, 1)])
    graph.add("BatchNorm", "dense", bn_param={"eps": 1e-5, "factor": 1.0})
    graph_file, dense_file, statistics = graph.write(tmp_path)
    assert statistics is not None
    statistics.write_text(json.dumps(content), encoding="utf-8")

    with pytest.raises(ModelFormatError, match=expected):
        build_dense_network(read_graph(graph_file), dense_file, statistics)


def test_no_statistics_are_needed_where_nothing_asks_for_them() -> None:
    """A graph without BatchNorm has no such file."""
    BatchStatistics(None).finish()


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300)
@given(data=st.data(), replacement=_JSON)
def test_no_replaced_value_does_worse_than_an_error(data: st.DataObject, replacement: Any, tmp_path: Path) -> None:
    """Any value in any place of the graph gives a network, or an error of ours."""
    content = document()
    place = data.draw(st.sampled_from(list(places(content))))
    setting(*place, value=replacement)(content)
    (tmp_path / "dense.model").write_bytes(bytes(4 * 12))

    with contextlib.suppress(ModelFormatError, UnsupportedModelError):
        build_dense_network(read(content, tmp_path), tmp_path / "dense.model")
