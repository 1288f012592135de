"""Sessions of models with context inputs: requests that give their context once, joined with others, and refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference_session import InferenceSession, Request
from inference_session.errors import HotrowError, InvalidRequestError
from inference_session.importers.report import ImportReport
from inference_session.model_spec import CANDIDATES
from inference_session.requests.ranking_layout import split_by_context
from tests.testing.onnx_evaluation import Arrays, run_network
from tests.testing.onnx_models import import_model, model_of, table
from tests.testing.ranking import tiled

DIM, CONTEXT = 4, ("user", "clicks", "age")
TEXT = """g (int64[n] user, int64[n, length] clicks, float[n, 2] age, int64[n] item, float[n, 1] price)
    => (float[n, 1] click, float[n, 3] vector) {
    u = Gather(users, user)
    h = Gather(items, clicks)
    p = ReduceMean<axes = [1], keepdims = 0>(h)
    t = Gather(items, item)
    x = Concat<axis = 1>(u, age, t, p, price)
    product = Mul(p, t)
    both = Concat<axis = 1>(x, product)
    vector = Gemm(both, w, b)
    a = Relu(vector)
    z = MatMul(a, w2)
    click = Sigmoid(z)
}"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImportReport, Path]:
    """A model with a user, her clicks and an item, and its file."""
    random = np.random.default_rng(0)
    constants = {
        "users": table(dim=DIM, seed=1) * np.float32(0.1),
        "items": table(dim=DIM, seed=2) * np.float32(0.1),
        "w": 0.3 * random.standard_normal((4 * DIM + 3, 3), np.float32),
        "b": random.standard_normal(3).astype(np.float32),
        "w2": random.standard_normal((3, 1)).astype(np.float32),
    }
    folder = tmp_path_factory.mktemp("ranking")
    report = import_model(folder, model_of(TEXT, constants, opset=17), context=CONTEXT)
    return report, folder / "model.onnx"


@pytest.fixture(scope="module")
def session(imported: tuple[ImportReport, Path]) -> Iterator[InferenceSession]:
    """A session of that model."""
    with InferenceSession.open(imported[0].version_dir) as opened:
        yield opened


def request(num_contexts: int, num_candidates: int, *, length: int = 5, seed: int = 0) -> Arrays:
    """Random inputs."""
    random = np.random.default_rng(seed)
    return {
        "user": random.integers(0, 1000, num_contexts),
        "clicks": random.integers(0, 1000, (num_contexts, length)),
        "age": random.random((num_contexts, 2), np.float32),
        "item": random.integers(0, 1000, num_candidates),
        "price": random.random((num_candidates, 1), np.float32),
    }


def expected(model: Path, inputs: Arrays, counts: Sequence[int]) -> Arrays:
    """The original's answers to tiled inputs."""
    return run_network(model, tiled(CONTEXT, inputs, counts))


def assert_alike(found: Any, wanted: Arrays) -> None:
    """Within 1e-6."""
    assert not isinstance(found, HotrowError), found
    for name, array in wanted.items():
        assert found[name].shape == array.shape
        np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-6 * max(1, np.abs(array).max(initial=0)))


def test_one_context_has_all_candidates(session: InferenceSession, imported: tuple[ImportReport, Path]) -> None:
    """Context inputs of one row; the user is looked up once."""
    inputs = request(1, 40)
    before = session.stats()
    assert_alike(session.run(inputs), expected(imported[1], inputs, [40]))
    assert session.predict(inputs).shape == (40, 4)
    after = session.stats()
    assert after["tables"]["users"]["lookup_keys"] - before["tables"]["users"]["lookup_keys"] == 2
    assert after["tables"]["items"]["lookup_keys"] - before["tables"]["items"]["lookup_keys"] == 2 * (5 + 40)
    assert after["contexts_total"] - before["contexts_total"] == 2
    assert after["candidates_total"] - before["candidates_total"] == 80
    assert after["samples"] - before["samples"] == 80


def test_as_many_contexts_as_candidates_are_an_ordinary_request(
    session: InferenceSession, imported: tuple[ImportReport, Path]
) -> None:
    """Clients that tile get the same answers as before, to the last bit, also with CANDIDATES of ones."""
    inputs = request(6, 6)
    plain = session.run(inputs)
    assert_alike(plain, expected(imported[1], inputs, [1] * 6))
    ones = session.run({**inputs, CANDIDATES: np.ones(6, np.int32)})
    for name, array in plain.items():
        np.testing.assert_array_equal(ones[name], array)


counts_of = st.lists(st.integers(0, 12), min_size=1, max_size=5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(st.lists(st.tuples(counts_of, st.integers(1, 3)), min_size=1, max_size=5))
def test_requests_of_different_users_are_joined(
    session: InferenceSession, imported: tuple[ImportReport, Path], drawn: list[tuple[list[int], int]]
) -> None:
    """Each request is answered as alone, whatever else is in its batch and however long its history is."""
    requests, wanted = [], []
    for seed, (counts, length) in enumerate(drawn):
        inputs = request(len(counts), sum(counts), length=length, seed=seed)
        requests.append(Request({**inputs, CANDIDATES: np.array(counts, np.int32)}))
        wanted.append(expected(imported[1], inputs, counts) if sum(counts) else None)
    for counts_and_length, found, answer in zip(drawn, session.run_many(requests), wanted, strict=True):
        if answer is None:
            assert not isinstance(found, HotrowError)
            assert found["click"].shape == (0, 1), counts_and_length
        else:
            assert_alike(found, answer)


def test_joined_requests_are_one_batch(session: InferenceSession) -> None:
    """One look-up and one run of the network for all users."""
    before = session.stats()["batches"]
    session.run_many([Request(request(1, count, seed=count)) for count in (30, 50, 1000)])
    assert session.stats()["batches"] - before == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(st.integers(2, 9), st.lists(st.integers(1, 4), min_size=1, max_size=5), st.booleans())
def test_requests_of_one_context_are_staged(
    session: InferenceSession,
    imported: tuple[ImportReport, Path],
    num_candidates: int,
    lengths: list[int],
    with_candidates: bool,
) -> None:
    """As many candidates each: compiled code reads them, whether CANDIDATES says what is clear, or is absent."""
    requests = [request(1, num_candidates, length=length, seed=i) for i, length in enumerate(lengths)]
    given_counts = {CANDIDATES: np.array([num_candidates], np.int32)} if with_candidates else {}
    before = session.stats()
    arrays = [inputs[tensor.name] for inputs in requests for tensor in session.spec.inputs]
    staged = session.fast_path.run(arrays, len(requests))
    assert staged is not None
    joined = session.run_many([Request({**inputs, **given_counts}) for inputs in requests])
    for inputs, first, second in zip(requests, staged.split(), joined, strict=True):
        wanted = expected(imported[1], inputs, [num_candidates])
        assert_alike(first, wanted)
        assert_alike(second, wanted)
    after = session.stats()
    for name, count in {"contexts_total": 1, "candidates_total": num_candidates, "samples": num_candidates}.items():
        assert after[name] - before[name] == 2 * len(requests) * count


def test_requests_that_are_not_staged_are_left_to_the_other_path(session: InferenceSession) -> None:
    """Different numbers of candidates, several contexts in a request, and kinds that are mixed."""
    for sizes in ([(1, 4), (1, 5)], [(2, 4)], [(1, 4), (4, 4)], [(4, 4), (1, 4)], [(0, 4)], [(1, 0)]):
        requests = [request(*size) for size in sizes]
        arrays = [inputs[tensor.name] for inputs in requests for tensor in session.spec.inputs]
        assert session.fast_path.run(arrays, len(requests)) is None, sizes
    assert session.fast_path.run([], 0) is None
    assert session.fast_path.run([np.zeros(1)], 1) is None
    assert session.fast_path.run([None] * 5, 1) is None  # type: ignore[list-item]


@pytest.mark.parametrize("counts", [[4, 4], [7, 7, 7], [1, 5], [5, 1], [2, 0, 2], [3, 4, 5], [1, 1]])
def test_a_request_of_several_contexts(
    session: InferenceSession, imported: tuple[ImportReport, Path], counts: list[int]
) -> None:
    """Compiled code reads equally many candidates of each; either way it is one request, with all its contexts."""
    inputs = {**request(len(counts), sum(counts)), CANDIDATES: np.array(counts, np.int32)}
    before = session.stats()
    wanted = expected(imported[1], {n: a for n, a in inputs.items() if n != CANDIDATES}, counts)
    for found in (session.run(inputs), session.run_many([Request(inputs)])[0]):
        assert_alike(found, wanted)
    assert session.predict(inputs).shape == (sum(counts), 4)
    after = session.stats()
    passed = {
        name: after[name] - before[name] for name in ("requests", "samples", "contexts_total", "candidates_total")
    }
    assert passed == {
        "requests": 3,
        "samples": 3 * sum(counts),
        "contexts_total": 3 * len(counts),
        "candidates_total": 3 * sum(counts),
    }


def test_the_contexts_of_a_request_apart(session: InferenceSession) -> None:
    """Views of what belongs together; other requests, and too large ones, are not divided."""
    inputs = {**request(2, 5), CANDIDATES: np.array([2, 3], np.int32)}
    arrays = split_by_context(session.spec, inputs, 100)
    names = [tensor.name for tensor in session.spec.inputs]
    assert arrays is not None
    for number, (contexts, candidates) in enumerate([(slice(0, 1), slice(0, 2)), (slice(1, 2), slice(2, 5))]):
        for name, array in zip(names, arrays[5 * number :], strict=False):
            np.testing.assert_array_equal(array, inputs[name][contexts if name in CONTEXT else candidates])
    for changed in (
        {CANDIDATES: np.array([2, 3])},
        {CANDIDATES: np.array([[2, 3]], np.int32)},
        {CANDIDATES: np.array([5], np.int32)},
        {CANDIDATES: np.array([5, 0], np.int32)},
        {CANDIDATES: np.array([9, -4], np.int32)},
        {CANDIDATES: np.array([2, 2], np.int32)},
        {CANDIDATES: [2, 3]},
        {"user": np.zeros(3, np.int64)},
        {"user": [1, 2]},
        {"item": np.int64(3)},
        {"other": np.zeros(2)},
    ):
        assert split_by_context(session.spec, {**inputs, **changed}, 100) is None
    assert split_by_context(session.spec, inputs, 9) is None


NUMBERS = {"clicks": np.zeros((3, 5), np.int64), "user": np.zeros(3, np.int64), "age": np.zeros((3, 2), np.float32)}
BAD = {
    "must say how many of these belong to each context": NUMBERS,
    r"is int32 \[1\], expected int32 \[4\]": {**request(4, 4), CANDIDATES: np.array([4], np.int32)},
    "has 2 contexts, but 'user' has 1": {"clicks": np.zeros((2, 5), np.int64)},
    "has 3 samples, but 'item' has 4": {"price": np.zeros((3, 1), np.float32)},
    "has the sum 3, expected 4": {CANDIDATES: np.array([3], np.int32)},
    "holds -1, expected numbers of at least 0": {**NUMBERS, CANDIDATES: np.array([3, 2, -1], np.int32)},
    r"is int32 \[2\], expected int32 \[1\]": {CANDIDATES: np.array([2, 2], np.int32)},
    r"is int64 \[1\], expected int32 \[1\]": {CANDIDATES: np.array([4])},
    r"is int32 \[1, 1\], expected int32 \[1\]": {CANDIDATES: np.array([[4]], np.int32)},
    "the model has no input 'candidates'": {"candidates": np.array([4], np.int32)},
}


@pytest.mark.parametrize("message", BAD)
def test_numbers_that_do_not_add_up_are_refused(session: InferenceSession, message: str) -> None:
    """The error says what was found, and the other requests of the batch are answered."""
    bad = {**request(1, 4), **BAD[message]}
    with pytest.raises(InvalidRequestError, match=message):
        session.run(bad)
    good = request(1, 4)
    answers = session.run_many([Request(good), Request(bad), Request(good)])
    assert isinstance(answers[1], InvalidRequestError)
    for i in (0, 2):
        assert_alike(answers[i], session.run(good))


ATTENTION = """g (int64[n, length] clicks, int64[n] item) => (float[n, 4] y) {
    h = Gather(users, clicks)
    t = Gather(users, item)
    row = Unsqueeze(t, one)
    turned = Transpose<perm = [0, 2, 1]>(h)
    scores = MatMul(row, turned)
    weights = Softmax<axis = -1>(scores)
    interest = MatMul(weights, h)
    flat = Squeeze(interest, one)
    y = Add(flat, t)
}"""


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_an_empty_history_is_attended_to(tmp_path: Path, kept: int) -> None:
    """The divided network cannot compute it, so the whole one does."""
    constants = {"users": table(dim=DIM), "one": np.array([1])}
    report = import_model(tmp_path, model_of(ATTENTION, constants, opset=17), context=["clicks"])
    with InferenceSession.open(report.version_dir, context_cache_bytes=kept) as session:
        for counts in ([4], [2, 0, 3]):
            for length in (0, 3):
                inputs = {"clicks": np.ones((len(counts), length), np.int64), "item": np.arange(sum(counts))}
                tiled = {"clicks": np.repeat(inputs["clicks"], counts, axis=0), "item": inputs["item"]}
                found = session.run({**inputs, CANDIDATES: np.array(counts, np.int32)})
                assert_alike(found, run_network(tmp_path / "model.onnx", tiled))


@pytest.mark.parametrize("operators", ["y = Mul(u, v)", "a = Exp(v)  y = Add(a, u)"])
def test_contexts_are_kept_that_nothing_is_computed_from(tmp_path: Path, operators: str) -> None:
    """Candidates meet the inputs of the context themselves."""
    text = f"g (float[n, 4] u, float[n, 4] v) => (float[n, 4] y) {{ {operators} }}"
    report = import_model(tmp_path, model_of(text, {}, opset=17), context=["u"])
    inputs = {"u": np.ones((1, 4), np.float32), "v": np.ones((3, 4), np.float32)}
    wanted = run_network(tmp_path / "model.onnx", {**inputs, "u": np.ones((3, 4), np.float32)})
    with InferenceSession.open(report.version_dir, context_cache_bytes=1 << 20) as session:
        for _ in range(2):
            assert_alike(session.run(inputs), wanted)


def test_candidates_may_be_a_list(session: InferenceSession, imported: tuple[ImportReport, Path]) -> None:
    """In Python, numbers that convert without loss are taken."""
    inputs = request(2, 5)
    answer = session.run({**inputs, CANDIDATES: [1, 4]}, ["click"])
    np.testing.assert_allclose(answer["click"], expected(imported[1], inputs, [1, 4])["click"], atol=1e-6)


def test_a_model_that_looks_along_the_samples_answers_each_request_alone(tmp_path: Path) -> None:
    """A mean over the batch: over the request's own rows only, without padding and without rows of other requests."""
    text = """g (float[n, 2] u, float[n, 2] v) => (float[n, 2] y) {
        m = ReduceMean<axes = [0], keepdims = 1>(v)
        c = Sub(v, m)
        k = ReduceMean<axes = [0], keepdims = 1>(u)
        d = Sub(u, k)
        y = Mul(c, d)
    }"""
    report = import_model(tmp_path, model_of(text, {}, opset=17), context=["u"])
    random, requests, wanted = np.random.default_rng(0), [], []
    for counts in ([7], [2, 5], [1, 0, 3]):
        inputs = {
            "u": random.standard_normal((len(counts), 2), np.float32),
            "v": random.standard_normal((sum(counts), 2), np.float32),
        }
        requests.append(Request({**inputs, CANDIDATES: np.array(counts, np.int32)}))
        tiled = {"u": np.repeat(inputs["u"], counts, axis=0), "v": inputs["v"]}
        wanted.append(run_network(tmp_path / "model.onnx", tiled))
    with InferenceSession.open(report.version_dir) as session:
        for found, answer in zip(session.run_many(requests), wanted, strict=True):
            assert_alike(found, answer)
