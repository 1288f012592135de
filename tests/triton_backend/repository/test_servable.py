"""Which versions a server would load, and what Triton must not see."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference_session.errors import ConfigurationError
from triton_backend.repository.model_config import ModelConfig
from triton_backend.repository.servable import find_models, incomplete_models, misreading


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [
        ("", [20]),
        ("version_policy { latest { num_versions: 2 } }", [3, 20]),
        ("version_policy: { latest: { num_versions: 9 } }", [1, 3, 20]),
        ("version_policy { latest { num_versions: 0 } }", []),
        ("version_policy { latest { num_versions: -1 } }", []),
        ("version_policy { latest { } }", [20]),
        ("version_policy { all { } }", [1, 3, 20]),
        ("version_policy { specific { versions: [ 3, 4 ] } }", [3]),
        ("version_policy { specific { versions: 3 versions: 1 } }", [1, 3]),
        ("version_policy { specific { } }", []),
    ],
)
def test_the_policy_chooses_versions(policy: str, chosen: list[int], tmp_path: Path) -> None:
    """As Triton does; the versions are given in ascending order."""
    (tmp_path / "config.pbtxt").write_text(f'backend: "hotrow" {policy}', encoding="utf-8")

    assert ModelConfig.read(tmp_path / "config.pbtxt").chosen_versions([1, 3, 20]) == chosen


@pytest.mark.parametrize("name", ["1", "20260102030405", str(2**63 - 1), "labels", "-1", "x1", "٣", "configs"])
def test_these_are_not_misread(name: str, tmp_path: Path) -> None:
    """Triton reads them as the versions that they are, or passes over them."""
    (tmp_path / name).mkdir()

    assert misreading(tmp_path / name) == ""


@pytest.mark.parametrize("name", ["0", "01", "1.tmp", " 1", "+1", "1\n", "\t1", "1e3", str(2**63)])
def test_these_are_misread(name: str, tmp_path: Path) -> None:
    """Folders only: a file of such a name is no version."""
    (tmp_path / name).mkdir()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / name).touch()

    assert "not a version number" in misreading(tmp_path / name)
    assert misreading(tmp_path / "files" / name) == ""


def test_an_incomplete_model_belongs_to_a_repository_only_if_it_is_wanted(tmp_path: Path) -> None:
    """Its writer may still be at work; once a version is there, the remains of another harm nothing."""
    for name in ("done/1", "done/.tmp-2", "begun/.tmp-1"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("done", "begun"):
        (tmp_path / name / "config.pbtxt").write_text('backend: "onnxruntime"', encoding="utf-8")

    assert [model.name for model in find_models(tmp_path)] == ["done"]
    with pytest.raises(ValueError, match="contains no version"):
        find_models(tmp_path, ["begun"])


@pytest.mark.parametrize(
    ("entry", "code", "backend"),
    [
        ("model.onnx", "", "onnxruntime"),
        ("model.savedmodel", "", "tensorflow"),
        ("model.py", "def auto_complete_config(config):", "python"),
    ],
)
def test_a_model_may_describe_itself(entry: str, code: str, backend: str, tmp_path: Path) -> None:
    """Triton detects the backend by a file, and asks the backend for the rest."""
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/1" / entry).write_text(code, encoding="utf-8")

    assert [model.backend for model in find_models(tmp_path)] == [backend]
    assert incomplete_models(tmp_path) == ["m"]


@pytest.mark.parametrize("entry", ["model.py", "model.bin"])
def test_a_model_that_nobody_describes_is_refused(entry: str, tmp_path: Path) -> None:
    """Triton would serve code that cannot tell its inputs as a model without inputs."""
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/1" / entry).write_text("class TritonPythonModel: ...", encoding="utf-8")

    with pytest.raises(ConfigurationError, match=r"config\.pbtxt does not exist"):
        find_models(tmp_path)


def test_a_model_that_python_imported_is_explained(tmp_path: Path) -> None:
    """`import_onnx` writes a version, and nothing of Triton."""
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/1/session.json").touch()

    with pytest.raises(ConfigurationError, match=r"does not exist; `hotrow import` and `hotrow publish-version` write"):
        find_models(tmp_path)


@pytest.mark.parametrize(
    ("config", "is_complete"),
    [
        ('backend: "python" input { name: "a" } output { name: "b" }', True),
        ('backend: "onnxruntime" max_batch_size: 8', False),
        ('backend: "onnxruntime" input { name: "a" }', False),
        ('backend: "hps"', True),
    ],
)
def test_a_model_is_complete_with_inputs_and_outputs(config: str, is_complete: bool, tmp_path: Path) -> None:
    """The backends of HugeCTR and HPS need none in it."""
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/1/model.py").touch()
    (tmp_path / "m/config.pbtxt").write_text(config, encoding="utf-8")

    (tmp_path / "no model").mkdir()

    assert incomplete_models(tmp_path) == ([] if is_complete else ["m"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (".", " is no model repository: give one of those in it, such as .*/r"),
        ("r/m", "r/m is the folder of a model: give the .*/r"),
        ("r/m/1", "r/m/1 is a version directory: give the .*/r"),
    ],
)
def test_what_is_given_in_place_of_a_repository_is_named(given: str, message: str, tmp_path: Path) -> None:
    """Its folders were taken for models without a config.pbtxt."""
    (tmp_path / "r/m/1/tables").mkdir(parents=True)
    (tmp_path / "a").mkdir()
    (tmp_path / "r/m/config.pbtxt").touch()
    (tmp_path / "r/m/1/session.json").touch()

    with pytest.raises(ConfigurationError, match=rf"does not exist; .*{message}$"):
        find_models(tmp_path / given)
