"""The example model that lies in the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference_session import InferenceSession
from inference_session.version_directory import manifest
from tests.testing import ROOT
from triton_backend.repository.model_config import CONFIG_FILE, ModelConfig

MODEL = ROOT / "model_repository" / "movielens"


@pytest.fixture(scope="module")
def version() -> Path:
    """The newest version, which Triton serves."""
    return max((path for path in MODEL.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """Requests, and what plain ONNX Runtime answered before the import."""
    with np.load(MODEL / "expected.npz") as arrays:
        return dict(arrays)


def test_answers_as_plain_onnx_runtime_did(version: Path, expected: dict[str, Any]) -> None:
    """The import changed no prediction, of any task, by more than 1e-6."""
    with InferenceSession.open(version) as session:
        inputs = {tensor.name: expected[tensor.name] for tensor in session.spec.inputs}
        predictions = session.predict(inputs)
        assert session.label_names == ("liked", "loved")

    np.testing.assert_allclose(predictions, expected["predictions"], rtol=0, atol=1e-6)


def test_unknown_ids_are_answered_as_id_zero(version: Path, expected: dict[str, Any]) -> None:
    """A user whom the tables do not hold is an unknown user, whose history still counts."""
    with InferenceSession.open(version) as session:
        inputs = {tensor.name: expected[tensor.name] for tensor in session.spec.inputs}
        new = session.predict({**inputs, "user_id": np.full_like(inputs["user_id"], 5000)})
        unknown = session.predict({**inputs, "user_id": np.zeros_like(inputs["user_id"])})

    np.testing.assert_array_equal(new, unknown)


def test_users_and_movies_are_tables(version: Path) -> None:
    """The example shows look-ups, and one table that several inputs read."""
    with InferenceSession.open(version) as session:
        rows = {table.name: table.num_rows for table in session.spec.tables}
        keys = {lookup.keys for lookup in session.spec.lookups if lookup.table == "movies_weight"}

    assert rows == {"users.weight": 944, "movies.weight": 1683}
    assert keys == {"movie_id", "liked_movies", "disliked_movies"}


def test_requests_are_joined() -> None:
    """The server may batch requests of this model."""
    config = ModelConfig.read(MODEL / CONFIG_FILE)

    assert config.max_batch_size == 1024
    assert "dynamic_batching" in (MODEL / CONFIG_FILE).read_text(encoding="utf-8")


def test_is_small_and_whole(version: Path) -> None:
    """Every checksum fits, and a clone costs less than 2 MB."""
    manifest.verify(version, checksums=True)

    assert sum(path.stat().st_size for path in MODEL.rglob("*") if path.is_file()) < 2_000_000
