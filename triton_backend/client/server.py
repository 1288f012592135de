"""Controls a running server, however it was started, as a gRPC client.

It uses gRPC because a load over HTTP stalls other HTTP clients of the server for as long as it takes.

Triton loads models, not versions: which of a model's versions are loaded follows from its version policy. A load may
carry a configuration. If that differs only in its version policy, Triton does not reload the versions that stay.
So a version is chosen by loading the model's own configuration with the policy `specific`. Triton then holds on to that
policy: a load without configuration does nothing until something in the model's folder changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inference_session.errors import ConfigurationError, HotrowError, UnavailableError
from inference_session.model_spec import NamedArrays
from triton_backend.client.probe import PROBE_PARAMETER, find_key
from triton_backend.client.tls import ClientTls
from triton_backend.repository.chosen_versions import with_versions, without_choice
from triton_backend.repository.servable import IN_PLACE_BACKENDS

CALL_TIMEOUT_S = 10.0
"""Timeout of a query to the server; loads have no limit."""
RESTRICTED_HEADER = "hotrow-key"
"""Header with the key to a server's management APIs, if they are restricted."""
_NO_SUCH_VERSION = "at least one version must be available"
_LOAD_FAILED = re.compile(r"^load failed for model '.*?': ")
_VERSION_FAILED = re.compile(r"version (\d+) is at \w+ state: ")
STUB_IS_LOST = "its backend process is dead or hung"
"""Why a model did not load, as `plain_reason` says it where Triton had no answer of the process for some seconds."""
_STUB_DIED = re.compile(r"Stub process '.*?' is not healthy\.?")
_NOT_POLLED = "failed to poll from model repository"
_NOT_EXPLICIT = "explicit model load / unload is not allowed"
_UNKNOWN_MODEL = "unknown model"
_DECOUPLED = "decoupled transaction policy"
"""In Triton's refusal of a request that is not part of a stream."""
_NOT_CONNECTED = {
    "Hostname Verification": "the server's certificate is for another host name; use that name in --url",
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate was not signed by the authority of --tls-ca, or has expired",
    "WRONG_VERSION_NUMBER": "the server does not use TLS; remove --tls-ca",
    "Socket closed": (
        "the server closed the connection: it stopped, or this is not its gRPC port, or it requires "
        "TLS (--tls-ca, --tls-certificate)"
    ),
}
"""gRPC codes that a reachable server returns, and what they mean."""


class RemoteError(HotrowError, RuntimeError):
    """The server refused what was asked of it; the message says why."""


class RefusedRequestError(RemoteError):
    """The server says that the request is at fault."""


class NoSuchVersionError(RemoteError):
    """The model's folder does not hold the version."""


@dataclass(frozen=True)
class VersionState:
    """A version of a model, as the server lists it."""

    version: int
    state: str
    """`LOADING`, `READY`, `UNLOADING` or `UNAVAILABLE`."""
    reason: str = ""
    """Why it is unavailable."""


class RemoteServer:
    """A server by its gRPC address; the context closes the connection. Methods raise RemoteError and UnavailableError.

    Args:
        url: `host:port`.
        restricted_key: sent with each call, where the server was told to restrict its management.
        tls: for a server that has TLS. None: plain text.
    """

    def __init__(self, url: str, *, restricted_key: str | None = None, tls: ClientTls | None = None) -> None:
        host, _, port = url.rpartition(":")
        if "/" in url or not host or not url.isprintable() or not (port.isascii() and port.isdecimal()):
            raise ConfigurationError(f"{url!r} is not the address of a server; expected HOST:GRPC_PORT")
        try:
            from tritonclient import grpc
            from tritonclient.utils import InferenceServerException
        except ImportError as error:
            raise ConfigurationError("tritonclient is not installed: pip install 'hotrow[client]'") from error
        self._grpc = grpc
        self._error = InferenceServerException
        self._url = url
        self._headers = {f"triton-grpc-protocol-{RESTRICTED_HEADER}": restricted_key} if restricted_key else {}
        # Never through a proxy that the environment names for other purposes.
        channel_args = [("grpc.enable_http_proxy", 0), *(tls.channel_args() if tls else ())]
        options = tls.client_options() if tls else {}
        self._client = grpc.InferenceServerClient(url, channel_args=channel_args, **options)

    def __enter__(self) -> RemoteServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def repository_index(self, timeout_s: float = CALL_TIMEOUT_S) -> list[dict[str, str]]:
        """What the server has found in its repository: `name`, and for what is or was loaded also `version`, `state`
        and `reason`, which may be empty.
        """
        index = self._call("get_model_repository_index", timeout_s=timeout_s, as_json=True).get("models", [])
        return [{**entry, "reason": plain_reason(entry.get("reason", ""))} for entry in index]

    def has_model(self, model: str) -> bool:
        """Whether the server has found the model's folder; it finds a newer folder on a load."""
        return any(entry["name"] == model for entry in self.repository_index())

    def versions(self, model: str) -> list[VersionState]:
        """The versions that the server knows of, ascending: those loaded, and those it had loaded or tried to."""
        index = self.repository_index()
        entries = [entry for entry in index if entry["name"] == model]
        if not entries:
            known = ", ".join(sorted({repr(entry["name"]) for entry in index})) or "none"
            # The server may still answer by a model whose folder was removed.
            raise RemoteError(f"the repository of the server at {self._url} has no model {model!r}; models: {known}")
        return sorted((_state(entry) for entry in entries if entry.get("version")), key=lambda state: state.version)

    def ready_versions(self, model: str) -> list[int]:
        """The versions that are loaded, ascending. Requests that name no version go to the last."""
        return [state.version for state in self.versions(model) if state.state == "READY"]

    def load(self, model: str) -> None:
        """Load what the repository says: the newest version, unless config.pbtxt has another policy."""
        before = self.ready_versions(model) if self.has_model(model) else []
        self._load(model)
        if before and self.ready_versions(model) == before:
            self._load(model, without_choice(self._config(model)))

    def load_versions(self, model: str, versions: Sequence[int]) -> None:
        """Load these versions, and unload all others once their requests are answered.

        Raises:
            NoSuchVersionError: none of these versions is in the model's folder.
        """
        if not (self.has_model(model) and self.ready_versions(model)):
            self._load(model)  # only the server can read the configuration of a model that is not loaded
        config = self._config(model)
        if config["backend"] in IN_PLACE_BACKENDS and not self._has_served(model, versions):
            self._load(model)  # config.pbtxt, which may be new, says what these are made of
            if self.ready_versions(model) == sorted(versions):
                return
            config = self._config(model)
        self._load(model, with_versions(config, versions))

    def load_with(self, model: str, config: Mapping[str, Any]) -> None:
        """Load a model with the caller's configuration."""
        self._load(model, config)

    def ask(
        self,
        model: str,
        inputs: NamedArrays,
        *,
        version: int | None = None,
        datatypes: Mapping[str, str] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> NamedArrays:
        """The outputs of one request, by name as its inputs are; of the version that serves, unless one is named."""
        result = self._infer(model, inputs, datatypes or {}, version, timeout_s)
        names = [output.name for output in result.get_response().outputs]
        return {name: result.as_numpy(name) for name in names}

    def probe(self, model: str, *, timeout_s: float) -> str:
        """Have the model answer a generated request; returns the version that did.

        If no request can be generated for it, or it is decoupled and so answers streams only, the server's report that
        it is ready counts. A server of another machine or user does not recognize the request as a probe, and may
        refuse it, which is an answer too.
        """
        from triton_backend.client.probe_inputs import probe_inputs  # as tritonclient above: NumPy is loaded here

        metadata = self._metadata(model, timeout_s / 2)
        inputs = probe_inputs((tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in metadata.inputs)
        if inputs is None:
            return self._reported_version(model, metadata, timeout_s / 2)
        datatypes = {tensor.name: tensor.datatype for tensor in metadata.inputs}
        key = find_key(self._url)
        marked = {"parameters": {PROBE_PARAMETER: key}} if key else {}
        try:
            result = self._infer(model, inputs, datatypes, None, timeout_s / 2, **marked)
        except RefusedRequestError:
            return str(max(metadata.versions, key=int))
        except RemoteError as error:
            if _DECOUPLED not in str(error):
                raise
            return self._reported_version(model, metadata, timeout_s / 2)
        return str(result.get_response().model_version)

    def statistics(self, model: str) -> dict[int, Mapping[str, Any]]:
        """The server's statistics, by loaded version."""
        stats = self._call("get_inference_statistics", model, as_json=True).get("model_stats", [])
        return {int(entry["version"]): entry for entry in stats}

    def _metadata(self, model: str, timeout_s: float) -> Any:
        try:
            return self._call("get_model_metadata", model, timeout_s=timeout_s)
        except RemoteError as error:
            if _UNKNOWN_MODEL in str(error):
                raise RemoteError(
                    f"the server at {self._url} has not loaded a model {model!r}; `hotrow load` loads one that is in "
                    "its repository"
                ) from error
            raise

    def _reported_version(self, model: str, metadata: Any, timeout_s: float) -> str:
        """The version that serves, as far as the server knows."""
        if not self._call("is_model_ready", model, timeout_s=timeout_s):
            raise UnavailableError(
                f"model {model!r} is not ready: it is loading, or its load failed (see `hotrow versions`)"
            )
        return str(max(metadata.versions, key=int))

    def _has_served(self, model: str, versions: Sequence[int]) -> bool:
        """Whether all these versions are loaded, or were before."""
        listed = self.versions(model)
        served = {state.version for state in listed if state.state == "READY" or state.reason == "unloaded"}
        return served.issuperset(versions)

    def _infer(
        self,
        model: str,
        inputs: NamedArrays,
        datatypes: Mapping[str, str],
        version: int | None,
        timeout_s: float,
        **options: Any,
    ) -> Any:
        from tritonclient.utils import np_to_triton_dtype

        tensors = []
        for name, array in inputs.items():
            tensor = self._grpc.InferInput(
                name, list(array.shape), datatypes.get(name) or np_to_triton_dtype(array.dtype)
            )
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        named = "" if version is None else str(version)
        return self._call("infer", model, tensors, model_version=named, timeout_s=timeout_s, **options)

    def _config(self, model: str) -> dict[str, Any]:
        config: dict[str, Any] = self._call("get_model_config", model, as_json=True)["config"]
        return config

    def _load(self, model: str, config: Mapping[str, Any] | None = None) -> None:
        try:
            text = None if config is None else json.dumps(config)
            self._call("load_model", model, config=text, timeout_s=None)
        except RemoteError as error:
            if _NO_SUCH_VERSION in str(error):
                found = "no such version" if config else "no version, or none that version_policy in config.pbtxt names"
                raise NoSuchVersionError(f"the folder of model {model!r} has {found}") from error
            if _NOT_POLLED in str(error):
                raise RemoteError(
                    f"model {model!r}: the server does not find this folder in its repository or cannot read its "
                    "config.pbtxt; see the server's log"
                ) from error
            if _NOT_EXPLICIT in str(error):
                raise RemoteError(
                    f"the server at {self._url} loads models by itself alone; to load them by request, start it with "
                    "--model-control-mode=explicit, as `hotrow serve` does"
                ) from error
            raise

    def _call(self, method: str, *arguments: Any, timeout_s: float | None = CALL_TIMEOUT_S, **options: Any) -> Any:
        try:
            return getattr(self._client, method)(*arguments, headers=self._headers, client_timeout=timeout_s, **options)
        except self._error as error:
            raise self._translated(error, timeout_s) from error

    def _translated(self, error: Any, timeout_s: float | None) -> HotrowError:
        status, message = str(error.status()), str(error.message() or "")
        if status == "StatusCode.DEADLINE_EXCEEDED" or "Deadline Exceeded" in message:
            return UnavailableError(f"{self._url}: no answer within {timeout_s:.3g} seconds")
        if status == "StatusCode.UNAVAILABLE" and ("connect" in message.lower() or "Socket closed" in message):
            return UnavailableError(f"{self._url}: {_why_not_connected(message)}")
        if "restricted" in message:
            way_out = "the key that was given is another" if self._headers else "give --key-file"
            return RemoteError(f"the server at {self._url} does this only for clients with its key; {way_out}")
        kind = RefusedRequestError if status == "StatusCode.INVALID_ARGUMENT" else RemoteError
        return kind(plain_reason(message))


def _why_not_connected(message: str) -> str:
    for sign, reason in _NOT_CONNECTED.items():
        if sign in message:
            return reason
    return "no server answers there; `hotrow serve` starts one, and --url takes the gRPC port of another"


def _state(entry: Mapping[str, str]) -> VersionState:
    state = entry.get("state", "UNAVAILABLE")
    return VersionState(int(entry["version"]), state, entry["reason"])


def plain_reason(message: str) -> str:
    """The reason why a model did not load, as one line, without the place in our code that Triton may add."""
    text = re.sub(r"\n\nAt:\n(?:  .*\n?)*", "", _LOAD_FAILED.sub("", message))
    text = _VERSION_FAILED.sub(r"version \1: ", text)
    text = text.replace("Internal: ", "").replace("TritonModelException: ", "")
    text = _STUB_DIED.sub(STUB_IS_LOST, text)
    return " ".join(text.replace("\0", "").split()).rstrip(";")
