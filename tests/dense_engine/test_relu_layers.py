"""Layers with ReLU, however a framework exports them, are rewritten without a change of what they compute."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from inference_session.dense_engine.network_file import NetworkFile
from inference_session.dense_engine.rewrites.float16 import in_float16
from inference_session.dense_engine.rewrites.relu_layers import merge_relu_layers
from tests.testing.onnx_models import model_of, rename

WIDTHS = (6, 16, 12, 3)
LAYERS = {
    "Gemm": "u{i} = Gemm(x{i}, W{i}, b{i})",
    "turned Gemm": "u{i} = Gemm<transB = 1>(x{i}, Wt{i}, b{i})",
    "sum": "p{i} = MatMul(x{i}, W{i}) u{i} = Add(p{i}, b{i})",
    "turned sum": "p{i} = MatMul(x{i}, W{i}) u{i} = Add(b{i}, p{i})",
}
RELU = "x{j} = Relu(u{i})"


def weights(scale: float) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(0)
    arrays = {}
    for i, (rows, columns) in enumerate(itertools.pairwise(WIDTHS)):
        arrays[f"W{i}"] = rng.standard_normal((rows, columns), np.float32) / np.float32(np.sqrt(rows))
        arrays[f"Wt{i}"] = np.ascontiguousarray(arrays[f"W{i}"].T)
        arrays[f"b{i}"] = rng.standard_normal(columns, np.float32) * np.float32(scale)
    return arrays


def network(body: str, *, sample: str = "", scale: float = 1) -> onnx.ModelProto:
    """From x0 [n, 6] to y."""
    used = {name: array for name, array in weights(scale).items() if re.search(rf"\b{name}\b", body)}
    return model_of(f"g (float[n{sample}, {WIDTHS[0]}] x0) => (float[n{sample}, m] y) {{ {body} }}", used)


def layers(kind: str) -> str:
    steps = [LAYERS[kind].format(i=i) + " " + RELU.format(i=i, j=i + 1) for i in range(2)]
    return " ".join([*steps, LAYERS[kind].format(i=2), "y = Sigmoid(u2)"])


def answers(model: onnx.ModelProto | bytes, shape: tuple[int, ...]) -> Any:
    if not isinstance(model, bytes):
        onnx.checker.check_model(model)
    content = model if isinstance(model, bytes) else model.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return session.run(None, {"x0": np.random.default_rng(1).standard_normal(shape, np.float32)})[0]


def with_bias(model: onnx.ModelProto, bias: float) -> onnx.ModelProto:
    """Give the first layer this bias for all its values."""
    (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name == "b0")
    tensor.CopyFrom(numpy_helper.from_array(np.full(WIDTHS[1], bias, np.float32), "b0"))
    return model


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_compute_the_same_without_passes_for_biases(kind: str) -> None:
    model = network(layers(kind))
    expected = answers(model, (7, WIDTHS[0]))

    assert merge_relu_layers(model) == 2

    product, *last = ["Gemm"] if "Gemm" in kind else ["MatMul", "Add"]
    assert [node.op_type for node in model.graph.node] == [*[product, "Max"] * 2, product, *last, "Sigmoid"]
    np.testing.assert_allclose(answers(model, (7, WIDTHS[0])), expected, rtol=1e-5, atol=1e-6)


def test_values_of_three_dimensions() -> None:
    model = network(layers("sum"), sample=", k")
    expected = answers(model, (2, 3, WIDTHS[0]))

    assert merge_relu_layers(model) == 2

    np.testing.assert_allclose(answers(model, (2, 3, WIDTHS[0])), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "num_merged"),
    [
        ("{0} {1} y = Concat<axis = 1>(x1, u1)", 0),  # what ReLU computes has another use
        ("{0} {1} y = Concat<axis = 1>(u0, u1)", 0),  # and what it reads
        ("{0} {1} z = Relu(u1) y = Concat<axis = 1>(u1, z)", 1),  # the end may have other uses
        ("{0} y = MatMul(x1, W1)", 0),  # no bias to add to
        ("p0 = MatMul(x0, W0) x1 = Relu(p0) {1} y = Identity(u1)", 0),
        ("{0} t = Tanh(x1) p1 = MatMul(t, W1) y = Add(p1, b1)", 0),
        ("u0 = Gemm<alpha = 2.0>(x0, W0, b0) x1 = Relu(u0) {1} y = Identity(u1)", 0),
        ("{0} u1 = Gemm<alpha = 2.0>(x1, W1, b1) y = Identity(u1)", 0),
    ],
)
def test_only_what_nothing_else_reads_is_rewritten(body: str, num_merged: int) -> None:
    first = LAYERS["Gemm"].format(i=0) + " " + RELU.format(i=0, j=1)
    model = network(body.format(first, LAYERS["Gemm"].format(i=1)))
    expected = answers(model, (3, WIDTHS[0]))

    assert merge_relu_layers(model) == num_merged

    np.testing.assert_allclose(answers(model, (3, WIDTHS[0])), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bias", [-np.inf, np.nan, 3e4, 10])
def test_large_biases_are_left_alone(bias: float) -> None:
    """Other layers have others."""
    assert merge_relu_layers(with_bias(network(layers("Gemm")), bias)) == 1


def test_biases_of_values_that_are_0_add_no_rounding_errors(tmp_path: Path) -> None:
    model = with_bias(network(layers("Gemm").replace("y = Sigmoid(u2)", "y = Identity(u2)")), -100)
    onnx.save(model, tmp_path / "m.onnx")

    found = answers(in_float16(NetworkFile(tmp_path / "m.onnx")).content(), (500, 6))

    np.testing.assert_allclose(found, answers(model, (500, 6)), rtol=2e-3, atol=4e-3)


@pytest.mark.parametrize(
    ("name", "taken"), [("W0", "x1/least"), ("b2", "x1/next_bias"), ("u1", "x1/least"), ("x2", "x2/least")]
)
def test_new_constants_have_names_that_no_value_has(name: str, taken: str) -> None:
    model = network(layers("Gemm"))
    expected = answers(model, (7, WIDTHS[0]))
    rename(model, name, taken)

    assert merge_relu_layers(model) == 2

    np.testing.assert_allclose(answers(model, (7, WIDTHS[0])), expected, rtol=1e-5, atol=1e-6)


def test_operators_whose_largest_of_two_takes_no_float16_are_left_alone() -> None:
    model = network(layers("Gemm"))
    model.opset_import[0].version = 11

    assert merge_relu_layers(model) == 0


@pytest.mark.parametrize("scale", [0, 0.1, 1, 10, 100])
def test_a_network_in_float16_has_them_merged_and_is_as_exact(tmp_path: Path, scale: float) -> None:
    model = network(layers("Gemm").replace("y = Sigmoid(u2)", "y = Identity(u2)"), scale=scale)
    onnx.save(model, tmp_path / "m.onnx")

    content = in_float16(NetworkFile(tmp_path / "m.onnx")).content()

    is_merged = "Relu" not in {node.op_type for node in onnx.load_from_string(content).graph.node}
    assert is_merged == (scale <= 1)  # else they are large
    np.testing.assert_allclose(answers(content, (500, 6)), answers(model, (500, 6)), rtol=2e-3, atol=4e-3 * (1 + scale))
