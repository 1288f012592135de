"""Tables that the graph computes from constants: computed at import, answered as the original answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inference_session.importers.onnx import computed_tables
from tests.testing.onnx_models import check, model_of, table

KEYS = {"keys": np.array([[0, 1], [999, -1], [500, 7]], np.int64)}
CONSTANTS = {
    "w": table(),
    "narrow": table().T.copy(),
    "stack": np.stack([table(), table(seed=1)]),
    "q": np.arange(-4000, 4000).astype(np.int8).reshape(2000, 4),
    "zeros": np.zeros((1, 4), np.float32),
    "wide": table(dtype=np.float64),
    "half": np.array(0.5, np.float32),
    "one": np.array(1),
    "flat": np.array([2000, 4]),
    "yes": np.array(True),
}
COMPUTED = {
    "a row of zeros in front": ("t = Concat<axis = 0>(zeros, w)", 1001),
    "two tables": ("t = Concat<axis = 0>(w, w)", 2000),
    "scaled": ("t = Mul(w, half)", 1000),
    "turned": ("t = Transpose(narrow)", 1000),
    "one of a stack": ("t = Gather(stack, one)", 1000),
    "a stack as one": ("t = Reshape(stack, flat)", 2000),
    "normalized, in two steps": ("n = LpNormalization<axis = 1>(w)  t = Mul(n, half)", 1000),
    "dequantized": ("t = DequantizeLinear(q, half)", 2000),
    "doubles as floats": ("t = Cast<to = 1>(wide)", 1000),
    "one of several outputs": ("s, t = Split<axis = 0, num_outputs = 2>(q2)  q2 = DequantizeLinear(q, half)", 1000),
}
OTHERS = {
    "few rows": "t = Mul(zeros, half)",
    "of the request": "f = Cast<to = 1>(first)  t = Mul(w, f)  first = ReduceMax<keepdims = 0>(keys)",
    "random": "r = RandomNormalLike<seed = 1.0>(w)  z = Mul(r, zero)  zero = Sub(half, half)  t = Add(w, z)",
    "dropped out": "t = Dropout(w, half, yes)",
    "an output": "t = Mul(w, half)  out = Identity(t)",
    "a copy": "t = Identity(w)",
}


@pytest.mark.parametrize("kind", COMPUTED)
def test_is_taken_out(tmp_path: Path, kind: str) -> None:
    """With the rows that the graph computes, and nothing of what it computes them from is left."""
    lines, num_rows = COMPUTED[kind]
    text = f"g (int64[b, 2] keys) => (float[b, 2, 4] y) {{ {lines}  y = Gather(t, keys) }}"
    constants = {name: values for name, values in CONSTANTS.items() if name in text}

    report = check(tmp_path, model_of(text, constants), KEYS)

    assert [(t.name, t.num_rows) for t in report.tables] == [("t", num_rows)]
    assert not report.stays_dense
    assert (report.version_dir / "dense.onnx").stat().st_size < 1000


@pytest.mark.parametrize("kind", OTHERS)
def test_other_values_are_not_computed(tmp_path: Path, kind: str) -> None:
    """Values that are no tables, or not the same for every request."""
    keys = {"keys": np.zeros((3, 2), np.int64)}
    outputs = "float[b, 2, 4] y" + (", float[1000, 4] out" if "out =" in OTHERS[kind] else "")
    text = f"g (int64[b, 2] keys) => ({outputs}) {{ {OTHERS[kind]}  y = Gather(t, keys) }}"
    constants = {name: values for name, values in CONSTANTS.items() if name in text}
    if kind == "dropped out":
        constants["half"] = np.array(0, np.float32)

    report = check(tmp_path, model_of(text, constants), keys)

    assert "t" not in [each.name for each in report.tables]


def test_large_ones_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing them would need several times their memory."""
    monkeypatch.setattr(computed_tables, "_MAX_BYTES", 10_000)
    text = "g (int64[b, 2] keys) => (float[b, 2, 4] y) { t = Mul(w, half)  y = Gather(t, keys) }"

    report = check(tmp_path, model_of(text, {name: CONSTANTS[name] for name in ("w", "half")}), KEYS)

    assert [(item.name, item.reason) for item in report.stays_dense] == [("w", "is read completely by Mul 't'")]


def test_a_table_that_others_read_too(tmp_path: Path) -> None:
    """The original stays a table of its own."""
    text = """g (int64[b, 2] keys) => (float[b, 2, 4] y) {
        t = Mul(w, half)  u = Gather(t, keys)  v = Gather(w, keys)  y = Sub(u, v) }"""

    report = check(tmp_path, model_of(text, {name: CONSTANTS[name] for name in ("w", "half")}), KEYS)

    assert sorted(each.name for each in report.tables) == ["t", "w"]


def test_rows_of_a_computed_table_may_be_read_by_gather_nd(tmp_path: Path) -> None:
    """PyTorch writes `(weight / 2)[keys]` so."""
    text = """g (int64[b, 2] keys) => (float[b, 2, 4] y) {
        t = Mul(w, half)  a = Constant<value = int64[1] {-1}>()  k = Unsqueeze(keys, a)  y = GatherND(t, k) }"""

    report = check(tmp_path, model_of(text, {name: CONSTANTS[name] for name in ("w", "half")}), KEYS)

    assert [(t.name, t.num_rows) for t in report.tables] == [("t", 1000)]


QUANTIZED = np.arange(-4000, 4000).astype(np.int8).reshape(2000, 4)
ROWS_DEQUANTIZED = {
    "int8": ("v = Gather(w_quantized, keys)  y = DequantizeLinear(v, s)", QUANTIZED),
    "uint8, with a zero point": (
        "z = Constant<value = uint8 {7}>()  v = Gather(w_quantized, keys)  y = DequantizeLinear(v, s, z)",
        QUANTIZED.view(np.uint8),
    ),
    "read twice": (
        """v = Gather(w_quantized, keys)  f = DequantizeLinear(v, s)  u = Gather(w_quantized, other)
        g = DequantizeLinear(u, s)  y = Add(f, g)  one = Constant<value = int64 {1}>()  other = Sub(keys, one)""",
        QUANTIZED,
    ),
}
OTHERWISE = {
    "a scale for each column": (
        """c = Constant<value = float[4] {1.0, 2.0, 3.0, 4.0}>()
        v = Gather(q, keys)  y = DequantizeLinear<axis = 2>(v, c)"""
    ),
    "two scales": (
        """t = Constant<value = float {0.25}>()  v = Gather(q, keys)  f = DequantizeLinear(v, s)  u = Gather(q, keys)
        g = DequantizeLinear(u, t)  y = Add(f, g)"""
    ),
    "rows as they are": "v = Gather(q, keys)  f = DequantizeLinear(v, s)  g = Cast<to = 1>(v)  y = Add(f, g)",
    "rows as they are, elsewhere": (
        "v = Gather(q, keys)  f = DequantizeLinear(v, s)  u = Gather(q, keys)  g = Cast<to = 1>(u)  y = Add(f, g)"
    ),
}


@pytest.mark.parametrize("kind", ROWS_DEQUANTIZED)
def test_a_table_whose_rows_are_dequantized_is_taken_out(tmp_path: Path, kind: str) -> None:
    """ONNX Runtime's `quantize_dynamic` writes it so, and adds `_quantized` to the table's name."""
    lines, rows = ROWS_DEQUANTIZED[kind]
    text = f"g (int64[b, 2] keys) => (float[b, 2, 4] y) {{ s = Constant<value = float {{0.5}}>()  {lines} }}"

    report = check(tmp_path, model_of(text, {"w_quantized": rows}), KEYS)

    assert [(t.name, t.num_rows, t.dtype) for t in report.tables] == [("w", 2000, "float32")]
    assert not report.stays_dense
    assert (report.version_dir / "dense.onnx").stat().st_size < 1000


@pytest.mark.parametrize("kind", OTHERWISE)
def test_a_quantized_table_that_is_also_read_otherwise_stays(tmp_path: Path, kind: str) -> None:
    """One set of numbers could not answer both."""
    text = f"g (int64[b, 2] keys) => (float[b, 2, 4] y) {{ s = Constant<value = float {{0.5}}>()  {OTHERWISE[kind]} }}"

    report = check(tmp_path, model_of(text, {"q": QUANTIZED}), KEYS)

    assert not report.tables
    assert [item.name for item in report.stays_dense] == ["q"]


def test_a_scale_of_the_whole_batch_is_named(tmp_path: Path) -> None:
    """ONNX Runtime's `quantize_dynamic` adds it before each matrix product; the report says why requests stay apart."""
    text = """g (int64[b, 2] keys) => (float[b, 2, 3] y) {
        v = Gather(w, keys)  q, s, z = DynamicQuantizeLinear(v)  i = MatMulInteger(q, m, z)
        f = Cast<to = 1>(i)  y = Mul(f, s) }"""
    weights = np.arange(12, dtype=np.uint8).reshape(4, 3)

    report = check(tmp_path, model_of(text, {"w": table(2000), "m": weights}), KEYS)

    assert not report.spec.joinable
    assert "DynamicQuantizeLinear 'q' takes one scale for the whole batch" in str(report)
