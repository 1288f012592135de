"""Look-ups that read columns of one matrix of keys."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inference_session import InferenceSession
from tests.testing.onnx_evaluation import run_network
from tests.testing.onnx_models import check, model_of, table

IDS = np.array([[0, 1, 5, 7], [999, -1, 5, 3], [-1000, 7, 500, 2]], np.int64)
TABLES = {"w": table(), "u": table(1500, 3, seed=1)}


def _graph(picks: str, *, kind: str = "int64", width: str = "4") -> str:
    reads = "v = Gather(w, i)  x = Gather(u, j)  y = Concat<axis = 1>(v, x)"
    return f"m ({kind}[b, {width}] ids) => (float[b, c] y) {{ {picks} {reads} }}"


GATHERS = """
    c1 = Constant<value = int64 {1}>()  c3 = Constant<value = int64 {-1}>()
    i = Gather<axis = 1>(ids, c1)  j = Gather<axis = 1>(ids, c3)"""
SLICES = """
    one = Constant<value = int64[1] {1}>()  two = Constant<value = int64[1] {2}>()
    three = Constant<value = int64[1] {3}>()
    a = Slice(ids, one, two, one)  i = Squeeze(a, one)  b = Slice(ids, three, end, one)  j = Squeeze(b, one)"""


@pytest.mark.parametrize("kind", ["int64", "int32"])
def test_single_columns_are_read_where_they_lie(tmp_path: Path, kind: str) -> None:
    """Gather by a constant column, counted from either end; no keys.onnx is left."""
    ids = IDS.astype(kind)

    report = check(tmp_path, model_of(_graph(GATHERS, kind=kind), TABLES), {"ids": ids}, {"ids": ids[::-1].copy()})

    assert [(lookup.keys, lookup.columns) for lookup in report.spec.lookups] == [("ids", (1, 2)), ("ids", (3, 4))]
    assert not (report.version_dir / "keys.onnx").exists()


def test_slices_are_columns_too(tmp_path: Path) -> None:
    """Slice on axis 1, with an end beyond the matrix, as exporters write it."""
    tables = {**TABLES, "end": np.array([np.iinfo(np.int64).max])}

    report = check(tmp_path, model_of(_graph(SLICES), tables), {"ids": IDS})

    assert [lookup.columns for lookup in report.spec.lookups] == [(1, 2), (3, 4)]


def test_splits_and_casts_are_followed(tmp_path: Path) -> None:
    """Split into columns, cast to another integer type on the way."""
    graph = """m (int32[b, 2] ids) => (float[b, c] y) { axis = Constant<value = int64[1] {1}>()
        wide = Cast<to = 7>(ids)  p, q = Split<axis = 1, num_outputs = 2>(wide)
        i = Squeeze(p, axis) j = Squeeze(q, axis)
        v = Gather(w, i)  x = Gather(u, j)  y = Concat<axis = 1>(v, x) }"""

    report = check(tmp_path, model_of(graph, TABLES), {"ids": IDS[:, :2].astype(np.int32)})

    assert [lookup.columns for lookup in report.spec.lookups] == [(0, 1), (1, 2)]


def test_several_neighbouring_columns_make_one_lookup(tmp_path: Path) -> None:
    """A slice of two columns reads two vectors a sample, side by side."""
    graph = """m (int64[b, 4] ids) => (float[b, c] y) {
        from = Constant<value = int64[1] {1}>()  to = Constant<value = int64[1] {3}>()
        col = Constant<value = int64 {0}>()
        i = Slice(ids, from, to, from)  j = Gather<axis = 1>(ids, col)
        v = Gather(w, i)  flat = Flatten(v)  x = Gather(u, j)  y = Concat<axis = 1>(flat, x) }"""

    report = check(tmp_path, model_of(graph, TABLES), {"ids": IDS})

    assert [lookup.columns for lookup in report.spec.lookups] == [(1, 3), (0, 1)]


def test_what_is_not_a_run_of_columns_is_computed(tmp_path: Path) -> None:
    """Shifted columns, columns out of order and columns of a matrix of unknown width go through keys.onnx."""
    shifted = GATHERS.replace("j = Gather", "k = Gather") + "  j = Abs(k)"
    report = check(tmp_path, model_of(_graph(shifted), TABLES), {"ids": IDS})
    assert [lookup.columns for lookup in report.spec.lookups] == [(1, 2), None]

    graph = _graph(GATHERS, width="n").replace("{-1}", "{2}")
    report = check(tmp_path, model_of(graph, TABLES), {"ids": IDS}, version=2)
    assert [lookup.columns for lookup in report.spec.lookups] == [None, None]


def test_joined_requests_share_the_matrix(tmp_path: Path) -> None:
    """Requests that are computed together get their own rows, and non-contiguous arrays are read rightly."""
    report = check(tmp_path, model_of(_graph(GATHERS), TABLES), {"ids": IDS})
    parts = [IDS[:1], IDS[1:], np.asfortranarray(IDS)]

    with InferenceSession.open(report.version_dir) as session:
        answers = [session.run({"ids": part}, ["y"])["y"] for part in parts]

    for part, answer in zip(parts, answers, strict=True):
        expected = run_network(tmp_path / "model.onnx", {"ids": np.ascontiguousarray(part)})["y"]
        np.testing.assert_allclose(answer, expected, atol=1e-6)
