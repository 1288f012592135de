"""Two ONNX models, imported and served, over both protocols: the expected answers, and the AUC of real ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from numpy.typing import NDArray

from inference_session.importers.onnx import import_onnx
from tests.testing.example_models import ExampleModels
from tests.testing.served import Served, start
from tests.testing.served_requests import ask
from triton_backend.repository.config_writer import write_model_config

pytestmark = pytest.mark.triton

MODELS = ("multi_task", "pairwise")


@pytest.fixture(scope="module")
def served_models(
    models: ExampleModels, tritonserver: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Both models behind one server."""
    repository = tmp_path_factory.mktemp("real")
    for name, folder in zip(MODELS, models.onnx, strict=True):
        report = import_onnx(folder / "model.onnx", repository, name, min_rows=100)
        write_model_config(report.version_dir, report.spec, name)
    served = start(repository)
    yield served
    assert served.stop() == 0
    served.close()


def area_under_curve(labels: NDArray[np.float32], scores: NDArray[np.float32]) -> float:
    """By ranks; ties share one rank (Mann and Whitney)."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positive = labels > 0.5
    num_positive, num_negative = positive.sum(), (~positive).sum()
    return float((ranks[positive].sum() - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("protocol", [grpc_client, http_client], ids=["grpc", "http"])
def test_answers_are_those_of_the_original(
    served_models: Served, models: ExampleModels, model: str, protocol: Any
) -> None:
    """Every output of 512 requests agrees with plain ONNX Runtime on the whole model, within 1e-6."""
    folder: Path = getattr(models, model)
    inputs, expected = dict(np.load(folder / "requests.npz")), np.load(folder / "expected.npz")
    client = served_models.grpc_client() if protocol is grpc_client else served_models.http_client()

    for name in expected.files:
        answer = ask(client, model, inputs).as_numpy(name)
        np.testing.assert_allclose(answer, expected[name], rtol=0, atol=1e-6)
    together = ask(client, model, inputs).as_numpy("OUTPUT0")
    client.close()

    np.testing.assert_allclose(together, np.concatenate([expected[n] for n in expected.files], axis=1), atol=1e-6)


@pytest.mark.real_data
@pytest.mark.parametrize("model", MODELS)
def test_the_auc_is_the_published_one(served_models: Served, models: ExampleModels, model: str) -> None:
    """The 20,000 evaluation rows, through Triton, give each task's AUC of the model's README."""
    folder: Path = getattr(models, model)
    inputs, labels = dict(np.load(folder / "eval_inputs.npz")), np.load(folder / "labels.npz")
    line = next(line for line in (folder / "README.md").read_text().splitlines() if "AUC on eval_inputs" in line)
    published = {task: float(auc) for task, auc in re.findall(r"(\w+) (0\.\d{4})", line.partition("(")[0])}
    client = served_models.grpc_client()

    parts = [
        ask(client, model, {k: v[i : i + 1000] for k, v in inputs.items()}).as_numpy("OUTPUT0")
        for i in range(0, 20_000, 1000)
    ]
    client.close()

    scores = np.concatenate(parts)
    found = {task: round(area_under_curve(labels[task][:, 0], scores[:, i]), 4) for i, task in enumerate(labels.files)}
    assert found == published
