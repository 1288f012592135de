"""What Triton calls: the Python backend's contract, over an InferenceSession."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Mapping, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from inference_session import InferenceSession
from inference_session.errors import ConfigurationError
from triton_backend import heartbeat
from triton_backend.answering import Answering, TritonRequest, TritonResponse
from triton_backend.errors import load_error
from triton_backend.joining import JoiningQueue
from triton_backend.metrics import SessionMetrics, count_restarts
from triton_backend.tensors import check_types

DEFAULT_MAX_SAMPLES = 1024


class TritonPythonModel:
    """One loaded version of a model. Triton makes it, calls `initialize` once, `execute` often, `finalize` once."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the version directory; `args` are Triton's, all of them strings, `model_config` as JSON."""
        config = json.loads(args["model_config"])
        heartbeat.start()
        try:
            session, max_samples = self._open(config, args)
            check_types((*session.spec.inputs, *session.spec.outputs))
        except Exception as error:  # noqa: BLE001  whatever it was, who asked for the load is told in plain words
            raise load_error(error) from None
        self._session = session
        # Triton joins requests itself, and checks their size, where it knows which dimension counts samples; packed
        # requests say themselves how many they hold, and it joins them where it has been told to.
        packed = session.spec.layout != "tensors"
        joins = session.spec.batched and ("dynamic_batching" not in config if packed else config["max_batch_size"] == 0)
        self._answering = Answering(
            session,
            max_samples=max_samples if joins and not packed else 0,
            device_id=int(args["model_instance_device_id"]),
        )
        self._joining: JoiningQueue | None = None
        if joins and session.spec.joinable:
            self._joining = JoiningQueue(
                self._answering.answer, _num_samples, max_samples=max_samples, name=args["model_name"]
            )
        self._metrics = _metrics(self._answering, config, args)
        # What has been loaded stays: no collection while serving has to walk through it again.
        gc.collect()
        gc.freeze()

    def _open(self, config: Mapping[str, Any], args: Mapping[str, str]) -> tuple[InferenceSession, int]:
        """The session, and the limit of samples in a request; HotrowError where it cannot be."""
        settings, max_samples = read_parameters(config.get("parameters", {}), args)
        return InferenceSession.open(pb_utils.get_model_dir(), **settings), max_samples

    def execute(self, requests: Sequence[TritonRequest]) -> list[TritonResponse] | None:
        """A response for each request, in order; None where they are answered through their senders."""
        if self._joining is None:
            return self._answering.answer(requests)
        self._joining.put(requests)
        return None

    def finalize(self) -> None:
        """Triton calls this when no request of this version is left."""
        if self._joining is not None:
            self._joining.close()
        if self._metrics is not None:
            self._metrics.close()
        self._session.close()


def read_parameters(parameters: Mapping[str, Mapping[str, str]], args: Mapping[str, str]) -> tuple[dict[str, Any], int]:
    """The session's settings out of config.pbtxt's `parameters`, and the limit of samples in a request.

    Parameters in capitals are Triton's own, and none of ours. Under Triton every byte of a version is verified
    unless `verify` says otherwise, and an instance that is bound to a GPU (KIND_GPU) uses that one.
    """
    settings: dict[str, Any] = {"verify": "full"}
    if args.get("model_instance_kind") == "GPU":
        settings["device"] = f"cuda:{args['model_instance_device_id']}"
    for name, value in parameters.items():
        if not name.isupper():
            settings[name] = value["string_value"]
    return settings, _limit(settings.pop("max_samples_per_request", DEFAULT_MAX_SAMPLES))


def _limit(value: str | int) -> int:
    with contextlib.suppress(ValueError):
        if (limit := int(value)) > 0:
            return limit
    raise ConfigurationError(f"setting 'max_samples_per_request' cannot be {value!r}; allowed: whole numbers from 1")


def _num_samples(request: TritonRequest) -> int:
    tensors = request.inputs()
    shape: Sequence[int] = tensors[0].shape() if tensors else ()
    return int(shape[0]) if shape else 1


def _metrics(answering: Answering, config: Mapping[str, Any], args: Mapping[str, str]) -> SessionMetrics | None:
    labels = {"model": args["model_name"], "version": args["model_version"]}
    try:
        count_restarts(config, args["model_name"])
        return SessionMetrics(answering.stats, labels)
    except pb_utils.TritonModelException as error:  # the server runs with --allow-metrics=false
        pb_utils.Logger.log_warn(f"no hotrow_* metrics for {args['model_name']}: {error}")
        return None
