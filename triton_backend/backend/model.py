"""What Triton calls: the Python backend's contract, over an InferenceSession."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from inference_session import InferenceSession
from inference_session.model_spec import ModelSpec
from inference_session.platform.json_records import is_text
from inference_session.platform.user_cache import state_folder
from inference_session.versions import VersionManager
from triton_backend.backend.errors import load_error
from triton_backend.backend.heartbeat import Heartbeat
from triton_backend.backend.joining_queue import JoiningQueue
from triton_backend.backend.log import show_log
from triton_backend.backend.metrics import SessionMetrics, count_restarts
from triton_backend.backend.request_handler import RequestHandler, TritonRequest, TritonResponse
from triton_backend.backend.settings import changed_parameters, read_parameters
from triton_backend.backend.stub_calls import shorten_calls
from triton_backend.backend.tensors import check_types
from triton_backend.backend.tracing import create_tracing
from triton_backend.repository.config_checks import check_config, may_be_empty
from triton_backend.repository.servable import SOURCE_LINK, VIEW_FOLDER

_CACHED = (
    "model {!r} has response_cache: Triton repeats old answers after rows were updated or loaded from a store, and "
    "after content was replaced in place, and repeats the outputs that the first such request named, whatever a later "
    "one names; remove it from config.pbtxt unless none of this happens"
)

_WARMED_UP = (
    "model {!r} has model_warmup: where a sample fails, Triton 24.10 may end with signal 11; remove it from "
    "config.pbtxt: hotrow warms up without it (warm_up_s), and canary_requests refuse a bad version"
)

_MAY_BE_EMPTY = (
    "model {!r} has a max_batch_size, but no input of a fixed size: a request of 0 samples ends Triton 24.10 with "
    "signal 11 where inputs are reshaped to no dimension, and is never answered where all have open sizes; set "
    "max_batch_size to 0 in config.pbtxt, and begin all dims with -1, as `hotrow import` does"
)

_OTHER_SETTINGS = (
    "model {!r}: config.pbtxt has other values of {} than Triton has given this version, because it keeps those of a "
    "load that chose a version or brought a configuration; to use the file, `touch` it and load the model again"
)


class TritonPythonModel:
    """One loaded version of a model. Triton makes it, calls `initialize` once, `execute` often, `finalize` once."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the version directory; `args` are Triton's, all of them strings, `model_config` as JSON."""
        config = json.loads(args["model_config"])
        self._heartbeat = Heartbeat()
        show_log(args["model_name"], args["model_version"])
        try:
            versions, max_samples = self._open(config, args)
            check_types((*versions.spec.inputs, *versions.spec.outputs))
            check_config(config, versions.spec)
        except Exception as error:  # noqa: BLE001  the caller of the load gets a plain message for every error
            self._heartbeat.stop()
            raise load_error(error) from None
        _warn(config, args, versions.spec)
        self._versions = versions
        self._tracing = create_tracing()
        spec = versions.spec
        joined_by_us = _joined_by_us(spec, config)
        self._handler = RequestHandler(
            versions,
            max_samples=max_samples if joined_by_us and spec.batched and spec.has_own_inputs else 0,
            device_id=int(args["model_instance_device_id"]),
            tracing=self._tracing,
        )
        self._joining_queue: JoiningQueue | None = None
        if (joined_by_us and spec.joins_requests) or versions.num_devices > 1:
            self._joining_queue = JoiningQueue(
                self._handler.answer,
                _num_samples,
                max_samples=max(max_samples, config["max_batch_size"]) if spec.joins_requests else 1,
                name=args["model_name"],
                num_threads=versions.num_devices,
            )
        self._metrics = _metrics(self._handler, config, args)
        shorten_calls()
        # Loaded objects stay alive: the garbage collector need not scan them while serving.
        gc.collect()
        gc.freeze()

    def _open(self, config: Mapping[str, Any], args: Mapping[str, str]) -> tuple[VersionManager, int]:
        """The version, and the limit of samples in a request; HotrowError where it cannot be opened."""
        settings, max_samples = read_parameters(config.get("parameters", {}), args)
        directory = _at_users_path(Path(pb_utils.get_model_dir()))
        return open_versions(directory, settings, args), max_samples

    def execute(self, requests: Sequence[TritonRequest]) -> list[TritonResponse] | None:
        """A response for each request, in order; None if they are answered through response senders."""
        if self._joining_queue is None:
            return self._handler.answer(requests)
        self._joining_queue.put(requests)
        return None

    def is_ready(self) -> bool:
        """The answer to readiness probes, on servers that ask for it (Triton 26.03 and later)."""
        return self._handler.is_ready

    def finalize(self) -> None:
        """Triton calls this when this version has no more requests."""
        if self._joining_queue is not None:
            self._joining_queue.close()
        if self._metrics is not None:
            self._metrics.close()
        self._versions.close()
        if self._tracing is not None:
            self._tracing.close()
        self._heartbeat.stop()


def open_versions(directory: Path, settings: Mapping[str, Any], args: Mapping[str, str]) -> VersionManager:
    """Serve a version directory with these settings; those that are absent there and in session.json are Triton's:
    every byte is verified, and the version is warmed, with what was hot in the last one, before it serves.
    """
    folder = Path(args["model_repository"])
    source = folder / SOURCE_LINK
    defaults = {"verify": "full", "warm_up_s": 10}
    with contextlib.suppress(RuntimeError):  # no state is kept for a user without a home
        state_dir = str(state_folder((source if source.exists() else folder).resolve().parent))
        if is_text(state_dir):  # nor where Triton's Python, which knows ASCII names only, cannot decode it
            defaults["state_dir"] = state_dir
    # Files of a load call, or of a repository in the cloud, are in a folder that has a new name at each load.
    opening = partial(InferenceSession.open, directory, model=args["model_name"], defaults=defaults, **settings)
    return VersionManager(directory, opening)


def _warn(config: Mapping[str, Any], args: Mapping[str, str], spec: ModelSpec) -> None:
    """Log what is allowed in a configuration, but may do harm, or be other than what the user's file says."""
    found = {
        _CACHED: config.get("response_cache", {}).get("enable"),
        _WARMED_UP: config.get("model_warmup"),
        _MAY_BE_EMPTY: may_be_empty(config, spec),
    }
    for warning, holds in found.items():
        if holds:
            pb_utils.Logger.log_warn(warning.format(args["model_name"]))
    if others := changed_parameters(Path(args["model_repository"]), config.get("parameters", {})):
        pb_utils.Logger.log_warn(_OTHER_SETTINGS.format(args["model_name"], ", ".join(map(repr, others))))


def _joined_by_us(spec: ModelSpec, config: Mapping[str, Any]) -> bool:
    """Whether we, not Triton, join requests and check their size.

    Triton does both where it knows which dimension counts samples. Packed requests say themselves how many they hold;
    it joins them if it is configured to.
    """
    return config["max_batch_size"] == 0 if spec.has_own_inputs else "dynamic_batching" not in config


def _at_users_path(version_dir: Path) -> Path:
    """The version's folder at the user's path, which errors name, rather than our link that Triton sees."""
    folder = version_dir.parent
    if folder.parent.name != VIEW_FOLDER:
        return version_dir
    link = folder if folder.is_symlink() else folder / SOURCE_LINK
    return link.readlink() / version_dir.name


def _num_samples(request: TritonRequest) -> int:
    """The number of candidates of a request that gives its context once."""
    shapes = [tensor.shape() for tensor in request.inputs()]
    return max((int(shape[0]) for shape in shapes if shape), default=1)


def _metrics(handler: RequestHandler, config: Mapping[str, Any], args: Mapping[str, str]) -> SessionMetrics | None:
    labels = {"model": args["model_name"], "version": args["model_version"]}
    try:
        count_restarts(config, args["model_name"])
        return SessionMetrics(handler.stats, labels)
    except pb_utils.TritonModelException as error:  # the server runs with --allow-metrics=false
        pb_utils.Logger.log_warn(f"no hotrow_* metrics for {args['model_name']}: {error}")
        return None
