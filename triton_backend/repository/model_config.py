"""config.pbtxt, Triton's description of a model, as far as hotrow reads it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from inference_session.config import SessionConfig
from inference_session.errors import ConfigurationError
from inference_session.model_spec import ModelSpec
from inference_session.platform.small_files import why_unreadable
from triton_backend.repository import text_format

CONFIG_FILE = "config.pbtxt"
MAX_BATCH_SIZE = 2**31 - 1
"""The largest `max_batch_size` that Triton can read."""
_PROCESSORS_PER_INSTANCE = 4
"""Triton's own threads, and the clients' where they are on the same machine, need most of them."""
_MAX_INSTANCES = 8
_NUM_VERSIONS = re.compile("[0-9]{1,10}")


@dataclass(frozen=True)
class TensorConfig:
    """One `input` or `output` of a config.pbtxt."""

    name: str
    data_type: str
    """As Triton writes it: `TYPE_INT64`, `TYPE_STRING` …"""
    dims: tuple[int, ...]
    """Without the dimension that counts samples if `max_batch_size` is above 0."""
    optional: bool = False
    """An input that a request may leave out."""

    def __str__(self) -> str:
        return f"{self.name!r} {self.data_type} {list(self.dims)}"


@dataclass(frozen=True)
class ModelConfig:
    """The part of a config.pbtxt that hotrow reads."""

    name: str
    backend: str
    max_batch_size: int = 0
    inputs: tuple[TensorConfig, ...] = ()
    outputs: tuple[TensorConfig, ...] = ()
    default_model_filename: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Those with a string_value."""
    num_instances: int = 1
    """Processes that serve the model."""
    version_policy: text_format.Message = field(default_factory=dict)
    """Which versions Triton loads. Empty: the highest one."""

    @classmethod
    def read(cls, path: Path) -> ModelConfig:
        """Parse a config.pbtxt; ConfigurationError names the file and the place at fault."""
        try:
            return _parse(text_format.parse(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"{path}: not readable as a Triton model configuration: {why_unreadable(error)}"
            ) from error

    def chosen_versions(self, versions: Sequence[int]) -> list[int]:
        """Those of some versions, given in ascending order, that Triton loads by the version policy."""
        if "all" in self.version_policy:
            return list(versions)
        if "specific" in self.version_policy:
            named = _inner(self.version_policy, "specific").get("versions", [])
            return [version for version in versions if str(version) in named]
        latest = _last(_inner(self.version_policy, "latest"), "num_versions", "1")
        num_versions = int(latest) if _NUM_VERSIONS.fullmatch(latest) else 0  # Triton reports what is no number
        return list(versions[max(len(versions) - num_versions, 0) :])


def _parse(message: text_format.Message) -> ModelConfig:
    return ModelConfig(
        name=_last(message, "name"),
        backend=_last(message, "backend"),
        max_batch_size=text_format.integer("max_batch_size", (message.get("max_batch_size") or ["0"])[-1]),
        inputs=tuple(_tensor_config(tensor) for tensor in message.get("input", [])),
        outputs=tuple(_tensor_config(tensor) for tensor in message.get("output", [])),
        default_model_filename=_last(message, "default_model_filename"),
        parameters=_parameters(message),
        num_instances=instances_in(message),
        version_policy=_inner(message, "version_policy"),
    )


def _parameters(message: text_format.Message) -> dict[str, str]:
    """Reads `parameters { key: "k" value { string_value: "v" } }`, one or more."""
    entries = [entry for entry in message.get("parameters", []) if isinstance(entry, dict)]
    values = [(_last(entry, "key"), (entry.get("value") or [{}])[-1]) for entry in entries]
    return {key: _last(value, "string_value") for key, value in values if isinstance(value, dict)}


def configured_session(spec: ModelSpec, version_dir: Path, **settings: str) -> SessionConfig:
    """The settings in config.pbtxt and session.json, overridden by those given."""
    config_file = version_dir.absolute().parent / CONFIG_FILE
    parameters = ModelConfig.read(config_file).parameters if config_file.exists() else {}
    known = {setting.name for setting in fields(SessionConfig)}
    ours = {name: value for name, value in parameters.items() if name in known}
    return SessionConfig.resolve(settings, ours, spec.settings)


def configured_instances(version_dir: Path) -> int:
    """The processes that serve a model, as its config.pbtxt says; 1 where there is none."""
    config_file = version_dir.absolute().parent / CONFIG_FILE
    return ModelConfig.read(config_file).num_instances if config_file.exists() else 1


def configured_cache_bytes(spec: ModelSpec, version_dir: Path, *, on_device: bool = False, **settings: str) -> int:
    """The cache_bytes that these settings, config.pbtxt and session.json ask for, in this order.

    0 if the processor reads the table files. If a GPU reads them and no setting exists, the size of all tables there.
    """
    # These import Numba, which few commands need.
    from inference_session.device.placement import bytes_on_device
    from inference_session.rows.create import resolved_cache_bytes

    config = configured_session(spec, version_dir, **settings)
    if config.has_store:
        return resolved_cache_bytes(spec, config, on_device=on_device)
    if not on_device:
        return 0
    return sum(map(bytes_on_device, spec.tables)) if config.cache_bytes is None else config.cache_bytes


def _tensor_config(message: object) -> TensorConfig:
    if not isinstance(message, dict):
        raise ValueError(f"an input or output must be a message, found {message!r}")
    dims = tuple(text_format.integer("dims", size) for size in message.get("dims", []))
    return TensorConfig(_last(message, "name"), _last(message, "data_type"), dims)


def _inner(message: text_format.Message, field: str) -> text_format.Message:
    value = (message.get(field) or [{}])[-1]
    return value if isinstance(value, dict) else {}


def _last(message: text_format.Message, field: str, default: str = "") -> str:
    return _scalar(field, (message.get(field) or [default])[-1])


def _scalar(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"field {field!r} has a message as its value")
    return value


def suitable_instances(*, has_gpu: bool) -> int:
    """A number of instances that suits this machine: one for every four processors, at most 8; one where there is a
    GPU, whose cache only one process may hold.
    """
    if has_gpu:
        return 1
    return min(max(len(os.sched_getaffinity(0)) // _PROCESSORS_PER_INSTANCE, 1), _MAX_INSTANCES)


def instances_in(config: text_format.Message) -> int:
    """The instances that the `instance_group`s of a config.pbtxt ask for; 1 where there is none.

    Raises:
        ValueError: a count is no number.
    """
    groups = [group for group in config.get("instance_group", []) if isinstance(group, dict)]
    return sum(_count(group) * max(len(group.get("gpus", [])), 1) for group in groups) or 1


def _count(group: text_format.Message) -> int:
    return text_format.integer("count", (group.get("count") or ["1"])[-1])
