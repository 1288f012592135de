"""Answers of divided networks are within 1e-6 of the original's on repeated inputs, for any model and any numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inference_session import InferenceSession, Request
from inference_session.errors import ModelFormatError
from inference_session.importers.onnx.context import Cut
from inference_session.importers.onnx.ranking import ranking_import, trials
from inference_session.importers.onnx.ranking.trials import RankingTrials
from inference_session.importers.report import ImportReport
from inference_session.model_spec import CANDIDATES, SESSION_FILE
from inference_session.requests.ranking_layout import exceeds
from inference_session.version_directory.session_file import read_spec
from tests.testing.onnx_evaluation import Arrays, run_network
from tests.testing.onnx_models import import_model, model_of, table
from tests.testing.random_rankers import RandomRanker, random_ranker
from tests.testing.ranking import DIM, matrix, tiled

PROMISED = 1e-6
COUNTS = ([300], [1], [7, 0, 100, 3], [10] * 8, [1, 1, 1], [2], [1] * 9, [40] * 16)
SCALES = ((1.0, 0.0), (0.5, 0.5), (3.0, 0.0), (30.0, 0.0), (1.0, 4096.0), (1.0, 0.0), (10.0, 0.0), (100.0, 0.0))


def assert_within(found: Arrays, wanted: Arrays) -> None:
    """Of the largest number of an output, or of 1."""
    for name, expected in wanted.items():
        limit = PROMISED * max(1.0, float(np.abs(expected).max(initial=0)))
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=limit, err_msg=name)


def imported(tmp_path: Path, ranker: RandomRanker) -> ImportReport:
    """With tables of few rows looked up as well."""
    return import_model(tmp_path, ranker.model, context=ranker.context, min_rows=100)


@pytest.mark.parametrize("seed", [2, 9, 50, 94, 112, 193, 3111, 9245, 20005, 26079, 28041, 30073, 32094])
def test_random_models(tmp_path: Path, seed: int) -> None:
    """Attention, cross layers, experts, normalisation: some have answers that double precision would give otherwise."""
    ranker = random_ranker(seed)
    report = imported(tmp_path, ranker)
    # Several threads add up in another order than the original with one: up to 1.4e-6 of these numbers.
    with InferenceSession.open(report.version_dir, dense_threads=1) as session:
        for number, (counts, scale) in enumerate(zip(COUNTS, SCALES, strict=True)):
            request = ranker.request(number, counts, *scale)
            wanted = run_network(tmp_path / "model.onnx", tiled(ranker.context, request, counts))
            found = session.run({**request, CANDIDATES: np.array(counts, np.int32)}, list(wanted))
            assert_within(found, wanted)


@pytest.mark.parametrize("seed", [1, 3, 9, 25])
def test_a_network_that_tiles_answers_bitwise_as_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Also for one context, whose products and pooled histories ONNX Runtime adds up in another order."""
    monkeypatch.setattr(ranking_import, "Cut", [Cut.NONE])
    ranker = random_ranker(seed)
    report = imported(tmp_path, ranker)
    assert report.spec.ranking is not None
    assert report.spec.ranking.largest_input is None
    with InferenceSession.open(report.version_dir, dense_threads=1) as session:
        for number, counts in enumerate([[50], [2], [3, 4], [0, 9, 1]]):
            request = ranker.request(number, counts, 100.0)
            wanted = run_network(tmp_path / "model.onnx", tiled(ranker.context, request, counts))
            found = session.run({**request, CANDIDATES: np.array(counts, np.int32)}, list(wanted))
            for name, expected in wanted.items():
                np.testing.assert_array_equal(found[name], expected)


LARGE = """g (float[n, 8] u_f, float[n, 4] v_f, int64[n] v) => (float[n, 1] y) {
    t = Gather(items, v)
    x = Concat<axis = 1>(u_f, v_f, t)
    a = Gemm(x, w0, b0)
    r = Relu(a)
    z = Gemm(r, w1)
    y = Sigmoid(z)
}"""


def large_request(num_candidates: int, scale: float, seed: int = 0) -> Arrays:
    """One context, with numbers of this size."""
    random = np.random.default_rng(seed)
    return {
        "u_f": (scale * random.uniform(-1, 1, (1, 8))).astype(np.float32),
        "v_f": (scale * random.uniform(-1, 1, (num_candidates, 4))).astype(np.float32),
        "v": random.integers(0, 1000, num_candidates),
    }


@pytest.fixture
def limited(tmp_path: Path) -> ImportReport:
    """A model that divided rounds otherwise for large numbers: they are multiplied, added, and end near zero."""
    constants = {
        "items": table(dim=DIM) * np.float32(0.1),
        "w0": matrix(12 + DIM, 8) / 6,
        "b0": matrix(8),
        "w1": matrix(8, 1) / 4,
    }
    return import_model(tmp_path, model_of(LARGE, constants, opset=17), context=["u_f"])


def test_requests_with_larger_numbers_are_answered_by_the_whole_network(tmp_path: Path, limited: ImportReport) -> None:
    """Bitwise as the original, alone and joined with others; the report names the limit."""
    assert limited.spec.ranking is not None
    largest = limited.spec.ranking.largest_input
    assert largest in trials.LARGEST_INPUTS
    assert f"requests with a float beyond ±{largest:g}" in str(limited)
    with InferenceSession.open(limited.version_dir, dense_threads=1) as session:
        scales = [1.0, 100 * largest, 4096.0, 1e6, np.nan]
        requests = [large_request(30, scale, seed) for seed, scale in enumerate(scales)]
        joined = session.run_many([Request(request) for request in requests])
        for scale, request, one in zip(scales, requests, joined, strict=True):
            alone = session.run(request, ["y"])["y"]
            given = session.run({**request, CANDIDATES: np.array([30], np.int32)}, ["y"])["y"]
            tiled = {**request, "u_f": np.repeat(request["u_f"], 30, axis=0)}
            wanted = run_network(tmp_path / "model.onnx", tiled)["y"]
            assert isinstance(one, dict)
            for found in (alone, given, one["y"]):
                np.testing.assert_allclose(found, wanted, rtol=0, atol=PROMISED if scale == 1 else 0)


def test_the_largest_number_of_an_array() -> None:
    """Of either sign; what is no number exceeds any."""
    numbers = np.array([[0.5, -2.0], [1.5, 1.0]], np.float32)
    assert not exceeds(numbers, 2.0)
    assert exceeds(numbers, 1.99)
    assert exceeds(np.array([np.nan], np.float32), 1e30)
    assert exceeds(np.array([np.inf, 1], np.float16), 1e30)
    assert not exceeds(np.full(1000, 300, np.float16), 300)  # their squares have no float16
    assert not exceeds(np.zeros((0, 3), np.float32), 1.0)
    assert not exceeds(np.array([10**9]), 1.0)


def test_a_limit_that_is_no_number_is_refused(limited: ImportReport) -> None:
    """session.json may have been edited."""
    path = limited.version_dir / SESSION_FILE
    text = path.read_text()
    assert limited.spec.ranking is not None
    for wrong in ('"6"', "-1", "0", "[]", "true"):
        path.write_text(
            text.replace(f'"largest_input": {limited.spec.ranking.largest_input}', f'"largest_input": {wrong}')
        )
        with pytest.raises(ModelFormatError, match=r"largest_input.*(finite number|number above 0)"):
            read_spec(limited.version_dir)


def test_a_model_of_which_every_division_answers_differently_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context is repeated for every candidate, and the report says why."""
    monkeypatch.setattr(RankingTrials, "difference", lambda *_: 1e-3)
    ranker = random_ranker(1)
    report = imported(tmp_path, ranker)
    assert not report.spec.is_divided
    assert "the network is not divided: every way of dividing it that was tried answers differently" in str(report)
    request = ranker.request(0, [5])
    wanted = run_network(tmp_path / "model.onnx", tiled(ranker.context, request, [5]))
    with InferenceSession.open(report.version_dir) as session:
        assert_within(session.run(request, list(wanted)), wanted)


@pytest.mark.parametrize(
    ("end", "jumps"),
    [
        ("y = Floor(z)", True),
        ("i = ArgMax<axis = 1>(z)  y = Cast<to = 1>(i)", True),
        ("g = Greater(z, half)  y = Cast<to = 1>(g)", True),
        ("i = Cast<to = 7>(z)  y = Cast<to = 1>(i)", True),
        ("g = Greater(z, half)  m = Mul(z, half)  y = Where(g, z, m)", False),
        ("f = Floor(u_f)  y = Add(f, z)", False),
        ("h = Cast<to = 10>(z)  y = Cast<to = 1>(h)", True),
        ("d = Cast<to = 11>(z)  y = Cast<to = 1>(d)", False),
    ],
)
def test_what_jumps_keeps_the_order_of_its_sums(tmp_path: Path, end: str, *, jumps: bool) -> None:
    """A rounding error may change the result by one, though hardly any random request shows it."""
    text = f"""g (float[n, 4] u_f, float[n, 4] v_f) => (float[n, k] y) {{
        x = Concat<axis = 1>(u_f, v_f)
        z = MatMul(x, w)
        {end}
    }}"""
    constants = {"w": matrix(8, 4) / 4, "half": np.array(0.5, np.float32)}
    report = import_model(tmp_path, model_of(text, constants, opset=17), context=["u_f"])
    assert report.spec.ranking is not None
    assert any("Concat 'x' reads" in line for line in report.spec.ranking.tiled) == jumps


def test_what_differs_is_measured() -> None:
    """Rounding, as a part of the largest number or of 1; anything else is infinite."""
    difference = trials.relative_difference
    one = np.array([1.0, 100.0], np.float32)
    assert difference(one, one) == 0
    assert difference(one + np.float32(0.5), one) == pytest.approx(0.005)
    assert difference(one / 1000, one / 1000 + np.float32(0.5)) == pytest.approx(0.5, rel=1e-2)
    assert difference(one.astype(np.float64), one) == np.inf
    assert difference(one[:1], one) == np.inf
    assert difference(np.array([1, 3]), np.array([1, 2])) == np.inf
    strange = np.array([np.nan, np.inf, 1], np.float32)
    assert difference(strange, strange) == 0
    assert difference(strange, np.array([np.nan, -np.inf, 1], np.float32)) == np.inf
    assert difference(np.array([np.nan, 1], np.float32), one) == np.inf
