"""Bags that a Loop cuts out of one list of keys: EmbeddingBag with offsets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_session import InferenceSession
from inference_session.errors import InvalidRequestError
from tests.testing.onnx_evaluation import Arrays, run_network
from tests.testing.onnx_models import check, import_model, model_of, table

LOOP = """m (int64[l] keys, int64[b] begins, int64[b] ends) => (float[n, 4] y) {
    s = Shape(ends)  zero = Constant<value = int64 {0}>()  n = Gather(s, zero)  TRUE
    x = Constant<value = int64[1] {0}>()
    y = Loop(n, t)<body = body (int64 i, bool c) => (bool co, float[4] v) {
        co = Identity(CONDITION)  p = Gather(begins, i)  q = Gather(ENDS)  a = Unsqueeze(p, x)  e = Unsqueeze(q, x)
        k = Slice(keys, a, e, x)  g = Gather(w, k)  o = Constant<value = int64[1] {0}>()
        v = ReduceSum<keepdims = 0>(g, o) }> }"""
PARTS = {"TRUE": "t = Constant<value = bool {1}>()", "CONDITION": "c", "ENDS": "ends, i"}


def _loop(**parts: str) -> str:
    graph = LOOP
    for place, text in (PARTS | parts).items():
        graph = graph.replace(place, text)
    return graph


def _bags(*pairs: tuple[int, int], num_keys: int = 10) -> Arrays:
    begins, ends = np.array(pairs, np.int64).reshape(-1, 2).T
    return {"keys": np.arange(num_keys), "begins": begins.copy(), "ends": ends.copy()}


@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMean"])
def test_bags_are_pooled_by_the_lookup(tmp_path: Path, op: str) -> None:
    """No Loop is left: the look-up gets the positions of the bags."""
    model = model_of(_loop().replace("ReduceSum", op), {"w": table()})

    report = check(tmp_path, model, _bags((0, 3), (3, 3), (3, 10)), _bags((0, 1)), _bags((7, 9), (-9, -5), (2, 1)))

    (lookup,) = report.spec.lookups
    assert (lookup.pooling, lookup.keys) == (op.removeprefix("Reduce").lower(), "keys")
    assert b"Loop" not in (report.version_dir / "dense.onnx").read_bytes()


@pytest.mark.parametrize(
    "parts",
    [
        {"CONDITION": "early", "TRUE": "early = Constant<value = bool {0}>()  t = Constant<value = bool {1}>()"},
        {"ENDS": "ends, zero"},
        {"TRUE": "four = Constant<value = int64 {4}>()  t = Less(n, four)"},
    ],
    ids=["ends early", "another end", "may not begin"],
)
def test_other_loops_stay(tmp_path: Path, parts: dict[str, str]) -> None:
    """A look-up cannot compute a condition, or an end that is not the iteration's."""
    report = check(tmp_path, model_of(_loop(**parts), {"w": table()}), _bags((0, 3), (3, 3), (3, 10)))

    assert [lookup.pooling for lookup in report.spec.lookups] == ["none"]


def test_maxima_stay(tmp_path: Path) -> None:
    """ONNX Runtime's maximum of an empty bag is -inf, ours zero."""
    model = model_of(_loop().replace("ReduceSum", "ReduceMax"), {"w": table()})

    report = check(tmp_path, model, _bags((0, 3), (3, 3)))

    assert [lookup.pooling for lookup in report.spec.lookups] == ["none"]


def test_a_pooling_of_bags_is_not_pooled_again(tmp_path: Path) -> None:
    """The maximum over all bags is the network's."""
    graph = (
        _loop().replace("(float[n, 4] y)", "(float[4] z)").replace("}> }", "}>  z = ReduceMax<keepdims = 0>(y, x) }")
    )

    report = check(tmp_path, model_of(graph, {"w": table()}), _bags((0, 3), (3, 10)))

    assert [lookup.pooling for lookup in report.spec.lookups] == ["sum"]


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, InferenceSession]]:
    """The original, and the imported model, open."""
    folder = tmp_path_factory.mktemp("bags")
    report = import_model(folder, model_of(_loop(), {"w": table()}))
    assert report.spec.lookups[0].bags is not None
    with InferenceSession.open(report.version_dir) as session:
        yield folder / "model.onnx", session


CUTS = st.lists(st.integers(0, 12), min_size=1, max_size=12).map(sorted)


@settings(max_examples=60)
@given(cuts=CUTS, keys=st.lists(st.integers(-1000, 999), min_size=1, max_size=10))
def test_any_offsets_mean_what_they_meant(
    pooled: tuple[Path, InferenceSession], cuts: list[int], keys: list[int]
) -> None:
    """Bags of any size, empty ones, and offsets beyond the keys."""
    original, session = pooled
    offsets = np.array([*cuts, 12], np.int64)
    inputs = {"keys": np.array(keys), "begins": offsets[:-1], "ends": offsets[1:]}

    np.testing.assert_allclose(session.run(inputs)["y"], run_network(original, inputs)["y"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (_bags((0, 8), (3, 10)), "overlap: they hold 15 keys, but the list has 10"),
        (_bags((0, 8)) | {"ends": np.array([3, 8])}, r"begins of shape \[1\] and ends of shape \[2\]"),
    ],
)
def test_offsets_that_are_no_bags_are_refused(
    pooled: tuple[Path, InferenceSession], inputs: Arrays, message: str
) -> None:
    """Bags that overlap would cost more than the request's size tells."""
    with pytest.raises(InvalidRequestError, match=message):
        pooled[1].run(inputs)
