"""The settings of a model's session, as config.pbtxt and Triton give them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from inference_session.config import SessionConfig
from inference_session.errors import ConfigurationError
from triton_backend.repository.model_config import CONFIG_FILE

DEFAULT_MAX_SAMPLES = 1024
_WHOLE_NUMBER = re.compile("[0-9]{1,18}")


def read_parameters(parameters: Mapping[str, Mapping[str, str]], args: Mapping[str, str]) -> tuple[dict[str, Any], int]:
    """The session's settings from config.pbtxt's `parameters`, and the limit of samples in a request.

    Parameters in capitals are Triton's own. An instance that is bound to a GPU (KIND_GPU)
    uses that one.

    Raises:
        ConfigurationError: a parameter is unknown or its value not allowed, or an instance that has one GPU is to use
            several.
    """
    settings = {name: value["string_value"] for name, value in parameters.items() if not name.isupper()}
    limit = _limit(settings.pop("max_samples_per_request", DEFAULT_MAX_SAMPLES))
    try:
        SessionConfig.resolve(settings)
    except ConfigurationError as error:
        raise ConfigurationError(f"{CONFIG_FILE}: parameters: {error}") from None
    if args.get("model_instance_kind") == "GPU":
        own = f"cuda:{args['model_instance_device_id']}"
        _check_one_gpu(settings, own)
        settings.setdefault("device", own)
    return settings, limit


def _check_one_gpu(settings: Mapping[str, str], own: str) -> None:
    """ConfigurationError if an instance of KIND_GPU, which is a process with one GPU, is to use several GPUs."""
    device = settings.get("device", own)
    names_several = "," in device or device == "cuda:all"
    if not names_several and settings.get("shard") != "rows":
        return
    asked = f"device={device}" if names_several else "shard=rows"
    raise ConfigurationError(
        f"{asked} needs one process over several GPUs, but each instance of KIND_GPU is a process that has one GPU"
        f" (this one: {own}), and processes do not share rows in device memory: set instance_group [ {{ count: 1 kind:"
        " KIND_CPU } ] and device: cuda:0,1, or leave device and shard out to have the whole model on each GPU"
    )


def _limit(value: str | int) -> int:
    text = str(value)
    if _WHOLE_NUMBER.fullmatch(text) and int(text) > 0:
        return int(text)
    raise ConfigurationError(f"setting 'max_samples_per_request' cannot be {value!r}; allowed: whole numbers from 1")
