"""HugeCTR's requests to a network with concat inputs: the same answers. GPUs have them; here, the processor as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from inference_session import InferenceSession, Request
from inference_session.dense_engine.rewrites.concat_inputs import read_with_concat_inputs
from inference_session.errors import InvalidRequestError
from inference_session.execution.concat_operands import concat_operands
from inference_session.importers.hugectr.importer import import_hugectr
from inference_session.model_spec import DENSE_FILE
from inference_session.version_directory.version import VersionDirectory
from tests.testing.hugectr_evaluator import Evaluator, Inputs
from tests.testing.hugectr_models import write_cross_network, write_wide_and_deep
from tests.testing.hugectr_source import Source, requests_of


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions have concat inputs as on a GPU, and take the full path: the processor's fast path has none."""
    monkeypatch.setattr(
        "inference_session.execution.model.concat_operands", lambda spec, **_: concat_operands(spec, on_gpu=True)
    )
    monkeypatch.setattr("inference_session.execution.staging.create.stage_on_host", lambda *_: None)


def num_joined(session: InferenceSession) -> int:
    """Inputs of the network that are concat inputs."""
    return len(session._model.replicas.all[0].network.dense.concat_inputs)  # nothing else tells


@pytest.fixture(params=[("sum", 1), ("mean", 2)], ids=["sum", "mean"])
def version(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Two tables with 2 and 3 slots of dim 1 and 4, and two dense features, in one Concat."""
    combiner, label_dim = request.param
    source = Source(tmp_path / "source", (400, 500), label_dim=label_dim)
    for layer in source.graph.layers[1:3]:
        layer["sparse_embedding_hparam"]["combiner"] = combiner
    source.graph.write(source.folder)
    (report,) = import_hugectr(source.ps_json(), tmp_path / "repository")
    return report.version_dir


def draw(rng: np.random.Generator, num_samples: int, longest: int) -> Inputs:
    """A request with 0 to `longest` keys in each bag; 0: with one in each."""
    lengths = [rng.integers(0, longest + 1, num_samples * slots) for slots in (2, 3)]
    counts = [each if longest else np.ones_like(each) for each in lengths]
    return {
        "DES": rng.standard_normal((1, 2 * num_samples)).astype(np.float32),
        "CATCOLUMN": rng.integers(-5, 1000, (1, sum(int(each.sum()) for each in counts))),
        "ROWINDEX": np.concatenate([np.cumsum([0, *each]) for each in counts])[None].astype(np.int32),
    }


def test_requests_of_all_kinds(version: Path, as_on_gpu: None) -> None:
    """One key in each slot, bags of other lengths, and both side by side; sizes come again with other lengths."""
    evaluator, rng = Evaluator(version), np.random.default_rng(0)
    with InferenceSession.open(version) as session:
        assert num_joined(session) == 1
        for longest in ((0,), (3,), (0, 0), (1, 3, 1), (0, 2, 0, 0), (9,), (0,), (3,)):
            for num_samples in (1, 2, 7):
                requests = [draw(rng, num_samples, each) for each in longest]
                for found, inputs in zip(session.run_many(list(map(Request, requests))), requests, strict=True):
                    assert isinstance(found, dict)
                    np.testing.assert_allclose(found["OUTPUT0"], evaluator.predict(inputs), atol=1e-5)


def test_a_wrong_request_spoils_no_other(version: Path, as_on_gpu: None) -> None:
    """It gets its own error among requests of both kinds."""
    evaluator, rng = Evaluator(version), np.random.default_rng(1)
    even, ragged = draw(rng, 3, 0), draw(rng, 3, 2)
    wrong = {**even, "DES": even["DES"][:, 1:]}
    with InferenceSession.open(version) as session:
        *found, error = session.run_many([Request(even), Request(ragged), Request(wrong)])
    assert isinstance(error, InvalidRequestError)
    for answer, inputs in zip(found, (even, ragged), strict=True):
        assert isinstance(answer, dict)
        np.testing.assert_allclose(answer["OUTPUT0"], evaluator.predict(inputs), atol=1e-5)


@pytest.mark.parametrize(("write", "expected"), [(write_wide_and_deep, 1), (write_cross_network, 0)])
def test_models_of_hugectr(
    write: Callable[[Path], None], expected: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Only part of the vectors are in the concat input of one, none in the other, and on a processor none at all."""
    write(tmp_path)
    report = import_hugectr(tmp_path / "ps.json", tmp_path / "repository")[0]
    with InferenceSession.open(report.version_dir) as session:
        assert num_joined(session) == 0
    request.getfixturevalue("as_on_gpu")
    answers = np.load(tmp_path / "expected.npz")
    with InferenceSession.open(report.version_dir) as session:
        assert num_joined(session) == expected
        for name, inputs in requests_of(tmp_path / "requests.npz").items():
            found = session.predict(inputs)
            np.testing.assert_allclose(found.reshape(-1), answers[name].reshape(-1), atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"dense_input": ["dense"]},
        {"dense_input": "other"},
        {"dense_dim": None},
        {"dense_dim": 3},
        {"slots": None},
        {"slots": (2,)},
        {"slots": (3, 2)},
        {"slots": ("2", 3)},
    ],
)
def test_what_does_not_fit_the_network_is_not_joined(options: dict[str, object], version: Path) -> None:
    """Whatever session.json says of a request: the layout refuses it, or ONNX Runtime the arrays."""
    spec = VersionDirectory.read(version).spec
    wrong = replace(spec, layout_options={**spec.layout_options, **options})
    path = version / DENSE_FILE
    for each, is_joined in ((spec, True), (wrong, False)):
        inputs = concat_operands(each, on_gpu=True)
        assert (inputs is not None and read_with_concat_inputs(path, inputs) is not None) == is_joined
    assert concat_operands(spec, on_gpu=False) is None
