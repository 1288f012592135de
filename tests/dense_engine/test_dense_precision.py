"""Dense networks in float16: as exact as docs/reference/settings.md says, float32 to the outside, or refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from inference_session import InferenceSession
from inference_session.config import SessionConfig
from inference_session.dense_engine.create import create_engine
from inference_session.dense_engine.network_file import NetworkFile
from inference_session.dense_engine.onnx import OnnxEngine
from inference_session.dense_engine.rewrites.float16 import in_float16
from inference_session.device.host import HOST
from inference_session.errors import ModelFormatError, UnsupportedModelError
from inference_session.importers.hugectr import import_hugectr
from tests.testing import small_model
from tests.testing.hugectr_source import Source

TOLERANCE = 2e-3
"""What the documentation promises of predictions, and relative to the largest of a tensor's values."""
FLOAT16 = SessionConfig(device="cpu", dense_precision="float16")
DIMS = (48, 128, 32, 1)


def weights() -> list[NDArray[np.float32]]:
    """Weights of a small click model's layers."""
    rng = np.random.default_rng(0)
    shapes = itertools.pairwise(DIMS)
    return [(rng.standard_normal(shape) * (2 / shape[0]) ** 0.5).astype(np.float32) for shape in shapes]


def write_network(path: Path, nodes: list[onnx.NodeProto], constants: dict[str, NDArray[np.float32]]) -> None:
    """A network from x [n, 48] to y, with its constants in a file of their own."""
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ("n", DIMS[0]))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ("n", None))
    graph = helper.make_graph(nodes, "dense", [x], [y], tensors)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=0)


def test_predictions_of_layers(tmp_path: Path) -> None:
    """Three layers and a sigmoid answer what float64 does within the bound, by weights of half the size."""
    path = tmp_path / "dense.onnx"
    nodes, constants, x = [], {}, "x"
    for i, matrix in enumerate(weights()):
        constants[f"w{i}"] = matrix
        nodes += [
            helper.make_node("MatMul", [x, f"w{i}"], [f"sum{i}"]),
            helper.make_node("Relu", [f"sum{i}"], [f"relu{i}"]),
        ]
        x = f"relu{i}"
    nodes[-1] = helper.make_node("Sigmoid", ["sum2"], ["y"])
    write_network(path, nodes, constants)
    inputs = np.random.default_rng(1).standard_normal((500, DIMS[0]), np.float32)
    first, second, third = (matrix.astype(float) for matrix in weights())
    expected = 1 / (1 + np.exp(-np.maximum(np.maximum(inputs @ first, 0) @ second, 0) @ third))

    engine = create_engine(path, FLOAT16, HOST)
    (found,) = engine.run({"x": inputs}, ["y"])

    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    converted = onnx.load_from_string(in_float16(NetworkFile(path)).content())
    assert {tensor.data_type for tensor in converted.graph.initializer} == {TensorProto.FLOAT16}


def test_vectors_in_float16(tmp_path: Path) -> None:
    """A network that takes an input in float16 answers bit for bit what one does that converts it, in float32; an
    input that is not named stays float32.
    """
    path = tmp_path / "dense.onnx"
    matrix = weights()[0]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("ReduceSum", ["x", "axis"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    write_network(path, nodes, {"w": matrix, "axis": np.array([1], np.int64)})
    inputs = np.random.default_rng(1).standard_normal((50, DIMS[0])).astype(np.float16)
    inputs[:, :3] = 3e4, -2e4, 1e-7
    wide, narrow = (OnnxEngine(in_float16(NetworkFile(path), names), num_threads=1) for names in ((), ("x",)))

    expected, found = (e.run({"x": x}, ["y"]) for e, x in ((wide, inputs.astype(np.float32)), (narrow, inputs)))

    assert [e.opened().get_inputs()[0].type for e in (wide, narrow)] == ["tensor(float)", "tensor(float16)"]
    np.testing.assert_array_equal(found[0], expected[0])
    assert found[0].dtype == np.float32


def test_constants_stay_finite(tmp_path: Path) -> None:
    """A constant too large for float16 becomes its largest number; one that would vanish does not become 0."""
    path = tmp_path / "dense.onnx"
    c = np.full(DIMS[0], 1, np.float32)
    c[:3] = 1e9, -1e9, 1e-12
    write_network(path, [helper.make_node("Mul", ["x", "c"], ["y"])], {"c": c})

    (tensor,) = onnx.load_from_string(in_float16(NetworkFile(path)).content()).graph.initializer

    largest, negative, smallest = numpy_helper.to_array(tensor)[:3].tolist()
    assert (largest, negative) == (65504, -65504)
    assert smallest > 0


def test_an_operator_without_float16(tmp_path: Path) -> None:
    """The load fails; the error names setting and network, and says what to do. In float32 the network loads."""
    path = tmp_path / "dense.onnx"
    nodes = [
        helper.make_node("Abs", ["x"], ["positive"]),
        helper.make_node("CDist", ["positive", "c"], ["y"], domain="com.microsoft"),
    ]
    write_network(path, nodes, {"c": np.ones((2, DIMS[0]), np.float32)})

    OnnxEngine(NetworkFile(path), num_threads=1).close()
    with pytest.raises(
        UnsupportedModelError,
        match=r"dense\.onnx: dense_precision 'float16' .*cannot be used for this network, use 'float32' or 'tf32':",
    ):
        create_engine(path, FLOAT16, HOST)


@pytest.mark.parametrize("name", ["dense.onnx", "dense.onnx.data"])
def test_damaged_files(tmp_path: Path, name: str) -> None:
    """A file that is cut off is named, as in float32."""
    path = tmp_path / "dense.onnx"
    write_network(path, [helper.make_node("Mul", ["x", "c"], ["y"])], {"c": np.ones(DIMS[0], np.float32)})
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:50])

    with pytest.raises(ModelFormatError, match="dense"):
        create_engine(path, FLOAT16, HOST)


def test_a_session_says_what_it_brings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All outputs are within the bound and keep their types, and the log says once that the processor gains nothing."""
    tables = small_model.write(tmp_path / "1")
    inputs = small_model.random_inputs(64, np.random.default_rng(2))

    with InferenceSession.open(tmp_path / "1", device="cpu", dense_precision="float16") as session:
        answer = session.run(inputs)

    for name, values in small_model.expected(tables, inputs).items():
        assert answer[name].dtype == np.float32
        np.testing.assert_allclose(answer[name], values, rtol=0, atol=TOLERANCE * max(1, np.abs(values).max()))
    assert caplog.text.count("less exact, not faster") == 1


def test_hugectr_s_networks(tmp_path: Path) -> None:
    """A network made from HugeCTR's files is computed in float16, too."""
    (report,) = import_hugectr(Source(tmp_path / "small").ps_json(), tmp_path / "repository")
    inputs = {
        "DES": np.random.default_rng(3).random((1, 8), np.float32),
        "CATCOLUMN": np.arange(20)[None],
        "ROWINDEX": np.concatenate([np.arange(9), np.arange(13)]).astype(np.int32)[None],
    }

    with (
        InferenceSession.open(report.version_dir, device="cpu") as exact,
        InferenceSession.open(report.version_dir, device="cpu", dense_precision="float16") as session,
    ):
        np.testing.assert_allclose(session.predict(inputs), exact.predict(inputs), rtol=0, atol=TOLERANCE)
