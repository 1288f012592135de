"""Models that look along the samples: each request is answered as by the original alone, whatever is divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference_session.errors import ConfigurationError, UnsupportedModelError
from tests.testing.onnx_models import import_model, model_of, table
from tests.testing.ranking import DIM, check_ranking, matrix, requests

SHAPES: dict[str, tuple[int, ...]] = {"u_f": (4,), "v_f": (4,)}
CONSTANTS: dict[str, Any] = {
    "zero": np.array([0]),
    "scale": matrix(4),
    "shift": matrix(4, seed=8),
    "var": np.abs(matrix(4)) + 0.5,
    "limit": np.array(1.5, np.float32),
}
ALONG_SAMPLES = {
    "mean of the context": "m = ReduceMean<axes = [0], keepdims = 1>(u_f)  c = Sub(u_f, m)  y = Mul(c, v_f)",
    "mean of the candidates": "m = ReduceMean<axes = [0], keepdims = 1>(v_f)  c = Sub(v_f, m)  y = Mul(c, u_f)",
    "mean of the candidates, of the context": """m = ReduceMean<axes = [0], keepdims = 1>(v_f)  c = Sub(u_f, m)
        y = Tanh(c)""",
    "softmax over the samples": "s = Softmax<axis = 0>(u_f)  y = Mul(s, v_f)",
    "running sum over the samples": "s = CumSum(u_f, first)  y = Mul(s, v_f)",
    "number of samples": """n = Shape(u_f) k = Gather<axis = 0>(n, zero) f = Cast<to = 1>(k) d = Div(u_f, f)
        y = Mul(d, v_f)""",
    "scores of all samples": "t = Transpose<perm = [1, 0]>(u_f) s = MatMul(v_f, t) y = MatMul(s, u_f)",
    "training": """y0, mean1, var1 = BatchNormalization<training_mode = 1>(u_f, scale, shift, shift, var)
        y = Mul(y0, v_f)""",
    "a branch on a maximum": """m = ReduceMax<keepdims = 0>(u_f)
        large = Greater(m, limit)
        c = If(large) <
            then_branch = g1 () => (float[n, 4] a) { a = Neg(u_f) },
            else_branch = g2 () => (float[n, 4] b) { b = Identity(u_f) }
        >
        y = Mul(c, v_f)""",
}


@pytest.mark.parametrize("kind", ALONG_SAMPLES)
def test_models_that_look_along_the_samples(tmp_path: Path, kind: str) -> None:
    """Answers are the original's for the request alone: nothing is cut, padded or joined that could change them."""
    text = f"g (float[n, 4] u_f, float[n, 4] v_f) => (float[n, 4] y) {{ {ALONG_SAMPLES[kind]} }}"
    model = model_of(text, {**CONSTANTS, "first": np.array(0)}, opset=17)

    report = check_ranking(tmp_path, model, ["u_f"], *requests(**SHAPES))

    assert report.spec.ranking is not None
    assert not report.spec.ranking.may_pad
    assert not report.spec.joinable
    assert "may mix samples" in str(report)


def test_a_model_whose_samples_are_apart_is_joined(tmp_path: Path) -> None:
    """The counterexample: statistics of the training, sums over other axes, sizes that are no number of samples."""
    text = """g (float[n, 4] u_f, float[n, 4] v_f) => (float[n, 4] y) {
        b = BatchNormalization(u_f, scale, shift, shift, var)
        s = ReduceSum<keepdims = 1>(b, last)
        shape = Shape(v_f)
        k = Gather<axis = 0>(shape, last)
        f = Cast<to = 1>(k)
        d = Div(s, f)
        y = Mul(d, v_f)
    }"""
    model = model_of(text, {**CONSTANTS, "last": np.array([-1])}, opset=17)
    report = check_ranking(tmp_path, model, ["u_f"], *requests(**SHAPES))
    assert report.spec.joinable
    assert report.spec.ranking is not None
    assert report.spec.ranking.may_pad
    assert report.spec.ranking.tiled == ()


PLAIN = "g (int64[n] u, int64[n] v) => (float[n, 4] y) { a = Gather(items, u) b = Gather(items, v) y = Mul(a, b) }"


def test_what_cannot_be_a_context_is_refused(tmp_path: Path) -> None:
    """Unknown inputs, all inputs, and models that count no samples."""
    model = model_of(PLAIN, {"items": table(dim=DIM)})
    with pytest.raises(ConfigurationError, match="'w': the model has no such input; its inputs: 'u', 'v'"):
        import_model(tmp_path, model, context=["w"])
    with pytest.raises(ConfigurationError, match="at least one must be left for the candidates"):
        import_model(tmp_path, model, context=["u", "v"])
    fixed = model_of(PLAIN.replace("int64[n] v", "int64[3] v"), {"items": table(dim=DIM)})
    with pytest.raises(
        UnsupportedModelError,
        match=r"not the number of samples: 'u' \[-1\], 'v' \[3\], .*Export it with a row of each for every candidate",
    ):
        import_model(tmp_path, fixed, context=["u"])
    taken = model_of(
        PLAIN.replace("int64[n] u", "int64[n] CANDIDATES").replace(", u)", ", CANDIDATES)"), {"items": table(dim=DIM)}
    )
    with pytest.raises(UnsupportedModelError, match="CANDIDATES"):
        import_model(tmp_path, taken, context=["CANDIDATES"])


def test_without_context_nothing_changes(tmp_path: Path) -> None:
    """No ranking network, and no mark."""
    report = import_model(tmp_path, model_of(PLAIN, {"items": table(dim=DIM)}))
    assert report.spec.ranking is None
    assert report.spec.context == ()
    assert sorted(path.name for path in report.version_dir.iterdir()) == [
        "MANIFEST.json",
        "dense.onnx",
        "session.json",
        "tables",
    ]
