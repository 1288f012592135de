"""Models that are slower when they are divided: the whole network answers requests that give their context once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inference_session import InferenceSession, Request
from inference_session.errors import ConfigurationError, HotrowError
from inference_session.importers.onnx.ranking import ranking_import, times
from inference_session.importers.onnx.ranking.times import Times
from inference_session.importers.report import ImportReport
from inference_session.model_spec import CANDIDATES, RANKING_FILE
from tests.testing.command_line import hotrow
from tests.testing.onnx_evaluation import run_network
from tests.testing.onnx_models import import_model
from tests.testing.ranking import CONTEXT, random_keys, small_ranker, tiled


def imported(tmp_path: Path) -> ImportReport:
    """A small model."""
    return import_model(tmp_path, small_ranker(), context=CONTEXT)


@pytest.fixture
def undivided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImportReport:
    """The same model, where every division takes longer than the whole network."""
    monkeypatch.setattr(ranking_import, "measure", lambda *_: Times(divided=0.003, whole=0.002))
    return imported(tmp_path)


def test_the_whole_network_answers(tmp_path: Path, undivided: ImportReport) -> None:
    """One context, several, joined, and with others that are refused."""
    assert not (undivided.version_dir / RANKING_FILE).exists()
    with InferenceSession.open(undivided.version_dir) as session:
        cases = [[5], [2, 0, 3], [1, 1], [1]]
        requests = [
            Request({**random_keys(len(counts), sum(counts), seed), CANDIDATES: np.array(counts, np.int32)})
            for seed, counts in enumerate(cases)
        ]
        bad = Request({**random_keys(2, 5), CANDIDATES: np.array([1, 1], np.int32)})
        *answers, refused = session.run_many([*requests, bad])
        assert isinstance(refused, HotrowError)
        for counts, each, answer in zip(cases, requests, answers, strict=True):
            inputs = {name: each.inputs[name] for name in ("user", "clicks", "item")}
            wanted = run_network(tmp_path / "model.onnx", tiled(CONTEXT, inputs, counts))["score"]
            np.testing.assert_allclose(answer["score"], wanted, rtol=0, atol=1e-5)  # type: ignore[index]
        assert session.predict(random_keys(1, 7)).shape == (7, 1)
        stats = session.stats()
        assert stats["contexts_total"] == 1 + 3 + 2 + 1 + 1
        assert stats["candidates_total"] == 5 + 5 + 2 + 1 + 7


def test_the_reason_is_named(undivided: ImportReport) -> None:
    """By the report of the import, and by `hotrow inspect`."""
    reason = "the network is not divided: it takes 3.00 ms divided and 2.00 ms whole for 500 candidates of one context"
    assert reason in str(undivided)
    assert reason in hotrow("inspect", undivided.version_dir)


def test_contexts_cannot_be_kept(undivided: ImportReport) -> None:
    """There is no network of the context alone."""
    with pytest.raises(ConfigurationError, match="imported without dividing the network"):
        InferenceSession.open(undivided.version_dir, context_cache_bytes=1 << 20)


def test_a_division_that_pays_or_makes_no_measurable_difference_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the networks refuse the generated request."""
    for number, found in enumerate([Times(0.002, 0.003), Times(0.00309, 0.003), Times(0.0002, 0.0001), None]):
        monkeypatch.setattr(ranking_import, "measure", lambda *_, found=found: found)
        folder = tmp_path / str(number)
        folder.mkdir()
        assert imported(folder).spec.is_divided


def test_both_networks_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With open sizes, and keys that look-ups read."""
    found = []

    def measure(*arguments: object) -> Times | None:
        found.append(real(*arguments))
        return found[-1]

    real = times.measure
    monkeypatch.setattr(ranking_import, "measure", measure)
    imported(tmp_path)
    assert found[0] is not None
    assert found[0].divided > 0
    assert found[0].whole > 0
