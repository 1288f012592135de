"""Dense networks in bfloat16: as exact as docs/reference/settings.md says, divided correctly, or refused."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from inference_session import InferenceSession
from inference_session.config import SessionConfig
from inference_session.dense_engine import openvino
from inference_session.dense_engine.create import check_precision, create_engine
from inference_session.dense_engine.network_file import NetworkFile
from inference_session.dense_engine.onnx import OnnxEngine
from inference_session.dense_engine.openvino import OpenVinoEngine
from inference_session.dense_engine.rewrites.layers import divide_layers
from inference_session.device.host import HOST
from inference_session.errors import ConfigurationError, ModelFormatError, SessionClosedError, UnsupportedModelError
from tests.testing import small_model
from tests.testing.onnx_evaluation import run_network
from tests.testing.onnx_models import import_model, model_of, table

TOLERANCE = 1e-2
"""What the documentation promises of predictions, and relative to the largest of a tensor's values."""
BFLOAT16 = SessionConfig(device="cpu", dense_precision="bfloat16")


def drawn(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Weights of a layer."""
    rng = np.random.default_rng([seed, *shape])
    return (rng.standard_normal(shape) * (2 / shape[0]) ** 0.5).astype(np.float32)


CONSTANTS = {
    "w": drawn(24, 16),
    "v": drawn(16, 24),
    "b": drawn(24),
    "square": drawn(24, 24),
    "one": np.array([1], np.int64),
    "two": np.array([2], np.int64),
    "zero": np.array([0], np.int64),
    "columns": np.array([3, -1, 0], np.int64),
    "outside": np.array([3, 24], np.int64),
    "rows": np.array([-1, 24], np.int64),
    "fours": np.array([0, -1, 4], np.int64),
    "halves": np.array([-1, 12], np.int64),
    "whole": np.array([1, 24], np.int64),
    "scale": np.array(0.5, np.float32),
    "three": drawn(3, 24),
    "minus": np.array([-1], np.int64),
}
X, XY, IDS = "float[n, 24] x", "float[n, 24] x, float[n, 24] z", "float[n, 24] x, int64[n, 3] ids"
DEEP, OPEN = "float[n, 6, 4] x", "float[n, k] x"
# By name: inputs, nodes that compute y, matrix products in the layers, and in the network.
NETWORKS = {
    "layers": (X, "a = MatMul(x, w) r = Relu(a) y = MatMul(r, v)", 2, 2),
    "gemm": (X, "a = Gemm(x, w) r = Sigmoid(a) y = Gemm<transB = 1>(r, w)", 2, 2),
    "transposed": (X, "t = Transpose<perm = [1, 0]>(w) u = MatMul(x, w) y = MatMul(u, t)", 2, 2),
    "gemm of columns": (X, "t = Transpose<perm = [1, 0]>(x) y = Gemm<transA = 1>(t, square)", 0, 1),
    "cross": (XY, "a = MatMul(x, square) c = Add(a, b) m = Mul(c, z) y = Add(m, x)", 1, 1),
    "interaction": (
        DEEP,
        "t = Transpose<perm = [0, 2, 1]>(x) p = MatMul(x, t) f = Flatten(p) y = Gather<axis = 1>(f, columns)",
        1,
        1,
    ),
    "negative axis": (X, "a = MatMul(x, w) y = Gather<axis = -1>(a, columns)", 1, 1),
    "attention": (
        DEEP,
        "t = Transpose<perm = [0, 2, 1]>(x) p = MatMul(x, t) s = Softmax(p) m = MatMul(s, x) y = ReduceSum(m, one)",
        2,
        2,
    ),
    "factorization": (
        DEEP,
        "s = ReduceSum<keepdims = 0>(x, one) f = Flatten(x) a = MatMul(f, square) y = Concat<axis = 1>(a, s)",
        1,
        1,
    ),
    "reshapes": (X, "a = MatMul(x, square) r = Reshape(a, fours) t = Mul(r, r) y = Reshape(t, rows)", 1, 1),
    "reshape by shape": (
        DEEP,
        "s = Shape(x) n = Gather(s, zero) t = Concat<axis = 0>(n, minus) f = Reshape(x, t) y = MatMul(f, square)",
        1,
        1,
    ),
    "more samples": (X, "r = Reshape(x, halves) m = Mul(r, r) s = Reshape(m, rows) y = MatMul(s, square)", 1, 1),
    "more samples behind": (X, "s = MatMul(x, square) r = Reshape(s, halves) y = Mul(r, r)", 0, 1),
    "normalized": (X, "a = MatMul(x, w) n = LayerNormalization(a, ones16, ones16) y = MatMul(n, v)", 2, 2),
    "split": (X, "c, d = Split<axis = 1, num_outputs = 2>(x) m = Mul(c, d) y = Gemm(m, half)", 1, 1),
    "slice": (X, "s = Slice(x, one, two, one) a = MatMul(x, square) y = Mul(a, s)", 1, 1),
    "slice of samples": (X, "s = Slice(x, zero, minus, zero) y = MatMul(s, square)", 1, 1),
    "constants over samples": (X, "a = MatMul(x, square) y = Add(a, whole_rows)", 1, 1),
    "sums over samples": (X, "m = ReduceMean(x, zero) a = MatMul(x, square) y = Add(a, m)", 0, 1),
    "softmax of samples": (X, "s = Softmax<axis = 0>(x) y = MatMul(s, square)", 1, 1),
    "a table": (
        IDS,
        "e = Gather(three, ids) f = ReduceSum<keepdims = 0>(e, one) p = MatMul(f, w) y = MatMul(p, v)",
        2,
        2,
    ),
    "ranks": (X, "a = MatMul(x, square) i = TopK(a, one) y = Identity(i)", 0, 1),
    "a mask": (X, "a = MatMul(x, square) c = Cast<to = 9>(a) d = Cast<to = 1>(c) y = MatMul(d, square)", 1, 2),
    "open sizes": (OPEN, "p = Transpose<perm = [1, 0]>(x) y = MatMul(x, p)", 0, 1),
    "no products": (X, "y = Relu(x)", 0, 0),
}


def network(name: str) -> onnx.ModelProto:
    """A network from x, and z or ids, to y."""
    inputs, nodes, *_ = NETWORKS[name]
    constants = {
        **CONSTANTS,
        "ones16": np.ones(16, np.float32),
        "half": drawn(12, 5),
        "whole_rows": drawn(1, 24),
    }
    text = nodes.replace("i = TopK(a, one)", "i, j = TopK(a, one)")
    model = model_of(f"g ({inputs}) => (y) {{ {text} }}", {k: v for k, v in constants.items() if k in text})
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return model


def drawn_for(model: onnx.ModelProto, num_samples: int) -> dict[str, NDArray[np.generic]]:
    """Inputs of a network; ids are rows of the table `three`."""
    rng = np.random.default_rng(num_samples)
    values: dict[str, NDArray[np.generic]] = {}
    for value in model.graph.input:
        dims = [dim.dim_value or 24 for dim in value.type.tensor_type.shape.dim]
        shape = (num_samples, *dims[1:])
        values[value.name] = (
            rng.integers(-3, 3, shape) if value.name == "ids" else rng.standard_normal(shape).astype(np.float32)
        )
    return values


@pytest.mark.parametrize("name", NETWORKS)
def test_divided_networks(tmp_path: Path, bfloat16: None, name: str) -> None:
    """A network in two parts answers what ONNX Runtime does, with as many products in bfloat16 as possible."""
    path, model = tmp_path / "dense.onnx", network(name)
    onnx.save(model, path)
    exact, engine = OnnxEngine(NetworkFile(path), num_threads=1), OpenVinoEngine(NetworkFile(path), num_threads=1)

    for num_samples in (4, 1, 70, 4):
        inputs = drawn_for(model, num_samples)
        (wanted,), (found,) = exact.run(inputs, ["y"]), engine.run(inputs, ["y"])
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2 * TOLERANCE * np.abs(wanted).max(initial=1))
    assert (engine.num_products, engine.num_all_products) == NETWORKS[name][2:]


def test_columns_outside(tmp_path: Path) -> None:
    """A constant Gather of a column that no sample has is left to ONNX Runtime, which refuses it."""
    constants = {"square": CONSTANTS["square"], "outside": CONSTANTS["outside"]}
    model = model_of("g (float[n, 24] x) => (y) { a = MatMul(x, square) y = Gather<axis = 1>(a, outside) }", constants)

    assert divide_layers(model).layers is None


@pytest.mark.parametrize("widths", [(48, 128, 32, 1), (416, 512, 256, 1), (104, 64, 1)])
def test_predictions(tmp_path: Path, bfloat16: None, widths: tuple[int, ...]) -> None:
    """Layers and a sigmoid answer what float64 does within the bound."""
    layers = [drawn(*shape) for shape in itertools.pairwise(widths)]
    text = "".join(f"a{i} = MatMul(r{i}, w{i}) r{i + 1} = Relu(a{i}) " for i in range(len(layers)))
    graph = f"g (float[n, {widths[0]}] r0) => (float[n, 1] y) {{ {text} y = Sigmoid(a{len(layers) - 1}) }}"
    path = tmp_path / "dense.onnx"
    onnx.save(model_of(graph, {f"w{i}": layer for i, layer in enumerate(layers)}), path)
    inputs = np.random.default_rng(1).standard_normal((2000, widths[0]), np.float32)
    expected = inputs.astype(float)
    for layer in layers[:-1]:
        expected = np.maximum(expected @ layer, 0)

    (found,) = create_engine(path, BFLOAT16, HOST).run({"r0": inputs}, ["y"])

    np.testing.assert_allclose(found, 1 / (1 + np.exp(-expected @ layers[-1])), rtol=0, atol=TOLERANCE)


def test_bound_layers(tmp_path: Path, bfloat16: None) -> None:
    """A network of layers alone is bound to memory; each run answers for the present content of the memory."""
    path = tmp_path / "dense.onnx"
    onnx.save(network("cross"), path)
    engine = OpenVinoEngine(NetworkFile(path), num_threads=1)
    places = {name: np.zeros((9, 24), np.float32) for name in ("x", "z")}
    bound = engine.bind(places, ["y"])
    assert bound is not None

    answers, wanted = [], []
    for seed in range(3):
        for name, place in bound.inputs.items():
            assert place is places[name]
            place[...] = drawn(9, 24, seed=seed)
        answers += bound.run()
        wanted += engine.run({name: place.copy() for name, place in places.items()}, ["y"])
    np.testing.assert_array_equal(answers, wanted)
    engine.close()
    with pytest.raises(SessionClosedError):
        engine.run(places, ["y"])


def test_sessions(tmp_path: Path, bfloat16: None) -> None:
    """A session's predictions are within the bound, for one request and for several that are joined."""
    graph = (
        "g (int64[n, 8] ids, float[n, 4] dense) => (float[n, 1] click)"
        " { e = Gather(emb, ids) f = Flatten(e) x = Concat<axis = 1>(f, dense) a = MatMul(x, w0) b = Relu(a)"
        " y = MatMul(b, w1) click = Sigmoid(y) }"
    )
    model = model_of(graph, {"emb": table(), "w0": drawn(36, 64), "w1": drawn(64, 1)})
    report = import_model(tmp_path, model)
    rng = np.random.default_rng(2)
    requests = [
        {"ids": rng.integers(0, 1000, (n, 8)), "dense": rng.standard_normal((n, 4), np.float32)} for n in (1, 64, 7)
    ]

    with InferenceSession.open(report.version_dir, device="cpu", dense_precision="bfloat16", warm_up_s=5) as session:
        for inputs in requests:
            wanted = run_network(tmp_path / "model.onnx", inputs)["click"]
            np.testing.assert_allclose(session.predict(inputs), wanted, rtol=0, atol=TOLERANCE)


def test_a_session_says_what_it_brings(tmp_path: Path, bfloat16: None, caplog: pytest.LogCaptureFixture) -> None:
    """The log says how much of a network is computed in bfloat16; it is a warning if nothing is."""
    caplog.set_level("INFO")
    tables = small_model.write(tmp_path / "1")
    inputs = small_model.random_inputs(64, np.random.default_rng(2))

    with InferenceSession.open(tmp_path / "1", device="cpu", dense_precision="bfloat16") as session:
        answer = session.run(inputs)

    for name, values in small_model.expected(tables, inputs).items():
        np.testing.assert_allclose(answer[name], values, rtol=0, atol=TOLERANCE * max(1, np.abs(values).max()))
    (record,) = [each for each in caplog.records if "matrix products in bfloat16" in each.message]
    assert record.levelname == ("INFO" if "OpenVINO computes 1 of 1" in record.message else "WARNING")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load fails, and says what to install."""
    small_model.write(tmp_path / "1")
    openvino.openvino_core.cache_clear()
    monkeypatch.setitem(sys.modules, "openvino", None)

    with pytest.raises(ConfigurationError, match=r"'bfloat16', use 'float32': .* pip install 'hotrow\[openvino\]'"):
        InferenceSession.open(tmp_path / "1", device="cpu", dense_precision="bfloat16")


def test_a_processor_without_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load fails, and names the instructions."""

    class Core:
        def get_property(self, device: str, name: str) -> list[str]:
            return ["FP32", "INT8"]

    small_model.write(tmp_path / "1")
    monkeypatch.setattr(openvino, "openvino_core", Core)

    with pytest.raises(ConfigurationError, match=r"'float32': this processor has no instructions .*avx512_bf16"):
        InferenceSession.open(tmp_path / "1", device="cpu", dense_precision="bfloat16")


def test_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for processors: on a GPU the load fails, also if device is auto, and names the precisions for GPUs."""
    monkeypatch.setattr(type(HOST), "name", "cuda:0")
    gpu = type(HOST)()

    with pytest.raises(ConfigurationError, match=r"on cuda:0.* device=cpu, or use 'tf32' or 'float16'"):
        check_precision(BFLOAT16, gpu)
    check_precision(SessionConfig(dense_precision="float16"), gpu)
    check_precision(BFLOAT16, HOST)


@pytest.mark.parametrize("name", ["dense.onnx", "dense.onnx.data"])
def test_damaged_files(tmp_path: Path, bfloat16: None, name: str) -> None:
    """A file that is cut off is named, as in float32."""
    path = tmp_path / "dense.onnx"
    model = network("layers")
    onnx.save(model, path, save_as_external_data=True, location="dense.onnx.data", size_threshold=0)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:50])

    with pytest.raises(ModelFormatError, match=r"dense\.onnx"):
        create_engine(path, BFLOAT16, HOST)


def test_shapes_that_contradict_each_other(tmp_path: Path, bfloat16: None) -> None:
    """The load fails; the error names setting and network, and says what to do."""
    path = tmp_path / "dense.onnx"
    onnx.save(model_of("g (float[n, 25] x) => (y) { y = MatMul(x, w) }", {"w": drawn(24, 16)}), path)

    with pytest.raises(UnsupportedModelError, match=r"dense\.onnx: dense_precision 'bfloat16' .* use 'float32'"):
        create_engine(path, BFLOAT16, HOST)
