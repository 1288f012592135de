"""Packed requests are joined, whatever each asks for, and answered as they would be alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_session import InferenceSession
from inference_session.errors import InvalidRequestError
from inference_session.importers.hugectr.importer import import_hugectr
from inference_session.requests.batch import Request
from tests.testing.hugectr_evaluator import Evaluator, Inputs
from tests.testing.hugectr_source import Source

_KEYS = st.lists(st.integers(0, 1000) | st.sampled_from([-(2**63), 2**63 - 1, -1]), max_size=6)


@pytest.fixture(scope="module")
def version_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two tables alone, of 1 and 4 columns."""
    folder = tmp_path_factory.mktemp("hps")
    source = Source(folder / "source", (400, 500))
    del source.model["network_file"], source.model["dense_file"]
    (report,) = import_hugectr(source.ps_json(), folder / "repository")
    return report.version_dir


@pytest.fixture(scope="module")
def session(version_dir: Path) -> Iterator[InferenceSession]:
    with InferenceSession.open(version_dir) as session:
        yield session


def _request(tables: tuple[list[int], list[int]]) -> Inputs:
    return {
        "KEYS": np.array([[*tables[0], *tables[1]]], np.int64),
        "NUMKEYS": np.array([[len(keys) for keys in tables]], np.int32),
    }


@given(tables=st.lists(st.tuples(_KEYS, _KEYS), min_size=1, max_size=5))
def test_requests_of_hps_are_answered_at_once(
    session: InferenceSession, version_dir: Path, tables: list[tuple[list[int], list[int]]]
) -> None:
    """One look-up for all of them; each gets its own vectors, table by table, bit for bit."""
    requests = [_request(keys) for keys in tables]
    evaluator = Evaluator(version_dir)
    before = session.stats()["batches"]

    answers = session.run_many([Request(inputs) for inputs in requests])

    assert session.stats()["batches"] == before + 1
    for inputs, answer in zip(requests, answers, strict=True):
        assert isinstance(answer, dict)
        np.testing.assert_array_equal(answer["OUTPUT0"], evaluator.vectors(inputs))


def test_a_request_may_ask_for_nothing_beside_one_that_asks(session: InferenceSession) -> None:
    """And a wrong one among them gets its own error."""
    good = _request(([1], [2, 3]))
    wrong = {**good, "NUMKEYS": np.array([[1, 1]], np.int32)}

    nothing, error, vectors = session.run_many([Request(good, ()), Request(wrong), Request(good)])

    assert nothing == {}
    assert isinstance(error, InvalidRequestError)
    assert isinstance(vectors, dict)
    np.testing.assert_array_equal(vectors["OUTPUT0"], session.run(good)["OUTPUT0"])


@pytest.fixture(scope="module")
def hugectr_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two tables with 2 and 3 slots, and a network."""
    folder = tmp_path_factory.mktemp("hugectr")
    (report,) = import_hugectr(Source(folder / "source", (400, 500)).ps_json(), folder / "repository")
    return report.version_dir


@pytest.fixture(scope="module")
def hugectr_session(hugectr_dir: Path) -> Iterator[InferenceSession]:
    with InferenceSession.open(hugectr_dir) as session:
        yield session


@st.composite
def _hugectr_request(draw: st.DrawFn) -> Inputs:
    """A request of some samples with 2 and 3 slots: one key in each, or any number."""
    num_samples = draw(st.integers(1, 4))
    lengths = st.just(1) if draw(st.booleans()) else st.integers(0, 2)
    counts = [[draw(lengths) for _ in range(num_samples * slots)] for slots in (2, 3)]
    total = sum(map(sum, counts))
    offsets = [np.cumsum([0, *table]) for table in counts]
    keys = draw(st.lists(st.integers(0, 1000) | st.sampled_from([-(2**63), -1]), min_size=total, max_size=total))
    return {
        "DES": np.linspace(-1, 1, 2 * num_samples, dtype=np.float32)[None],
        "CATCOLUMN": np.array(keys, np.int64)[None],
        "ROWINDEX": np.concatenate(offsets).astype(np.int32)[None],
    }


@given(requests=st.lists(_hugectr_request(), min_size=1, max_size=5))
def test_bags_of_one_key_are_answered_as_any(
    hugectr_session: InferenceSession, hugectr_dir: Path, requests: list[Inputs]
) -> None:
    """Requests with one key per slot, which are a matrix, and others, alone and side by side."""
    evaluator = Evaluator(hugectr_dir)

    answers = hugectr_session.run_many([Request(inputs) for inputs in requests])

    for inputs, answer in zip(requests, answers, strict=True):
        assert isinstance(answer, dict)
        np.testing.assert_allclose(answer["OUTPUT0"], evaluator.predict(inputs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["hps", "hugectr"])
def test_a_request_beyond_the_limit_is_refused(kind: str, version_dir: Path, tmp_path: Path) -> None:
    """`max_keys_per_request` holds for packed requests as for any."""
    source = Source(tmp_path / "source")
    request = _request(([1, 2], [3, 4]))
    if kind == "hugectr":
        (report,) = import_hugectr(source.ps_json(), tmp_path / "repository")
        version_dir, request = report.version_dir, source.request()

    with (
        InferenceSession.open(version_dir, max_keys_per_request=3) as session,
        pytest.raises(InvalidRequestError, match=r"above the limit of 3 \(max_keys_per_request\)"),
    ):
        session.run(request)
