"""DCN-v2's cross layers, however a framework exports them, are rewritten without a change of what they compute."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from inference_session.dense_engine.rewrites.cross_layers import merge_cross_layers
from tests.testing.onnx_models import model_of, rename

WIDTH, RANK = 24, 5
LAYERS = {
    "sums": "v{i} = MatMul(x{i}, V{i}) f{i} = MatMul(v{i}, W{i}) s{i} = Add(f{i}, b{i}) p{i} = Mul(x0, s{i})"
    " x{j} = Add(p{i}, x{i})",
    "turned": "v{i} = MatMul(x{i}, V{i}) f{i} = MatMul(v{i}, W{i}) s{i} = Add(b{i}, f{i}) p{i} = Mul(s{i}, x0)"
    " x{j} = Add(x{i}, p{i})",
    "linear": "v{i} = MatMul(x{i}, V{i}) s{i} = Gemm<transB = 1>(v{i}, Wt{i}, b{i}) p{i} = Mul(x0, s{i})"
    " x{j} = Add(p{i}, x{i})",
}


def weights(num_layers: int) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(0)
    arrays: dict[str, NDArray[np.float32]] = {}
    for i in range(num_layers):
        arrays[f"V{i}"] = rng.standard_normal((WIDTH, RANK), np.float32) / np.float32(5)
        arrays[f"W{i}"] = rng.standard_normal((RANK, WIDTH), np.float32) / np.float32(3)
        arrays[f"Wt{i}"] = np.ascontiguousarray(arrays[f"W{i}"].T, np.float32)
        arrays[f"b{i}"] = rng.standard_normal(WIDTH, np.float32)
    return arrays


def network(body: str, num_layers: int, *, sample: str = "") -> onnx.ModelProto:
    """From x [n, 24] to y, with the weights of layers that the body reads."""
    graph = f"g (float[n{sample}, {WIDTH}] x0) => (float[n{sample}, m] y) {{ {body} }}"
    used = {name: array for name, array in weights(num_layers).items() if re.search(rf"\b{name}\b", body)}
    return model_of(graph, used)


def answers(model: onnx.ModelProto, shape: tuple[int, ...]) -> Any:
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x0": np.random.default_rng(1).standard_normal(shape, np.float32)})[0]


def layers(kind: str, num_layers: int) -> str:
    return " ".join(LAYERS[kind].format(i=i, j=i + 1) for i in range(num_layers))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("num_layers", [1, 3])
def test_layers_compute_the_same_with_fewer_wide_passes(kind: str, num_layers: int) -> None:
    model = network(f"{layers(kind, num_layers)} y = Relu(x{num_layers})", num_layers)
    expected = answers(model, (7, WIDTH))

    assert merge_cross_layers(model) == num_layers

    assert [node.op_type for node in model.graph.node] == [*["Gemm", "Gemm", "Mul"] * num_layers, "Relu"]
    np.testing.assert_allclose(answers(model, (7, WIDTH)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "num_merged"),
    [
        ("{0} {1} y = Concat<axis = 1>(x2, v1)", 1),  # a value within the second layer has another use
        ("{0} x0b = Relu(x1) {other} y = Identity(x2)", 1),  # the second one's x0 is another value
        ("{0} {1} y = Concat<axis = 1>(x2, x1, x0)", 2),  # the ends of layers may have other uses
        ("{0} {chain} y = Identity(x2)", 2),  # a chain that begins where another one ends
    ],
)
def test_only_what_nothing_else_reads_is_rewritten(body: str, num_merged: int) -> None:
    parts = [LAYERS["sums"].format(i=i, j=i + 1) for i in range(2)]
    other = parts[1].replace("Mul(x0,", "Mul(x0b,")
    model = network(body.format(*parts, other=other, chain=parts[1].replace("Mul(x0,", "Mul(x1,")), 2)
    expected = answers(model, (3, WIDTH))

    assert merge_cross_layers(model) == num_merged

    np.testing.assert_allclose(answers(model, (3, WIDTH)), expected, rtol=1e-4, atol=1e-5)


def test_layers_of_three_dimensions_are_left_alone() -> None:
    """Gemm takes matrices only."""
    model = network(f"{layers('sums', 1)} y = Relu(x1)", 1, sample=", k")
    expected = answers(model, (2, 3, WIDTH))

    assert merge_cross_layers(model) == 0

    np.testing.assert_array_equal(answers(model, (2, 3, WIDTH)), expected)


@pytest.mark.parametrize("part", ["narrow_matrix", "ones", "wide_matrix", "narrow", "factor"])
@pytest.mark.parametrize("name", ["V0", "p1"])
def test_new_values_have_names_that_no_value_has(name: str, part: str) -> None:
    model = network(f"{layers('sums', 3)} y = Relu(x3)", 3)
    expected = answers(model, (7, WIDTH))
    rename(model, name, f"x1/{part}")

    assert merge_cross_layers(model) == 3

    np.testing.assert_allclose(answers(model, (7, WIDTH)), expected, rtol=1e-4, atol=1e-5)
