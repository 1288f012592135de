"""Settings of a session from config.pbtxt's parameters and from the instance that Triton starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inference_session.config import SessionConfig
from inference_session.errors import ConfigurationError
from tests.testing.model_settings import settings_text
from triton_backend.backend.settings import DEFAULT_MAX_SAMPLES, changed_parameters, read_parameters


def read(kind: str, **parameters: str) -> dict[str, object]:
    """The settings of an instance of this kind, on GPU 1."""
    given = {name: {"string_value": value} for name, value in parameters.items()}
    settings, limit = read_parameters(given, {"model_instance_kind": kind, "model_instance_device_id": "1"})
    assert limit == DEFAULT_MAX_SAMPLES
    return settings


@pytest.mark.parametrize(
    ("kind", "parameters", "expected"),
    [
        ("CPU", {}, {}),
        ("CPU", {"device": "cuda:0,1", "shard": "rows"}, {"device": "cuda:0,1", "shard": "rows"}),
        ("GPU", {"EXECUTION_ENV_PATH": "x"}, {"device": "cuda:1"}),
        ("GPU", {"device": "cpu", "shard": "none"}, {"device": "cpu", "shard": "none"}),
        ("GPU", {"device": "cuda:0"}, {"device": "cuda:0"}),
    ],
)
def test_an_instance_of_a_gpu_uses_it(kind: str, parameters: dict[str, str], expected: dict[str, str]) -> None:
    """Unless the setting `device` says otherwise; parameters in capitals are Triton's."""
    assert read(kind, **parameters) == expected


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([{"kind": "KIND_GPU", "count": 2, "gpus": [1, 0]}], {"shard_devices": "cuda:0,1"}),
        ([{"kind": "KIND_GPU", "gpus": [3]}, {"kind": "KIND_GPU", "gpus": [1]}], {"shard_devices": "cuda:1,3"}),
        ([{"kind": "KIND_GPU", "gpus": [1]}, {"kind": "KIND_CPU", "count": 4}], {}),
        ([{"kind": "KIND_GPU", "gpus": [0, 2]}], {}),
    ],
)
def test_instances_on_several_gpus_share_rows(groups: list[dict[str, object]], expected: dict[str, str]) -> None:
    """Each of them is told all GPUs of the model, if its own is one of them."""
    config = json.dumps({"instance_group": groups})
    args = {"model_instance_kind": "GPU", "model_instance_device_id": "1", "model_config": config}
    settings, _ = read_parameters({"shard": {"string_value": "rows"}}, args)
    assert settings == {"device": "cuda:1", "shard": "rows", **expected}


@pytest.mark.parametrize("device", ["cpu", "auto", "cuda:1", "cuda:5"])
def test_instances_of_a_device_by_name_share_nothing(device: str) -> None:
    """Those of the setting `device` may lie elsewhere than the GPUs of the instances."""
    config = json.dumps({"instance_group": [{"kind": "KIND_GPU", "gpus": [0, 1]}]})
    args = {"model_instance_kind": "GPU", "model_instance_device_id": "1", "model_config": config}
    settings, _ = read_parameters({"device": {"string_value": device}}, args)
    assert settings == {"device": device}
    SessionConfig.resolve(settings).check_devices(1)


@pytest.mark.parametrize("value", ["0", "-1", "1e3", "1_000", "٣", "1" * 5000, ""])
def test_the_limit_of_samples_is_a_whole_number(value: str) -> None:
    """Other texts that Python reads as numbers are refused, too."""
    with pytest.raises(ConfigurationError, match="'max_samples_per_request' cannot be"):
        read("CPU", max_samples_per_request=value)


def test_a_bad_parameter_is_named_with_its_file() -> None:
    """The operator sees which file to change."""
    with pytest.raises(ConfigurationError, match=r"config\.pbtxt: parameters: setting 'verify' cannot be 'maybe'"):
        read("CPU", verify="maybe")


@pytest.mark.parametrize(
    ("parameters", "asked"),
    [
        ({"device": "cuda:0,1"}, "device=cuda:0,1"),
        ({"device": "cuda:all", "shard": "rows"}, "device=cuda:all"),
    ],
)
def test_an_instance_of_one_gpu_does_not_take_several(parameters: dict[str, str], asked: str) -> None:
    """Otherwise each of the processes would load the model on all GPUs."""
    with pytest.raises(ConfigurationError, match=f"^{asked} needs one process over several GPUs"):
        read("GPU", **parameters)


@pytest.mark.parametrize("limit", ["0", "-1", "many", ""])
def test_a_limit_of_samples_is_a_whole_number(limit: str) -> None:
    """From 1."""
    with pytest.raises(ConfigurationError, match="max_samples_per_request"):
        read("CPU", max_samples_per_request=limit)


def test_settings_that_no_file_of_the_model_has_are_named(tmp_path: Path) -> None:
    """Triton keeps those of a load; with `--model-config-name` it reads another file than config.pbtxt."""
    ours = {"verify": {"string_value": "sizes"}}
    (tmp_path / "config.pbtxt").write_text(settings_text({"device": "cpu"}), encoding="utf-8")
    assert changed_parameters(tmp_path, ours) == ["device", "verify"]

    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/small.pbtxt").write_text(settings_text({"verify": "sizes", "OWN": "x"}), encoding="utf-8")
    assert changed_parameters(tmp_path, ours) == []
    assert changed_parameters(tmp_path, {"verify": {"string_value": "full"}}) == ["device", "verify"]
