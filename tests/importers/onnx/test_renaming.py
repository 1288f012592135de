"""Inputs and outputs under names that the importer was asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from inference_session import InferenceSession, onnx_graphs
from inference_session.errors import ConfigurationError
from tests.testing.onnx_evaluation import run_network
from tests.testing.onnx_models import KEYS, check, import_model, model_of, table, two_lookups

BRANCHES = """m (int64[b] keys, float[b, 4] dense, bool c) => (float[b, 4] y) {
    v = Gather(w, keys)
    y = If(c) <
        then_branch = one () => (float[b, 4] t) { t = Add(v, dense) },
        else_branch = two () => (float[b, 4] e) { e = Sub(v, dense) }
    >
}"""


def _as_exported() -> ModelProto:
    """Two outputs under names that exporters give."""
    graph = "m (int64[b, 2] keys) => (float[b, 2, 3] y, float[b] z) { v = Gather(w, keys)  y = MatMul(v, d) "
    graph += "s = ReduceSum <keepdims = 0> (v, axes)  z = Sigmoid(s) }"
    model = model_of(graph, {"w": table(), "d": table(4, 3), "axes": np.array([1, 2])})
    exported = {"y": "StatefulPartitionedCall:1", "z": "54"}
    onnx_graphs.rename(model.graph, lambda name: exported.get(name, name))
    return model


def test_everything_goes_by_the_new_names(tmp_path: Path) -> None:
    """Requests, answers, and the columns of OUTPUT0."""
    names = {"keys": "items", "54": "click", "StatefulPartitionedCall:1": "scores"}
    report = import_model(tmp_path, _as_exported(), rename=names)

    assert [tensor.name for tensor in report.spec.inputs] == ["items"]
    assert [tensor.name for tensor in report.spec.outputs] == ["scores", "click"]
    assert report.spec.labels == ("click",)
    assert "read by 'items'" in str(report)
    expected = run_network(tmp_path / "model.onnx", {"keys": KEYS})
    with InferenceSession.open(report.version_dir) as session:
        found = session.run({"items": KEYS}, ["scores", "click"])
    for old, new in names.items():
        if new in found:
            np.testing.assert_allclose(found[new], expected[old], rtol=1e-6)


def test_two_may_swap_names(tmp_path: Path) -> None:
    """Each name is free, as the other one gives it up."""
    swapped = {"54": "StatefulPartitionedCall:1", "StatefulPartitionedCall:1": "54"}
    report = import_model(tmp_path, _as_exported(), rename=swapped)

    assert [(tensor.name, len(tensor.shape)) for tensor in report.spec.outputs] == [
        ("54", 3),
        ("StatefulPartitionedCall:1", 1),
    ]


def test_branches_read_renamed_inputs(tmp_path: Path) -> None:
    """A body that captures an input captures it by its new name."""
    model = model_of(BRANCHES, {"w": table()})
    report = import_model(tmp_path, model, rename={"dense": "features"})

    arrays = {"keys": KEYS[:, 0], "dense": np.ones((3, 4), np.float32), "c": np.array(False)}
    expected = run_network(tmp_path / "model.onnx", arrays)
    arrays["features"] = arrays.pop("dense")
    with InferenceSession.open(report.version_dir) as session:
        np.testing.assert_allclose(session.run(arrays, ["y"])["y"], expected["y"], rtol=1e-6)


def test_a_context_is_given_by_its_new_name(tmp_path: Path) -> None:
    """`context` names inputs as clients do."""
    graph = "m (int64[b] user, int64[b] item) => (float[b, 4] y) { u = Gather(w, user)  i = Gather(x, item)  "
    model = model_of(graph + "y = Mul(u, i) }", {"w": table(), "x": table(seed=1)})

    report = import_model(tmp_path, model, rename={"user": "viewer"}, context=["viewer"])

    assert report.spec.context == ("viewer",)


def test_without_new_names_nothing_changes(tmp_path: Path) -> None:
    """Also where a new name is the old one."""
    check(tmp_path, two_lookups(), {"keys": KEYS}, rename={"y": "y"})


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"click": "y"}, r"model\.onnx has no input or output 'click' to rename; it has 'keys', 'y'"),
        ({"v": "click"}, "has no input or output 'v'"),
        ({"y": "keys"}, "'y' cannot be renamed to 'keys': the network has a value of that name"),
        ({"y": "w"}, "'y' cannot be renamed to 'w': the network has a value of that name"),
        ({"y": "OUTPUT0"}, "'y' cannot be renamed to 'OUTPUT0', which hotrow reserves"),
        ({"keys": "CANDIDATES"}, "'keys' cannot be renamed to 'CANDIDATES', which hotrow reserves"),
        ({"y": ""}, "'y' cannot be renamed to ''"),
        ({"keys": "x", "y": "x"}, "'keys' and 'y' cannot both be renamed to 'x'"),
    ],
)
def test_names_that_cannot_be_given(tmp_path: Path, names: dict[str, str], message: str) -> None:
    """The error says what is there, or what is in the way; nothing is imported."""
    with pytest.raises(ConfigurationError, match=message):
        import_model(tmp_path, two_lookups(), rename=names)
    assert not (tmp_path / "repository").exists()
