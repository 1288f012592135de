"""Loops over the rows of a matrix of keys, as PyTorch writes EmbeddingBag: one pooled look-up, unless they do more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.testing.onnx_models import check, model_of, table

WIDTH = 3
RANDOM = np.random.default_rng(3)
CONSTANTS = {
    "items": table(dim=4),
    "t": np.array(True),
    "flat": np.array([-1]),
    "zero": np.array(0),
    "width": np.array(WIDTH),
    "one": np.array([1]),
    "axis0": np.array([0]),
    "axis1": np.array([1]),
    "two": np.array(2),
}
BEGIN, END = "b = Mul(i, width)", "e = Add(b, width)"
TAKE, REDUCE = "ks = Slice(list, b1, e1, axis0) v = Gather(items, ks)", "r = ReduceSum<keepdims = 0>(v, axis0)"


def loop(begin: str = BEGIN, end: str = END, take: str = TAKE, reduce: str = REDUCE) -> str:
    """A Loop with a bag for each sample, or something like it."""
    return f"""g (int64[n, {WIDTH}] x, float[n, {WIDTH}] f) => (float[n, 4] y) {{
        list = Reshape(x, flat)
        factors = Reshape(f, flat)
        shape = Shape(x)
        n = Gather(shape, zero)
        bags = Loop(n, t)<body = body (int64 i, bool c) => (bool co, float[4] r) {{
            co = Identity(c)
            {begin}
            {end}
            b1 = Reshape(b, flat)
            e1 = Reshape(e, flat)
            {take}
            {reduce}
        }}>
        used = ReduceMean<keepdims = 1>(f, axis1)
        zeros = Sub(used, used)
        y = Add(bags, zeros)
    }}"""


def feeds() -> list[dict[str, np.ndarray]]:
    """Several numbers of samples, keys from the end and duplicates."""
    return [
        {
            "x": RANDOM.choice([0, 1, 7, 999, -1, -1000, 500], (n, WIDTH)).astype(np.int64),
            "f": RANDOM.standard_normal((n, WIDTH)).astype(np.float32),
        }
        for n in (1, 2, 7)
    ]


FACTORS = """ks = Slice(list, b1, e1, axis0) w = Gather(items, ks) fs = Slice(factors, b1, e1, axis0)
    fc = Unsqueeze(fs, axis1) v = Mul(fc, w)"""
BAGS = {
    "sum": (loop(), "sum"),
    "mean": (loop(reduce="r = ReduceMean<keepdims = 0>(v, axis0)"), "mean"),
    "maximum": (loop(reduce="r = ReduceMax<keepdims = 0>(v, axis0)"), "max"),
    "factors": (loop(take=FACTORS), "sum"),
}


@pytest.mark.parametrize("kind", BAGS)
def test_bags_of_a_matrix_are_one_look_up(tmp_path: Path, kind: str) -> None:
    """Pooled, and joined with other requests."""
    text, pooling = BAGS[kind]

    report = check(tmp_path, model_of(text, CONSTANTS), *feeds())

    assert [lookup.pooling for lookup in report.spec.lookups] == [pooling]
    assert (report.spec.lookups[0].weights is not None) == (kind == "factors")
    assert b"Loop" not in (report.version_dir / "dense.onnx").read_bytes()
    assert report.spec.joinable


OTHERS = {
    "the neighbour's rows": loop(begin="j = Add(i, one) m = Mod(j, n) o = Squeeze(m, axis0) b = Mul(o, width)"),
    "one row less of each": loop(end="e2 = Add(b, width) e = Sub(e2, one)"),
    "its own rows and the first sample's": loop(begin="z = Mul(i, width) b = Sub(z, z)", end="e = Add(z, width)"),
    "every second sample's": loop(begin="h = Div(i, two) d = Mul(h, two) b = Mul(d, width)"),
    "more for the last sample": loop(
        begin="m = Add(i, one) q = Squeeze(m, axis0) last = Equal(q, n) bl = Cast<to = 7>(last) s = Mul(i, width)"
        " b = Sub(s, bl)",
        end="e = Add(s, width)",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_loop_that_reads_other_rows_stays(tmp_path: Path, kind: str) -> None:
    """Answers are the original's, and requests of a Loop that mixes samples are not joined."""
    model = model_of(OTHERS[kind], CONSTANTS)
    single = {name: array[:1] for name, array in feeds()[0].items()}

    report = check(tmp_path, model, *([single] if "last" in kind else feeds()))

    assert all(lookup.pooling == "none" for lookup in report.spec.lookups)
    assert kind == "one row less of each" or not report.spec.joinable


def test_a_loop_that_asks_for_a_value_stays(tmp_path: Path) -> None:
    """A condition on a key that is not the padding of PyTorch's Loop."""
    reduce = """k = Gather(list, b) big = Greater(k, zero)
        r = If(big)<then_branch = p () => (float[4] r1) { r1 = ReduceSum<keepdims = 0>(v, axis0) },
            else_branch = q () => (float[4] r2) { r2 = ReduceMax<keepdims = 0>(v, axis0) }>"""

    report = check(tmp_path, model_of(loop(reduce=reduce), CONSTANTS), *feeds())

    assert not report.spec.joinable
