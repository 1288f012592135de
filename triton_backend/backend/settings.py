"""The settings of a model's session, as config.pbtxt and Triton give them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inference_session.config import SessionConfig
from inference_session.errors import ConfigurationError
from triton_backend.repository.model_config import CONFIG_FILE, ModelConfig

DEFAULT_MAX_SAMPLES = 1024
_NAMED_CONFIGS = "configs/*.pbtxt"
_WHOLE_NUMBER = re.compile("[0-9]{1,18}")


def read_parameters(parameters: Mapping[str, Mapping[str, str]], args: Mapping[str, str]) -> tuple[dict[str, Any], int]:
    """The session's settings from config.pbtxt's `parameters`, and the limit of samples in a request.

    Parameters in capitals are Triton's own. An instance that is bound to a GPU (KIND_GPU) uses that one, and shares
    rows with the instances on other GPUs.

    Raises:
        ConfigurationError: a parameter is unknown or its value not allowed, or an instance that has one GPU is to use
            several.
    """
    settings, limit = own_settings({name: value["string_value"] for name, value in parameters.items()})
    if args.get("model_instance_kind") == "GPU":
        own = f"cuda:{args['model_instance_device_id']}"
        _check_one_gpu(settings.get("device", own), own)
        settings = settings if "device" in settings else {**gpu_settings(args), **settings}
    return settings, limit


def own_settings(parameters: Mapping[str, str]) -> tuple[dict[str, Any], int]:
    """The settings and the limit that are among config.pbtxt's `parameters`; ConfigurationError as read_parameters."""
    settings: dict[str, Any] = {name: value for name, value in parameters.items() if not name.isupper()}
    try:
        limit = _limit(settings.pop("max_samples_per_request", DEFAULT_MAX_SAMPLES))
        SessionConfig.resolve(settings)
    except ConfigurationError as error:
        raise ConfigurationError(f"{CONFIG_FILE}: parameters: {error}") from None
    return settings, limit


def gpu_settings(args: Mapping[str, str]) -> dict[str, str]:
    """The settings of an instance of KIND_GPU that follow from the instances of its model."""
    own = int(args["model_instance_device_id"])
    groups = json.loads(args.get("model_config", "{}")).get("instance_group", [])
    gpus = {int(gpu) for group in groups if group.get("kind") == "KIND_GPU" for gpu in group.get("gpus", [])}
    settings = {"device": f"cuda:{own}"}
    if own in gpus and len(gpus) > 1:
        settings["shard_devices"] = "cuda:" + ",".join(map(str, sorted(gpus)))
    return settings


def changed_parameters(folder: Path, parameters: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The settings that a model's config.pbtxt has with other values than Triton, which may hold an older one.

    Where the model has several configurations (`--model-config-name`), Triton may have read any of them.
    """
    here = {name: value["string_value"] for name, value in parameters.items()}
    found = [_differences(path, here) for path in (folder / CONFIG_FILE, *folder.glob(_NAMED_CONFIGS))]
    return found[0] if all(found) else []


def _differences(path: Path, here: Mapping[str, str]) -> list[str]:
    try:
        there = ModelConfig.read(path).parameters
    except ConfigurationError:  # Triton says so when it reads the file
        return []
    names = sorted({*there, *here})
    return [name for name in names if not name.isupper() and there.get(name) != here.get(name)]


def _check_one_gpu(device: str, own: str) -> None:
    """ConfigurationError if an instance of KIND_GPU, which is a process with one GPU, is to use several GPUs."""
    if "," not in device and device != "cuda:all":
        return
    raise ConfigurationError(
        f"device={device} needs one process over several GPUs, but each instance of KIND_GPU is a process that has one"
        f" GPU (this one: {own}): set instance_group [ {{ count: 1 kind: KIND_CPU }} ], or leave device out to have a"
        " process on each GPU"
    )


def _limit(value: str | int) -> int:
    text = str(value)
    if _WHOLE_NUMBER.fullmatch(text) and int(text) > 0:
        return int(text)
    raise ConfigurationError(f"setting 'max_samples_per_request' cannot be {value!r}; allowed: whole numbers from 1")
