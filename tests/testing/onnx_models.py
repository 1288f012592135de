"""Small ONNX models in ONNX's text form, and the comparison that all tests of the importer make."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper

from inference_session import InferenceSession
from inference_session.importers.onnx import import_onnx
from inference_session.importers.report import ImportReport
from tests.testing.onnx_evaluation import Arrays, evaluate, run_network

TOLERANCE = 1e-6


def model_of(graph: str, constants: Mapping[str, NDArray[Any]], opset: int = 18) -> ModelProto:
    """A model from the text of a graph, with these initializers."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> {graph}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    return model


def rename(model: ModelProto, name: str, other: str) -> None:
    """Give a value of the network, one that is not an input or output of it, another name."""
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [other if each == name else each for each in names]
    for tensor in model.graph.initializer:
        tensor.name = other if tensor.name == name else tensor.name


def table(rows: int = 1000, dim: int = 4, seed: int = 0, dtype: Any = np.float32) -> NDArray[Any]:
    """Vectors of a table."""
    return np.random.default_rng(seed).standard_normal((rows, dim)).astype(dtype)


def import_model(tmp_path: Path, model: ModelProto, **options: Any) -> ImportReport:
    """Save and import a model."""
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    return import_onnx(path, tmp_path / "repository", "m", **options)


def assert_same(report: ImportReport, original: Path, inputs: Arrays, tolerance: float = TOLERANCE) -> None:
    """The imported model answers like ONNX Runtime on the original: by the oracle, and by a session."""
    expected = run_network(original, inputs)
    assert list(expected) == [output.name for output in report.spec.outputs]
    with InferenceSession.open(report.version_dir) as session:
        answers = (evaluate(report.version_dir, inputs), session.run(inputs, list(expected)))
    for found in answers:
        for name, array in expected.items():
            assert found[name].dtype == array.dtype
            if found is answers[1] and array.ndim and not len(array):
                assert not len(found[name])  # a session does not run the network for no samples
                continue
            if array.dtype == object:
                np.testing.assert_array_equal(found[name], array, err_msg=name)
                continue
            np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


def check(tmp_path: Path, model: ModelProto, *feeds: Arrays, **options: Any) -> ImportReport:
    """Import a model, and compare its answers with the original's for each of these inputs."""
    report = import_model(tmp_path, model, **options)
    for inputs in feeds:
        assert_same(report, tmp_path / "model.onnx", inputs)
    return report


KEYS = np.array([[0, 1], [999, -1], [-1000, 7]], np.int64)
TWO_LOOKUPS = """m (int64[b, 2] keys) => (float[b, 2, 3] y) { v = Gather(w, keys)  y = MatMul(v, d) }"""


def two_lookups() -> ModelProto:
    return model_of(TWO_LOOKUPS, {"w": table(), "d": table(4, 3)})


def write_split(tmp_path: Path, threshold: int = 0) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(two_lookups(), path, save_as_external_data=True, location="model.data", size_threshold=threshold)
    return path


def redirect(path: Path, **entries: str) -> None:
    """Change the model's description of its table's external data."""
    model = onnx.load(path, load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        entry.value = entries.get(entry.key, entry.value)
    path.write_bytes(model.SerializeToString())
