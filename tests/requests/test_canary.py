"""A version whose answers to recorded requests are far off is not opened."""

from __future__ import annotations

import io
import re
import resource
from pathlib import Path

import numpy as np
import onnx
import pytest

from inference_session import InferenceSession
from inference_session.errors import CanaryError, ConfigurationError
from inference_session.requests.canary import read_arrays, record_canary
from inference_session.version_directory.manifest import write_manifest
from tests.testing import small_model
from tests.testing.command_line import hotrow


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Version 1 of a model, and the canary recorded from it."""
    small_model.write(tmp_path / "small" / "1")
    np.savez(tmp_path / "requests.npz", **small_model.random_inputs(20, np.random.default_rng(0)))
    said = hotrow("record-canary", tmp_path / "small/1", tmp_path / "requests.npz", "--to", tmp_path / "canary.npz")
    assert "4 outputs recorded" in said
    return tmp_path / "small"


def npy() -> bytes:
    """A file of one array, which is no archive."""
    file = io.BytesIO()
    np.save(file, np.zeros(3))
    return file.getvalue()


def break_click(directory: Path, operator: str) -> None:
    """Make `click` something else."""
    path = directory / "dense.onnx"
    network = onnx.load(path)
    node = next(node for node in network.graph.node if node.output[0] == "click")
    node.op_type = operator
    if operator == "Sqrt":
        del node.input[1]
    onnx.save(network, path)
    write_manifest(directory)


def test_a_version_that_answers_as_recorded_opens(model: Path) -> None:
    """Nothing of it is counted."""
    with InferenceSession.open(model / "1", canary_requests="../canary.npz", canary_tolerance=1e-6) as session:
        assert session.stats()["requests"] == 0
        assert session.stats()["tables"]["code"]["lookup_keys"] == 0


def test_a_full_disk_does_not_harm_the_canary_that_was_there(model: Path, tmp_path: Path) -> None:
    """The error names the file, and no part of a new one is left."""
    canary = tmp_path / "canary.npz"
    before, files = canary.read_bytes(), sorted(tmp_path.iterdir())
    inputs = read_arrays(tmp_path / "requests.npz")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    with InferenceSession.open(model / "1") as session:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            with pytest.raises(OSError, match=re.escape(str(canary))):
                record_canary(session.run, inputs, canary)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert canary.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == files


def test_a_request_without_samples_is_refused(model: Path, tmp_path: Path) -> None:
    """It would accept any version."""
    inputs = small_model.random_inputs(0, np.random.default_rng(0))

    with InferenceSession.open(model / "1") as session, pytest.raises(CanaryError, match="the request has no sample"):
        record_canary(session.run, inputs, tmp_path / "empty.npz")
    assert not (tmp_path / "empty.npz").exists()


def test_a_version_that_is_wildly_off_is_refused(model: Path) -> None:
    """The message says which output, how far, and what would be allowed."""
    small_model.write(model / "2", seed=5)
    settings = {"canary_requests": str(model.parent / "canary.npz")}
    with pytest.raises(CanaryError, match=r"output 'click' differs .* by \d.*canary_tolerance 0.2"):
        InferenceSession.open(model / "2", **settings)

    with InferenceSession.open(model / "2", **settings, canary_tolerance=100):
        pass


def test_nan_is_refused_whatever_was_recorded(model: Path) -> None:
    """Also where the file holds no answers at all."""
    small_model.write(model / "2")
    break_click(model / "2", "Sqrt")
    inputs = small_model.random_inputs(20, np.random.default_rng(0))
    np.savez(model.parent / "bare.npz", **{f"input/{name}": array for name, array in inputs.items()})
    for file in ("canary.npz", "bare.npz"):
        with pytest.raises(CanaryError, match=r"values of output 'click' are not finite"):
            InferenceSession.open(model / "2", canary_requests=f"../{file}", canary_tolerance=1e9)


@pytest.mark.parametrize("content", [b"", b"PK nonsense", b"PK\3\4 nonsense", npy(), None])
def test_a_file_that_is_none_is_a_wrong_setting(model: Path, content: bytes | None) -> None:
    """Named, with the reason; the version does not open unchecked."""
    path = model.parent / "other.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"canary requests .*other\.npz: cannot be read"):
        InferenceSession.open(model / "1", canary_requests="../other.npz")


def test_a_request_to_another_model_is_a_wrong_setting(model: Path) -> None:
    """As is a file without any request."""
    np.savez(model.parent / "other.npz", **{"input/colour": np.zeros(3)})
    with pytest.raises(ConfigurationError, match=r"does not take this request: .*'user' is missing"):
        InferenceSession.open(model / "1", canary_requests="../other.npz")
    np.savez(model.parent / "other.npz", colour=np.zeros(3))
    with pytest.raises(ConfigurationError, match="holds no array input/NAME"):
        InferenceSession.open(model / "1", canary_requests="../other.npz")
