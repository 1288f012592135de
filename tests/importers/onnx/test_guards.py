"""Requests with empty lists, where ONNX Runtime's own operators would end the process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from inference_session import InferenceSession
from tests.testing.onnx_models import check, import_model, model_of, table

WIDTH = 4
IDS = np.array([[1, 2, 3], [999, 0, 7]])


def _recurrent(op_type: str) -> str:
    given = f"float[length, 1, batch, {WIDTH}] states, float[1, batch, {WIDTH}] last"
    outputs = "states, last, cells" if op_type == "LSTM" else "states, last"
    return f"""g (int64[batch, length] hist) => ({given}) {{
        vectors = Gather(table, hist)
        steps = Transpose <perm=[1, 0, 2]> (vectors)
        {outputs} = {op_type} <hidden_size={WIDTH}> (steps, weights, recurrences)
    }}"""


@pytest.mark.parametrize(("op_type", "num_gates"), [("GRU", 3), ("LSTM", 4)])
def test_recurrent_networks_of_no_steps_or_samples(tmp_path: Path, op_type: str, num_gates: int) -> None:
    """A GRU or LSTM over an empty history stays in its first state, and without samples gives nothing."""
    random = np.random.default_rng(0)
    constants = {
        "table": table(dim=WIDTH),
        "weights": random.standard_normal((1, num_gates * WIDTH, WIDTH)).astype(np.float32),
        "recurrences": random.standard_normal((1, num_gates * WIDTH, WIDTH)).astype(np.float32),
    }
    model = model_of(_recurrent(op_type), constants)

    report = check(tmp_path, model, {"hist": IDS}, {"hist": IDS[:1, :1]})

    with InferenceSession.open(report.version_dir) as session:
        no_steps = session.run({"hist": IDS[:, :0]})
        no_samples = session.run({"hist": IDS[:0]})
    assert no_steps["states"].shape == (0, 1, 2, WIDTH)
    np.testing.assert_array_equal(no_steps["last"], np.zeros((1, 2, WIDTH), np.float32))
    assert no_samples["states"].shape == (3, 1, 0, WIDTH)
    assert no_samples["last"].shape == (1, 0, WIDTH)


@pytest.mark.parametrize("num_samples", [0, 2])
@pytest.mark.parametrize("length", [0, 3])
def test_sums_of_products_over_empty_lists(tmp_path: Path, num_samples: int, length: int) -> None:
    """Einsum over an empty history gives zeros, as it does in NumPy."""
    mixing = np.random.default_rng(1).standard_normal((2, 3)).astype(np.float32)
    model = model_of(
        """g (int64[batch, length] hist, float[heads, length] weights) => (float[batch, heads, 4] y) {
            vectors = Gather(table, hist)
            y = Einsum <equation="ik, bkd -> bid"> (weights, vectors)
        }""",
        {"table": table(dim=WIDTH)},
    )
    report = import_model(tmp_path, model)
    hist, weights = IDS[:num_samples, :length], mixing[:, :length]

    with InferenceSession.open(report.version_dir) as session:
        found = session.run({"hist": hist, "weights": weights})["y"]

    np.testing.assert_allclose(found, np.einsum("ik,bkd->bid", weights, table(dim=WIDTH)[hist]), rtol=1e-6, atol=1e-6)


def test_features_of_no_samples(tmp_path: Path) -> None:
    """ONNX-ML's FeatureVectorizer gives rows of all features, none for no samples."""
    model = model_of(
        """g (double[n, 2] x, double[n, 2] d, int64[m] keys) => (float[n, 4] y, float[m, 4] z) {
            z = Gather(table, keys)  y = ai.onnx.ml.FeatureVectorizer <inputdimensions = [2, 2]> (x, d)
        }""",
        {"table": table(dim=WIDTH)},
    )
    model.opset_import.add(domain="ai.onnx.ml", version=3)
    inputs = {"x": np.ones((3, 2)), "d": np.full((3, 2), 2.0), "keys": IDS[0, :2]}

    report = check(tmp_path, model, inputs)

    with InferenceSession.open(report.version_dir) as session:
        found = session.run({"x": inputs["x"][:0], "d": inputs["d"][:0], "keys": IDS[0, :1]})
    assert found["y"].shape == (0, 4)
    assert found["y"].dtype == np.float32
    np.testing.assert_array_equal(found["z"], table(dim=WIDTH)[IDS[0, :1]])


def test_models_that_meet_no_empty_lists_are_left_alone(tmp_path: Path) -> None:
    """Branches would keep a network from being a CUDA graph."""
    model = model_of(
        """g (int64[batch, 3] hist, float[batch, 4] user) => (float[batch, 3] y) {
            vectors = Gather(table, hist)
            y = Einsum <equation="bd,bkd->bk"> (user, vectors)
        }""",
        {"table": table(dim=WIDTH)},
    )
    user = np.ones((2, WIDTH), np.float32)

    report = check(tmp_path, model, {"hist": IDS, "user": user})

    network = onnx.load(report.version_dir / "dense.onnx")
    assert "If" not in [node.op_type for node in network.graph.node]


@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize(
    "sums",
    [
        "columns = Transpose <perm=[0, 2, 1]> (large)  y = MatMul(columns, weights)",
        (
            "rows = Transpose <perm=[0, 2, 1]> (weights)  columns = Transpose <perm=[0, 2, 1]> (large) "
            "back = Relu(columns)  again = Transpose <perm=[0, 2, 1]> (back)  z = MatMul(rows, again) "
            "y = Transpose <perm=[0, 2, 1]> (z)"
        ),
        "weighted = Mul(large, weights)  SUM(weighted)",
    ],
    ids=["left", "right", "sum"],
)
def test_what_is_summed_over_no_list_is_zero(tmp_path: Path, sums: str, opset: int) -> None:
    """Attention over an empty history does not read what the last request left in memory."""
    reduce = "ReduceSum <axes=[-2]> (weighted)" if opset < 13 else "ReduceSum(weighted, axis)"
    sums = sums.replace("SUM(weighted)", f"z = {reduce}  y = Transpose <perm=[0, 2, 1]> (z)")
    model = model_of(
        f"""g (int64[batch, length] hist, float[batch, length, 1] weights) => (float[batch, 4, 1] y) {{
            vectors = Gather(table, hist)  large = Exp(vectors)  {sums} }}""",
        {"table": table(), "axis": np.array([-2])},
        opset=opset,
    )
    inputs = {"hist": IDS, "weights": np.full((2, 3, 1), 7.5, np.float32)}

    report = check(tmp_path, model, inputs)

    with InferenceSession.open(report.version_dir) as session:
        for _ in range(3):
            session.run(inputs)
            answer = session.run({name: array[:, :0] for name, array in inputs.items()})
            np.testing.assert_array_equal(answer["y"], np.zeros((2, 4, 1), np.float32))


def test_products_of_known_length_are_left_alone(tmp_path: Path) -> None:
    """ONNX Runtime computes those together with a transposition, which is faster."""
    model = model_of(
        """g (int64[batch, length] hist) => (float[batch, length, length] y) {
            vectors = Gather(table, hist)  columns = Transpose <perm=[0, 2, 1]> (vectors)
            y = MatMul(vectors, columns) }""",
        {"table": table()},
    )

    report = check(tmp_path, model, {"hist": IDS})

    network = onnx.load(str(report.version_dir / "dense.onnx"))
    assert [node.op_type for node in network.graph.node] == ["Transpose", "MatMul"]
