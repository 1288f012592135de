"""Keys that a graph counts from the end, as Keras, JAX and ports of NumPy code do, are looked up as they are given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inference_session import InferenceSession
from tests.testing.onnx_models import TOLERANCE, check, import_model, model_of, table

NUMBERS = {
    "zero": np.array(0),
    "one": np.array(1),
    "rows": np.array(1000),
    "less": np.array(999),
    "minus": np.array(-1),
    "small_zero": np.array(0, np.int32),
    "small_rows": np.array(1000, np.int32),
    "ones": np.array([[1000]]),
    "flat": np.array([-1]),
}
FEEDS = [{"k": np.array(keys)} for keys in ([[0, 1], [999, -1]], [[-1000, -999], [-1, -1]], [[5, 5]])]
WRAPS = {
    "Keras": "n = Less(k, zero) m = Add(k, rows) i = Where(n, m, k)",
    "not negative": "n = GreaterOrEqual(k, zero) m = Add(rows, k) i = Where(n, k, m)",
    "Not": "p = Less(k, zero) n = Not(p) m = Add(k, rows) i = Where(n, k, m)",
    "mirrored": "n = Greater(zero, k) m = Add(k, rows) i = Where(n, m, k)",
    "minus one": "n = LessOrEqual(k, minus) m = Add(k, rows) i = Where(n, m, k)",
    "above minus one": "n = Less(minus, k) m = Add(k, rows) i = Where(n, k, m)",
    "int32": (
        "s = Cast<to = 6>(k) n = Less(s, small_zero) m = Add(s, small_rows) w = Where(n, m, s) i = Cast<to = 7>(w)"
    ),
    "shaped": (
        "f = Reshape(k, flat) n = Less(f, zero) m = Add(f, rows) w = Where(n, m, f) h = Shape(k) i = Reshape(w, h)"
    ),
    "rows in a matrix": "n = Less(k, zero) m = Add(k, ones) i = Where(n, m, k)",
    "same casts": "c = Cast<to = 7>(k) d = Cast<to = 7>(c) n = Less(d, zero) m = Add(d, rows) i = Where(n, m, d)",
}
OTHERS = {
    "other rows": "n = Less(k, zero) m = Add(k, less) i = Where(n, m, k)",
    "other limit": "n = Less(k, one) m = Add(k, rows) z = Where(n, m, k) i = Mod(z, rows)",
    "other branch": "n = Less(k, zero) m = Add(k, rows) z = Where(n, k, m) i = Mod(z, rows)",
    "another matrix": "n = Less(k, zero) d = Mul(k, minus) m = Add(d, rows) z = Where(n, m, k) i = Mod(z, rows)",
    "Mod": "i = Mod(k, rows)",
}


@pytest.mark.parametrize("how", WRAPS)
def test_folded(tmp_path: Path, how: str) -> None:
    """A graph that adds the number of rows to negative keys needs no graph for its keys."""
    body = f"m (int64[b, 2] k) => (float[b, 2, 4] y) {{ {WRAPS[how]} v = Gather(w_t, i) y = Neg(v) }}"

    report = check(tmp_path, model_of(body, {"w_t": table(), **NUMBERS}), *FEEDS)

    assert [lookup.keys for lookup in report.spec.lookups] == ["k"]
    assert not (report.version_dir / "keys.onnx").exists()


@pytest.mark.parametrize("how", OTHERS)
def test_kept(tmp_path: Path, how: str) -> None:
    """Whatever else a graph computes of keys is computed."""
    body = f"m (int64[b, 2] k) => (float[b, 2, 4] y) {{ {OTHERS[how]} v = Gather(w_t, i) y = Neg(v) }}"

    report = check(tmp_path, model_of(body, {"w_t": table(), **NUMBERS}), {"k": np.array([[1, -1], [-999, 998]])})

    assert (report.version_dir / "keys.onnx").exists()


def test_wrapped_keys_of_another_reader(tmp_path: Path) -> None:
    """Only the row read takes the keys as they are given: others read what the graph computes."""
    body = """m (int64[b, 2] k) => (float[b, 2, 4] y, int64[b, 2] i) {
        n = Less(k, zero) m = Add(k, rows) i = Where(n, m, k) v = Gather(w_t, i) y = Neg(v) }"""

    report = check(tmp_path, model_of(body, {"w_t": table(), **NUMBERS}), *FEEDS)

    assert not (report.version_dir / "keys.onnx").exists()


def test_named_nodes(tmp_path: Path) -> None:
    """A step after the wrap that others read too is repeated under a name of its own, as ONNX Runtime demands."""
    body = """m (int64[b, 2] k) => (float[b, 2, 4] y, int64[b, 2] i) {
        s = Cast<to = 6>(k) n = Less(s, small_zero) m = Add(s, small_rows) w = Where(n, m, s) i = Cast<to = 7>(w)
        v = Gather(w_t, i) h = Shape(v) g = Neg(v) y = Reshape(g, h) }"""
    model = model_of(body, {"w_t": table(), **NUMBERS})
    for node in model.graph.node:
        node.name = f"node_{node.output[0]}"

    report = check(tmp_path, model, *FEEDS)

    assert len(report.tables) == 1


def test_keys_before_the_first_row(tmp_path: Path) -> None:
    """A key below -rows is unknown, and counted."""
    body = f"m (int64[b, 2] k) => (float[b, 2, 4] y) {{ {WRAPS['Keras']} v = Gather(w_t, i) y = Neg(v) }}"
    report = import_model(tmp_path, model_of(body, {"w_t": table(), **NUMBERS}))

    with InferenceSession.open(report.version_dir) as session:
        found = session.run({"k": np.array([[-1001, 1000], [0, -1000]])})["y"]

        np.testing.assert_array_equal(found[0], np.zeros((2, 4)))
        np.testing.assert_allclose(found[1], -table()[[0, 0]], rtol=TOLERANCE)
        assert session.stats()["tables"]["w_t"]["default_vectors"] == 2


def test_pooled_and_joined_behind_casts(tmp_path: Path) -> None:
    """Keras casts each value to the type that it has; look-ups pool and share a matrix nevertheless."""
    body = """m (int64[b, 3] k, int64[b, 1] u) => (float[b, 8] y) {
        n = Less(k, zero) m = Add(k, rows) i = Where(n, m, k) v = Gather(w_t, i)
        c = Cast<to = 1>(v) p = ReduceMean<keepdims = 0>(c, axis) d = Cast<to = 1>(p)
        o = Gather(w_u, u) e = Cast<to = 1>(o) s = Squeeze(e, axis) y = Concat<axis = -1>(d, s) }"""
    weights = {"w_t": table(), "w_u": table(seed=1), "axis": np.array([1]), **NUMBERS}
    feeds = {"k": np.array([[0, 1, -1], [999, -1000, 3]]), "u": np.array([[4], [-1]])}

    report = check(tmp_path, model_of(body, weights), feeds)

    assert [(lookup.pooling, lookup.joined) for lookup in report.spec.lookups] == [("mean", True), ("none", True)]
