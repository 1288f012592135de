"""config.pbtxt, Triton's description of a model: written for an imported model and read from any."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from inference_session.config import SessionConfig
from inference_session.errors import ConfigurationError, UnsupportedModelError
from inference_session.model_spec import CANDIDATES, PREDICTIONS, ModelSpec, TensorSpec
from triton_backend.repository import text_format
from triton_backend.repository.instances import instances_in
from triton_backend.repository.text_format import quoted

CONFIG_FILE = "config.pbtxt"
MAX_BATCH_SIZE = 2**31 - 1
"""The highest version number that Triton can read."""
STANDALONE_CODE = "from triton_backend.model import TritonPythonModel  # noqa: F401\n"

_DATA_TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "uint16": "TYPE_UINT16",
    "uint32": "TYPE_UINT32",
    "uint64": "TYPE_UINT64",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    "object": "TYPE_STRING",
}
_VERSIONS = re.compile("[0-9]{1,10}")
_MAX_SAMPLES = 1024
_SCALAR = (1,)
"""The dims of a scalar: Triton does not have scalars."""


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
    platform: str
    max_batch_size: int
    inputs: tuple[TensorConfig, ...]
    outputs: tuple[TensorConfig, ...]
    default_model_filename: str
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
            raise ConfigurationError(f"{path}: not readable as a Triton model configuration: {error}") from error

    def chosen_versions(self, versions: Sequence[int]) -> list[int]:
        """Those of some versions, given in ascending order, that Triton loads by the version policy."""
        if "all" in self.version_policy:
            return list(versions)
        if "specific" in self.version_policy:
            named = _inner(self.version_policy, "specific").get("versions", [])
            return [version for version in versions if str(version) in named]
        latest = _last(_inner(self.version_policy, "latest"), "num_versions", "1")
        num_versions = int(latest) if _VERSIONS.fullmatch(latest) else 0  # Triton reports what is no number
        return list(versions[max(len(versions) - num_versions, 0) :])


def _parse(message: text_format.Message) -> ModelConfig:
    return ModelConfig(
        name=_last(message, "name"),
        backend=_last(message, "backend"),
        platform=_last(message, "platform"),
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
    from inference_session.rows import resolved_cache_bytes

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


def most_samples(spec: ModelSpec) -> int:
    """Default limit of samples in a request and a batch: requests that rank candidates are larger."""
    return 16 * _MAX_SAMPLES if spec.context else _MAX_SAMPLES


def describe(spec: ModelSpec, name: str, *, max_batch_size: int = _MAX_SAMPLES, backend: str = "hotrow") -> ModelConfig:
    """How a model is to be served: its own tensors, and the predictions.

    Some models get `max_batch_size` 0 and full dims, and are joined by us: those that are not batched; those with
    inputs of the context, whose first dimension is not that of the others; those with a tensor that has no dimension
    but samples (Triton's `reshape` to rank 0, its other way to serve those, lets an empty request kill the server); and
    those whose inputs all have an open size in addition to the number of samples (Triton never answers a request of 0
    samples, unless it refuses it for an input of fixed size that lacks its bytes).

    Raises:
        UnsupportedModelError: Triton does not support a tensor's type or rank.
    """
    outputs = _all_outputs(spec)
    if not spec.has_own_inputs:
        return _describe_packed(spec, name, max_batch_size=max_batch_size, backend=backend)
    by_samples = (
        spec.batched
        and not spec.context
        and all(len(tensor.shape) > 1 for tensor in (*spec.inputs, *outputs))
        and any(-1 not in tensor.shape[1:] and tensor.dtype != "object" for tensor in spec.inputs)
    )
    return ModelConfig(
        name=name,
        backend=backend,
        platform="",
        max_batch_size=max_batch_size if by_samples else 0,
        inputs=tuple(_described(tensor, by_samples) for tensor in _all_inputs(spec)),
        outputs=tuple(_described(tensor, by_samples) for tensor in outputs),
        default_model_filename="",
    )


def _all_inputs(spec: ModelSpec) -> list[TensorSpec]:
    return [*spec.inputs, *([TensorSpec(CANDIDATES, "int32", (-1,))] if spec.context else [])]


def _all_outputs(spec: ModelSpec) -> list[TensorSpec]:
    if not spec.label_outputs or PREDICTIONS in [tensor.name for tensor in spec.outputs]:
        return list(spec.outputs)
    return [*spec.outputs, TensorSpec(PREDICTIONS, "float32", (-1, len(spec.labels)))]


def _describe_packed(spec: ModelSpec, name: str, *, max_batch_size: int, backend: str) -> ModelConfig:
    """HugeCTR's and HPS's requests: all samples of one are packed in tensors [1, n], which Triton joins unchanged."""
    return ModelConfig(
        name=name,
        backend=backend,
        platform="",
        max_batch_size=max_batch_size,
        inputs=tuple(TensorConfig(tensor.name, _DATA_TYPES[tensor.dtype], (-1,)) for tensor in spec.inputs),
        outputs=(TensorConfig(PREDICTIONS, "TYPE_FP32", (-1,)),),
        default_model_filename="",
    )


def write_model_config(
    version_dir: Path,
    spec: ModelSpec,
    name: str,
    *,
    max_batch_size: int | None = None,
    standalone: bool = False,
    num_instances: int = 1,
) -> Path:
    """Write config.pbtxt next to a version directory, which may still be staged; returns its path.

    An existing one belongs to the user: it is kept if it describes the same inputs and outputs.

    Args:
        max_batch_size: maximum number of samples in a request, and in a batch. None: that of `most_samples`.
        standalone: serve through Triton's own `python` backend, by a one-line model.py in the version directory.
        num_instances: processes that serve the model.

    Raises:
        ConfigurationError: the existing file does not fit the model; the message names the first difference.
        UnsupportedModelError: Triton does not support a tensor's type or rank.
    """
    path = version_dir.parent / CONFIG_FILE
    backend = "python" if standalone else "hotrow"
    limit = max_batch_size or most_samples(spec)
    config = replace(describe(spec, name, max_batch_size=limit, backend=backend), num_instances=num_instances)
    if path.exists():
        _check_fits(path, config, packed=not spec.has_own_inputs)
    else:
        staged = path.with_name(f".tmp-{CONFIG_FILE}")
        staged.write_text(_text(config, spec, max_samples=limit), encoding="utf-8")
        staged.replace(path)
    if standalone:
        (version_dir / "model.py").write_text(STANDALONE_CODE, encoding="utf-8")
    return path


def check_config(config: Mapping[str, Any], spec: ModelSpec) -> None:
    """Refuse a version whose requests are other than what a config.pbtxt, given as Triton's JSON, lets clients send.

    Its inputs have to be the model's and its outputs, of which some may be absent, among the model's. Types have to be
    the same, and where requests are not packed, sizes too, unless one is open in either.

    Raises:
        ConfigurationError: names the first difference, or the model is decoupled or gets inputs from Triton.
    """
    if config.get("model_transaction_policy", {}).get("decoupled"):
        raise ConfigurationError(
            f"{CONFIG_FILE} has `decoupled: true`, but hotrow answers each request with one response; remove it"
        )
    packed = not spec.has_own_inputs
    if (added := _inputs_of_sequences(config)) and not packed:
        raise ConfigurationError(
            f"{CONFIG_FILE} lets Triton add the input {added[0]!r} to the requests of a sequence, but versions take "
            "inputs from clients only, and would refuse all of them; remove it from sequence_batching"
        )
    outer = (-1,) if config.get("max_batch_size") else ()
    for kind, tensors in (("input", _all_inputs(spec)), ("output", () if packed else _all_outputs(spec))):
        here = {tensor.name: _tensor_of_spec(tensor) for tensor in tensors}
        there = {tensor["name"]: _tensor_of_json(tensor, outer) for tensor in config.get(kind, ()) if here}
        needed = {tensor.name for tensor in spec.inputs} if kind == "input" else set()
        for name in {**there, **dict.fromkeys(needed)}:
            if not _suits(there.get(name), here.get(name), sizes=not packed):
                raise ConfigurationError(
                    f"{CONFIG_FILE} does not describe this version: {kind} is {there.get(name, 'absent')}, "
                    f"but {here.get(name, 'absent')} in the version"
                )


def _inputs_of_sequences(config: Mapping[str, Any]) -> list[str]:
    """Inputs that Triton adds to requests itself."""
    batching = config.get("sequence_batching", {})
    controls = [control["name"] for control in batching.get("control_input", ())]
    return [*controls, *(state["input_name"] for state in batching.get("state", ()))]


def _tensor_of_spec(tensor: TensorSpec) -> TensorConfig:
    return TensorConfig(tensor.name, _DATA_TYPES[tensor.dtype], tensor.shape or _SCALAR)


def _tensor_of_json(tensor: Mapping[str, Any], outer: tuple[int, ...]) -> TensorConfig:
    """With all sizes that the model gets, including the number of samples."""
    dims = tensor["reshape"]["shape"] if "reshape" in tensor else tensor.get("dims", ())
    return TensorConfig(tensor["name"], tensor["data_type"], (*outer, *map(int, dims)) or _SCALAR)


def _suits(there: TensorConfig | None, here: TensorConfig | None, *, sizes: bool) -> bool:
    if there is None or here is None or there.data_type != here.data_type:
        return False
    same = len(there.dims) == len(here.dims) and all(
        one == other or -1 in {one, other} for one, other in zip(there.dims, here.dims, strict=True)
    )
    return same or not sizes


def _check_fits(path: Path, wanted: ModelConfig, *, packed: bool) -> None:
    present = ModelConfig.read(path)
    there, here = present, wanted
    if not packed and bool(present.max_batch_size) != bool(wanted.max_batch_size):
        there, here = _with_samples(present), _with_samples(wanted)
    differences = (
        *_differences("input", there.inputs, here.inputs),
        *_differences("output", there.outputs, here.outputs),
    )
    if present.backend != wanted.backend:
        differences = (f"the backend is {present.backend!r}, but the model needs {wanted.backend!r}", *differences)
    if differences:
        raise ConfigurationError(
            f"{path} does not describe this model: {differences[0]}. All versions of a model share one "
            f"{CONFIG_FILE}: import under another name, or remove the file to have it written again"
        )


def _with_samples(config: ModelConfig) -> ModelConfig:
    """The same with full dims: if Triton counts samples for only one of two models, their tensors do not differ."""
    if not config.max_batch_size:
        return config
    inputs, outputs = (
        tuple(replace(tensor, dims=(-1, *tensor.dims)) for tensor in tensors)
        for tensors in (config.inputs, config.outputs)
    )
    return replace(config, inputs=inputs, outputs=outputs)


def _differences(kind: str, present: tuple[TensorConfig, ...], wanted: tuple[TensorConfig, ...]) -> list[str]:
    there = {tensor.name: tensor for tensor in present}
    here = {tensor.name: tensor for tensor in wanted}
    return [
        f"{kind} is {there.get(name, 'absent')}, but {here.get(name, 'absent')} in the model"
        for name in {**there, **here}
        if not _serves(there.get(name), here.get(name), narrowed=kind == "output")
    ]


def _serves(there: TensorConfig | None, here: TensorConfig | None, *, narrowed: bool) -> bool:
    """Whether a description holds for a tensor: sizes may be open in it, and `narrowed`, where they are in the model.

    Some exporters leave sizes of outputs open that others know. A narrower input size would reject valid requests.
    """
    if there is None or here is None or not _suits(there, here, sizes=True):
        return False
    return narrowed or all(size in (-1, own) for size, own in zip(there.dims, here.dims, strict=True))


def _described(tensor: TensorSpec, by_samples: bool) -> TensorConfig:
    dims = tensor.shape[1:] if by_samples else tensor.shape or _SCALAR
    if tensor.dtype not in _DATA_TYPES:
        raise UnsupportedModelError(
            f"tensor {tensor.name!r} has type {tensor.dtype}; Triton serves: {', '.join(_DATA_TYPES)}"
        )
    if 0 in dims:
        raise UnsupportedModelError(
            f"tensor {tensor.name!r} has shape {list(tensor.shape)}; Triton does not allow empty dimensions"
        )
    return TensorConfig(tensor.name, _DATA_TYPES[tensor.dtype], dims, optional=tensor.name == CANDIDATES)


def _text(config: ModelConfig, spec: ModelSpec, *, max_samples: int) -> str:
    lines = [
        f"name: {quoted(config.name)}",
        f"backend: {quoted(config.backend)}",
        f"max_batch_size: {config.max_batch_size}",
    ]
    for tensor in config.inputs:
        lines += _tensor_text("input", tensor, ragged=config.max_batch_size > 0 and -1 in tensor.dims)
    for tensor in config.outputs:
        lines += _tensor_text("output", tensor, ragged=False)
    # Each instance is a process, with a cache of its own where the model's rows are in stores.
    lines.append(f"instance_group [ {{ count: {config.num_instances} kind: KIND_CPU }} ]")
    if config.max_batch_size and spec.joinable:
        lines.append("dynamic_batching { }")
    if spec.batched and not config.max_batch_size:
        lines.append(_parameter("max_samples_per_request", str(max_samples)))
    lines += _SETTINGS_HINT
    return "\n".join(lines) + "\n"


_SETTINGS_HINT = [
    "# Settings of hotrow (docs/reference/settings.md), for example:",
    '# parameters { key: "unknown_keys" value { string_value: "reject" } }',
]


def _parameter(name: str, value: str) -> str:
    return f"parameters {{ key: {quoted(name)} value {{ string_value: {quoted(value)} }} }}"


def _tensor_text(kind: str, tensor: TensorConfig, *, ragged: bool) -> list[str]:
    dims = ", ".join(str(size) for size in tensor.dims)
    lines = [
        f"{kind} {{",
        f"  name: {quoted(tensor.name)}",
        f"  data_type: {tensor.data_type}",
        f"  dims: [ {dims} ]",
    ]
    if ragged:
        # Without it Triton joins only requests of equal shapes.
        lines.append("  allow_ragged_batch: true")
    if tensor.optional:
        lines.append("  optional: true")
    return [*lines, "}"]
