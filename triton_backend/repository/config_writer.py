"""Writes the config.pbtxt of an imported model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from inference_session.model_spec import ModelSpec
from inference_session.platform.small_files import write_whole
from triton_backend.repository.config_checks import check_fits
from triton_backend.repository.model_config import CONFIG_FILE, ModelConfig, TensorConfig
from triton_backend.repository.model_description import describe, most_samples
from triton_backend.repository.text_format import quoted

STANDALONE_CODE = "from triton_backend.model import TritonPythonModel  # noqa: F401\n"


def write_model_config(
    version_dir: Path,
    spec: ModelSpec,
    name: str,
    *,
    max_batch_size: int | None = None,
    standalone: bool = False,
    num_instances: int = 1,
) -> Path:
    """Write config.pbtxt next to a version directory, which may still be a draft, or not be there; returns its path.

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
        check_fits(path, config, packed=not spec.has_own_inputs)
    else:
        # Of a draft, what a killed import leaves is removed by later ones, this file with it.
        folder = version_dir if version_dir.is_dir() else None
        write_whole(path, _text(config, spec, max_samples=limit).encode(), draft_in=folder)
    if standalone:
        (version_dir / "model.py").write_text(STANDALONE_CODE, encoding="utf-8")
    return path


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
