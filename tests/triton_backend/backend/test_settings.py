"""Settings of a session from config.pbtxt's parameters and from the instance that Triton starts."""

from __future__ import annotations

import pytest

from inference_session.errors import ConfigurationError
from triton_backend.backend.settings import DEFAULT_MAX_SAMPLES, read_parameters


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
        ({"shard": "rows"}, "shard=rows"),
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
