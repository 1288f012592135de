"""Branches whose conditions follow from sizes that the inputs fix."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from inference_session.importers.report import ImportReport
from tests.testing.onnx_models import check, model_of, table

IDS = np.array([[0, 1, 5], [999, -1, 2], [7, 7, 7], [3, 0, 1]], np.int64)
LENGTHS = np.array([1, 3, 2, 2], np.int64)
FEEDS = [{"ids": IDS[:n], "lengths": LENGTHS[:n]} for n in (4, 2, 1)]

LAST_OF_HISTORY = """m (int64[n, HISTORY] ids, int64[n] lengths) => (float[n, k] y) {
    h = Gather(w, ids)
    one = Constant<value = int64 {1}>()  column = Constant<value = int64[3] {-1, 1, 1}>()
    last = Sub(lengths, one)  position = Reshape(last, column)
    dims = Shape(h)  two = Constant<value = int64 {2}>()  dim = Gather(dims, two)  none = Constant<value = int64 {-1}>()
    zeroth = Constant<value = int64[1] {0}>()  a = Unsqueeze(none, zeroth)  b = Unsqueeze(dim, zeroth)
    wanted = Concat<axis = 0>(a, a, b)
    rank = Shape(wanted)  ones = ConstantOfShape<value = int64[1] {1}>(rank)  nones = Mul(ones, none)
    open = Equal(wanted, nones)  shape = Where(open, ones, wanted)
    whole = Expand(position, shape)
    picked = GatherElements<axis = 1>(h, whole)
    sizes = Shape(picked)  size = Gather(sizes, AXIS)  is_one = Equal(size, one)
    first = Constant<value = int64[1] {1}>()
    squeezed = If (is_one) <then_branch = t () => (float u) { u = Squeeze(picked, first) },
                            else_branch = f () => (float v) { v = Identity(picked) }>
    keep = Constant<value = int64[2] {-1, 4}>()  y = Reshape(squeezed, keep)
}"""
"""`h.gather(1, (lengths - 1).view(-1, 1, 1).expand(-1, -1, 4)).squeeze(1)`, as PyTorch's older exporter writes it."""


def imported(tmp_path: Path, graph: str) -> tuple[ImportReport, list[str]]:
    """A model that has been compared with the original, and the operators of its dense network."""
    model = model_of(graph, {"w": table()})
    names = [value.name for value in model.graph.input]
    report = check(tmp_path, model, *({name: feeds[name] for name in names} for feeds in FEEDS))
    network = onnx.load(report.version_dir / "dense.onnx")
    return report, [node.op_type for node in network.graph.node]


def test_a_squeeze_of_an_axis_of_one(tmp_path: Path) -> None:
    """It is taken, although its size is found in several steps, and requests are joined."""
    report, operators = imported(tmp_path, LAST_OF_HISTORY.replace("HISTORY", "3").replace("AXIS", "one"))

    assert "If" not in operators
    assert report.spec.joinable, report.notes


@pytest.mark.parametrize("axis", ["zero", "open"])
def test_a_size_that_requests_decide(tmp_path: Path, axis: str) -> None:
    """The branch stays where the size is that of the batch, or of a history of any length."""
    if axis == "zero":
        graph = LAST_OF_HISTORY.replace("HISTORY", "3").replace("sizes, AXIS", "sizes, batch")
        graph = graph.replace("h = Gather", "batch = Constant<value = int64 {0}>()  h = Gather", 1)
    else:
        graph = LAST_OF_HISTORY.replace("HISTORY", "l").replace("Shape(picked)", "Shape(ids)").replace("AXIS", "one")

    report, operators = imported(tmp_path, graph)

    assert "If" in operators
    assert not report.spec.joinable


def test_a_branch_within_another(tmp_path: Path) -> None:
    """The condition of the inner one is a constant once the outer one has been taken."""
    graph = """m (int64[n, 3] ids) => (float[n, k] y) {
        h = Gather(w, ids)  sizes = Shape(h)  one = Constant<value = int64 {1}>()  size = Gather(sizes, one)
        three = Constant<value = int64 {3}>()  is_three = Equal(size, three)  is_other = Not(is_three)
        x = If (is_three) <
            then_branch = t () => (float[n, 3, 4] u) {
                u = If (is_other) <then_branch = tt () => (float[n, 3, 4] p) { p = Neg(h) },
                                   else_branch = ff () => (float[n, 3, 4] q) { q = Abs(h) }> },
            else_branch = f () => (float[n, 3, 4] v) { v = Identity(h) }>
        axis = Constant<value = int64[1] {1}>()  y = ReduceSum<keepdims = 0>(x, axis)
    }"""

    report, operators = imported(tmp_path, graph)

    assert operators == ["Abs", "ReduceSum"]
    assert report.spec.joinable, report.notes


def test_a_number_of_dimensions(tmp_path: Path) -> None:
    """PyTorch's older exporter asks for it before a `where`; it is fixed, although sizes are open."""
    graph = """m (int64[n, l] ids) => (float[n, 4] y) {
        h = Gather(w, ids)  axis = Constant<value = int64[1] {1}>()  s = ReduceSum<keepdims = 0>(h, axis)
        sizes = Shape(s)  rank = Size(sizes)  two = Constant<value = int64 {2}>()  more = Sub(rank, two)
        none = Constant<value = int64 {0}>()  is_more = Greater(more, none)
        y = If (is_more) <then_branch = t () => (float[n, 4] u) { u = Neg(s) },
                          else_branch = f () => (float[n, 4] v) { v = Identity(s) }>
    }"""

    report, operators = imported(tmp_path, graph)

    assert "If" not in operators
    assert report.spec.joinable, report.notes
