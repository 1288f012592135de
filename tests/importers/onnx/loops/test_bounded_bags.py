"""Loops that append a row for each bag of one list of keys, as PyTorch's newer exporter writes EmbeddingBag."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_session import InferenceSession
from tests.testing.onnx_evaluation import Arrays, run_network
from tests.testing.onnx_models import check, import_model, model_of, table

CONSTANTS = {
    "w": table(),
    "flat": np.array([-1]),
    "one": np.array([1]),
    "two": np.array([2]),
    "axis": np.array([0]),
    "first": np.array(0),
    "next": np.array(1),
    "limit": np.array(20),
    "zeros": np.zeros((1, 4), np.float32),
    "factor": np.ones((1, 4), np.float32),
}
SUM = "r = ReduceSum(rows, axis)"
MEAN = """last_bag = Sub(num_bags, next)  is_last = Equal(i, last_bag)
    r = If(is_last)<then_branch = last () => (float[1, d] m) {
            total = ReduceSum(rows, axis)  n = Shape(x)  size = Sub(n, a)  divisor = Cast<to = 1>(size)
            m = Div(total, divisor) },
        else_branch = others () => (float[1, d] m2) { m2 = ReduceMean(rows, axis) }>"""


def bags(
    reduce: str = SUM, *, begin: str = "i1", end: str = "i2", empty: str = "Identity(zeros)", first: str = "first"
) -> str:
    """A Loop with a row for each bag, or something like it."""
    return f"""g (int64[n] x, int64[b] offsets) => (float[b, 4] y) {{
        vectors = Gather(w, x)
        n_keys = Shape(x)
        bounds = Concat<axis = 0>(offsets, n_keys)
        num_bags = Size(offsets)
        none = SequenceEmpty()
        any = Less(first, num_bags)
        pooled, num = Loop(, any, none, {first})<body = body (int64 number, bool c, seq(float[1, 4]) s, int64 i)
            => (bool co, seq(float[1, 4]) longer, int64 following) {{
            i1 = Reshape(i, flat)
            i2 = Add(i1, one)
            i3 = Add(i1, two)
            a = Slice(bounds, {begin}, i2)
            e = Slice(bounds, {end}, i3)
            is_empty = Equal(a, e)
            row = If(is_empty)<then_branch = nothing () => (float[1, 4] z) {{ z = {empty} }},
                else_branch = some () => (float[1, 4] r) {{ rows = Slice(vectors, a, e)  {reduce} }}>
            longer = SequenceInsert(s, row)
            following = Add(i, next)
            co = Less(following, num_bags)
        }}>
        y = ConcatFromSequence<axis = 0>(pooled)
    }}"""


def request(*offsets: int, num_keys: int = 10) -> Arrays:
    return {"x": np.arange(num_keys) - 3, "offsets": np.array(offsets)}


REQUESTS = request(0, 3, 4), request(0), request(0, 0, 5, 10), request(2, 3), request(0, 4, 4, 4, num_keys=4)


@pytest.mark.parametrize(("reduce", "pooling"), [(SUM, "sum"), (MEAN, "mean")])
def test_bags_are_pooled_by_the_lookup(tmp_path: Path, reduce: str, pooling: str) -> None:
    """No Loop is left, and nothing is computed but the sums, or means, and where the bags are."""
    report = check(tmp_path, model_of(bags(reduce), CONSTANTS), *REQUESTS)

    (lookup,) = report.spec.lookups
    assert (lookup.pooling, lookup.keys) == (pooling, "x")
    assert not report.notes or "mean" not in " ".join(report.notes)
    assert b"Loop" not in (report.version_dir / "dense.onnx").read_bytes()


@pytest.mark.parametrize(
    "graph",
    [
        bags(empty="Identity(factor)"),
        bags("total = ReduceSum(rows, axis)  r = Add(total, total)"),
        bags("r = ReduceMax(rows, axis)"),
        bags(first="next"),
        bags(MEAN.replace("Sub(n, a)", "Sub(n, one)")),
    ],
    ids=["ones for empty bags", "twice", "maximum", "without the first bag", "another divisor"],
)
def test_other_loops_stay(tmp_path: Path, graph: str) -> None:
    """They are no bags between bounds."""
    report = check(tmp_path, model_of(graph, CONSTANTS), request(0, 3, 4), request(0, 0, 5, 9))

    assert [lookup.pooling for lookup in report.spec.lookups] == ["none"]


LIMITED = "short = Add(a, limit)  to = Min(e, short)  few = Slice(vectors, a, to)  r = ReduceSum(few, axis)"


@pytest.mark.parametrize(
    "graph",
    [
        bags(LIMITED),
        bags().replace("Size(offsets)", "Size(offsets)  most = Min(num_bags, limit)").replace("Loop(,", "Loop(most,"),
    ],
    ids=["rows of a bag", "bags"],
)
def test_limits_stay(tmp_path: Path, graph: str) -> None:
    """A Loop that takes the first 20 rows of a bag, or the first 20 bags, is none that cuts bags."""
    report = check(tmp_path, model_of(graph, CONSTANTS), request(0, 30, num_keys=60), request(*range(25), num_keys=30))

    assert [lookup.pooling for lookup in report.spec.lookups] == ["none"]


def test_the_smallest_offset(tmp_path: Path) -> None:
    """Its distance from another offset is beyond 64 bits; such a bag is empty."""
    graph = bags().replace("Concat<axis = 0>(offsets, n_keys)", "Identity(offsets)")
    graph = graph.replace("num_bags = Size(offsets)", "n_bounds = Size(offsets)  num_bags = Sub(n_bounds, next)")
    graph = graph.replace("=> (float[b, 4] y)", "=> (float[c, 4] y)")
    smallest = np.iinfo(np.int64).min

    report = check(tmp_path, model_of(graph, CONSTANTS), request(0, 5, smallest), request(5, smallest))

    assert [lookup.pooling for lookup in report.spec.lookups] == ["sum"]


def test_a_loop_that_ends_with_another_list_stays(tmp_path: Path) -> None:
    """The last bag ends with a list that may be shorter than that of the keys."""
    graph = bags().replace("int64[n] x,", "int64[n] x, int64[m] other,").replace("Shape(x)", "Shape(other)", 1)
    longer, shorter = (request(0, 3, 4) | {"other": np.arange(size)} for size in (10, 6))

    report = check(tmp_path, model_of(graph, CONSTANTS), longer, shorter)

    assert [lookup.pooling for lookup in report.spec.lookups] == ["none"]


def test_means_that_are_not_a_number_stay(tmp_path: Path) -> None:
    """Those over no rows, which look-ups give as zeros."""
    graph = bags("r = ReduceMean(rows, axis)").replace("is_empty = Equal(a, e)", "is_empty = Less(e, flat)")

    report = check(tmp_path, model_of(graph, CONSTANTS), request(0, 3, 4))

    assert [lookup.pooling for lookup in report.spec.lookups] == ["none"]


@pytest.fixture(scope="module", params=[SUM, MEAN], ids=["sum", "mean"])
def pooled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, InferenceSession]]:
    """The original, and the imported model, open."""
    folder = tmp_path_factory.mktemp("bags")
    report = import_model(folder, model_of(bags(request.param), CONSTANTS))
    assert report.spec.lookups[0].bags is not None
    with InferenceSession.open(report.version_dir) as session:
        yield folder / "model.onnx", session


@settings(max_examples=60)
@given(
    cuts=st.lists(st.integers(0, 10), min_size=1, max_size=12).map(sorted),
    keys=st.lists(st.integers(-1000, 999), min_size=10, max_size=10),
)
def test_any_offsets_mean_what_they_meant(
    pooled: tuple[Path, InferenceSession], cuts: list[int], keys: list[int]
) -> None:
    """Bags of any size, and empty ones anywhere."""
    original, session = pooled
    inputs = {"x": np.array(keys), "offsets": np.array(cuts)}

    expected = run_network(original, inputs)["y"]
    if cuts[-1] == 10:  # PyTorch divides the sum of no rows by one; this graph by zero
        expected[-1] = 0
    np.testing.assert_allclose(session.run(inputs)["y"], expected, rtol=1e-6, atol=1e-6)
