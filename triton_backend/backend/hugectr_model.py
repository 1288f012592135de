"""What Triton calls for `backend: "hugectr"` and `backend: "hps"`: the user's own files, served in place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from inference_session.device.discovery import unusable_for_sessions
from inference_session.model_spec import ModelSpec
from inference_session.platform.file_names import decoded
from inference_session.versions import VersionManager
from triton_backend.backend import model
from triton_backend.backend.settings import DEFAULT_MAX_SAMPLES, gpu_settings
from triton_backend.repository.chosen_versions import is_chosen
from triton_backend.repository.in_place import Backend, InPlaceModel, contradictions, read_model_folder


class TritonPythonModel(model.TritonPythonModel):
    """One version of a model whose files are HugeCTR's: imported on load, unless they have been before."""

    def _open(self, config: Mapping[str, Any], args: Mapping[str, str]) -> tuple[VersionManager, int]:
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        backend: Backend = "hps" if config["backend"] == "hps" else "hugectr"
        found = read_model_folder(Path(args["model_repository"]), args["model_name"], parameters, backend)
        version = int(args["model_version"])
        # A version chosen by its number is not the one whose files config.pbtxt names.
        with found.served_before(version) if is_chosen(config) else found.imported(version) as version_dir:
            settings = found.session_settings
            own = {} if "device" in settings else _device(args)
            versions = model.open_versions(version_dir, {**own, **settings}, args)
        _warn(found, versions.spec, config, args)
        return versions, DEFAULT_MAX_SAMPLES


def _device(args: Mapping[str, str]) -> dict[str, str]:
    """The instance's GPU, and those of its model, as settings.

    HugeCTR's users always ask for one; a log line says if it cannot be used.
    """
    if args.get("model_instance_kind") != "GPU":
        return {}
    device_id = int(args["model_instance_device_id"])
    if reason := unusable_for_sessions(device_id):
        pb_utils.Logger.log_warn(f"{args['model_name']}: KIND_GPU, but using the CPU: {reason}")
        return {"device": "cpu"}
    return gpu_settings(args)


def _warn(found: InPlaceModel, spec: ModelSpec, config: Mapping[str, Any], args: Mapping[str, str]) -> None:
    """Log once which settings in the user's files have no effect, or another effect than with HugeCTR."""
    name = args["model_name"]
    if fields := found.ps_json.concerning(found.ps_json.ignored, found.model.name):
        pb_utils.Logger.log_warn(decoded(f"{name}: ignored fields of {found.ps_json.path}: {', '.join(fields)}"))
    if contradicted := contradictions(found, spec, max_batch_size=config["max_batch_size"]):
        pb_utils.Logger.log_warn(f"{name}: config.pbtxt does not match the model: {'; '.join(contradicted)}")
