"""A tritonserver as a child process: started with safe flags, watched, and stopped with nothing left behind.

This module works around what the server does not do:
* it finds a taken port only after it has loaded its models; the ports are reserved first;
* a client's idle HTTP connection keeps it from unloading on SIGTERM, so models are unloaded before SIGTERM is sent;
* killed, it leaves its stub processes and their shared memory: it runs in a separate process group, and names its
  shared memory by a unique prefix, so that both can be found, by a reaper if we have been killed as well;
* after a crash it can linger with its ports open: its log is watched for the crash message;
* it does not notice that a stub is dead or hung: watchdog.py does;
* some kinds of requests crash it: with `--front`, nginx blocks them (front.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args
from urllib.error import HTTPError

from inference_session.errors import ConfigurationError, HotrowError, UnavailableError
from inference_session.platform.signal_names import signal_name
from triton_backend.client.probe import SERVE_FOLDER_PREFIX
from triton_backend.client.server import RESTRICTED_HEADER, STUB_IS_LOST, RemoteServer
from triton_backend.launcher import reaper
from triton_backend.launcher.command import (
    EXIT_TIMEOUT_S,
    Endpoint,
    ServerCommand,
    ServerOptions,
    plain_path,
    with_ports,
)
from triton_backend.launcher.front import Front, find_nginx
from triton_backend.launcher.installation import Installation, find_installation
from triton_backend.launcher.log import ServerLog, say
from triton_backend.launcher.ports import authority, reachable
from triton_backend.launcher.process_group import end_group, reap_orphans
from triton_backend.launcher.reaper import remove_shared_memory
from triton_backend.launcher.watchdog import POLL_S, Watchdog, ready_versions
from triton_backend.repository.servable import (
    IN_PLACE_BACKENDS,
    VIEW_FOLDER,
    ServableModel,
    begun_models,
    find_models,
    in_url,
    incomplete_models,
    is_plain,
    misread_entries,
)
from triton_backend.repository.view import RepositoryView, has_gpu

__all__ = ["ServerError", "ServerOptions", "TritonServer"]

UNLOAD_TIMEOUT_S = 12.0
"""How long a stop waits for requests in flight and for models to close."""
EMPTY_EXIT_TIMEOUT_S = 2.0
"""How long a server without models may take to end. One that waits for clients to disconnect, or has failed to load a
model, would take all of EXIT_TIMEOUT_S, and then give up."""
LOAD_TIMEOUT_S = 3600.0
MAX_RESTARTS = 5
"""How often a server that goes down with its backend processes is started again."""
_POLL_S = 0.05
_GO_ON_FLAG = "--exit-on-error=false"
"""Triton's own: it starts although models fail."""
_NO_METRICS_FLAG = "--allow-metrics=false"
"""Triton's own: nothing listens on the port of metrics."""


class ServerError(HotrowError, RuntimeError):
    """The server did not start, or ended by itself; the message says why."""


class TritonServer:
    """A running server; a context manager that stops it."""

    def __init__(
        self, options: ServerOptions, models: list[ServableModel], command: ServerCommand, cleanup: contextlib.ExitStack
    ) -> None:
        self.options = options
        """The options as given, with resolved ports."""
        self._command = command
        self._cleanup = cleanup
        self._process = command.start(models)
        cleanup.callback(self._end)
        self._log = ServerLog(self._process.stdout, verbose=options.verbose)  # type: ignore[arg-type]  # it is a PIPE
        self._front = Front(options, command.folder) if options.front else None
        self._num_restarts = 0
        self._watchdog = Watchdog(self)

    @classmethod
    def start(cls, options: ServerOptions, installation: Installation | None = None) -> TritonServer:
        """Start a server and return it when it is ready, however long its models take to load.

        Args:
            installation: the server to run; None: the one that `find_installation` finds.

        Raises:
            ConfigurationError: the repository, a model or a port cannot be used.
            ServerNotFoundError: there is no server for this Python.
            ServerError: the server ended before it was ready; the message says why.
        """
        installation = installation or find_installation()
        if options.front:
            find_nginx()
        with contextlib.ExitStack() as cleanup:
            folder = Path(cleanup.enter_context(_temporary_folder()))
            backends = installation.prepare(folder)
            repository = options.repository.absolute()
            models = find_models(
                repository,
                options.models,
                backends=sorted(path.name for path in backends.iterdir()),
                leave_out=_leave_out if _GO_ON_FLAG in options.extra_flags else None,
            )
            if _hide(repository, models) or any(model.backend in IN_PLACE_BACKENDS for model in models):
                repository = cleanup.enter_context(_adapted(repository, folder / VIEW_FOLDER))
            completes = _are_to_complete(options.repository)
            options = replace(options, repository=plain_path(repository, folder), complete_configs=completes)
            options = cleanup.enter_context(with_ports(options))
            command = ServerCommand.of(options, installation, backends, folder)
            cleanup.enter_context(_reaper(command.memory_prefix, folder))
            command.heartbeats.mkdir()
            server = cls(options, models, command, cleanup)
            server._await_ready(models)
            if server._front is not None:
                cleanup.callback(server._front.stop)
                server._front.start()
            server._watchdog.look()  # before the server is announced as ready: processes lost from now on are noticed
            server._cleanup = cleanup.pop_all()
            return server

    @property
    def pid(self) -> int:
        """The server's process, which leads the process group of its stubs."""
        return self._process.pid

    @property
    def repository(self) -> Path:
        """The model repository as the server sees it."""
        return self.options.repository

    @property
    def heartbeats(self) -> Path:
        """The folder where backend processes beat."""
        return self._command.heartbeats

    @property
    def probe_key(self) -> str:
        """What marks a request as a probe (probe.py)."""
        return self._command.probe_key

    @property
    def endpoints(self) -> dict[str, str]:
        """The addresses of `HTTP`, `gRPC` and, unless a flag turns them off, `metrics`."""
        http, grpc, metrics = (
            authority(self.options.host_of(endpoint), self.options.port_of(endpoint)) for endpoint in get_args(Endpoint)
        )
        endpoints = {"HTTP": f"http://{http}", "gRPC": grpc, "metrics": f"http://{metrics}/metrics"}
        if _NO_METRICS_FLAG in self.options.extra_flags:
            del endpoints["metrics"]
        return endpoints

    def served_versions(self) -> dict[str, list[int]]:
        """The versions that answer, ascending, by model; by default Triton serves a folder's highest version.

        Raises:
            ServerError: the server no longer answers; the message has its last lines.
        """
        try:
            return ready_versions(self._index())
        except (OSError, HTTPException) as error:
            raise ServerError(f"tritonserver no longer answers ({error}): {self._log.reason()}") from error

    def wait(self) -> None:
        """Watch the backend processes. Never returns; ServerError says how the server ended by itself."""
        while True:
            if self._front is not None:
                self._front.look()
            reap_orphans(self._process)
            if not self._has_ended():
                self._watchdog.look()
            elif self._was_taken_down():
                self._watchdog.lose_all()
                self._restart()
                self._watchdog.reload_all()
            else:
                raise ServerError(self._explain_end())
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Finish requests in flight, unload the models, end the server and remove all that it left. Idempotent.

        Takes at most 25 seconds.
        """
        with self._cleanup:
            if self._front is not None:
                self._front.stop()
            if self._has_ended():
                return
            # If its HTTP endpoint is off, it unloads on SIGTERM.
            timeout_s = EXIT_TIMEOUT_S + 2.0
            with contextlib.suppress(OSError, HTTPException):
                if self._unload_models():
                    timeout_s = EMPTY_EXIT_TIMEOUT_S
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)

    def __enter__(self) -> TritonServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _await_ready(self, models: Sequence[ServableModel] = ()) -> None:
        """Wait until it has loaded these models, which it does again where it gave up a backend process."""
        while not self._is_ready():
            self._watchdog.end_given_up()
            if self._has_ended() or self._has_failed():
                if not self._gave_up_a_process():
                    raise ServerError(self._explain_end())
                say("tritonserver took a backend process for dead while it loaded, and is started again")
                self._start_again(models)
            time.sleep(_POLL_S)
        self._log.server_is_ready()

    def _gave_up_a_process(self) -> bool:
        """Whether a load failed because of a backend process that lives, but got no processor for some seconds."""
        was_given_up = STUB_IS_LOST in self._log.reason() and self._watchdog.lost_one_lately()
        return self._num_restarts < MAX_RESTARTS and (self._log.lost_lock or was_given_up)

    def _was_taken_down(self) -> bool:
        """Whether it ended because a backend process was lost, and starting it again may help."""
        code = self._process.poll()
        crashed = code is None or code < 0
        return (
            crashed and self._num_restarts < MAX_RESTARTS and (self._log.lost_lock or self._watchdog.lost_one_lately())
        )

    def _restart(self) -> None:
        """Start the server again on its ports, with no model loaded."""
        say("tritonserver ended together with a backend process and is being restarted")
        self._start_again([])
        self._await_ready()

    def _start_again(self, models: Sequence[ServableModel]) -> None:
        self._num_restarts += 1
        self._end()
        self._process = self._command.start(models)
        self._log = ServerLog(self._process.stdout, verbose=self.options.verbose)  # type: ignore[arg-type]

    def _end(self) -> None:
        """Kill the rest of the server and its stubs, and remove their shared memory."""
        end_group(self._process)
        remove_shared_memory(self._command.memory_prefix)

    def _is_ready(self) -> bool:
        """Endpoints open once every model has been loaded."""
        try:
            self.request("GET", "v2/health/ready")
        except (OSError, HTTPException):
            return False
        return True

    def _has_failed(self) -> bool:
        """Whether it says that it could not be initialized: with `--exit-on-error=false` it stays even so, useless."""
        try:
            self.request("GET", "v2/health/live")
        except HTTPError as error:
            return error.code == HTTPStatus.BAD_REQUEST
        except (OSError, HTTPException):
            return False  # it does not listen yet
        return False

    def _has_ended(self) -> bool:
        return self._process.poll() is not None or self._log.crashed.is_set()

    def _explain_end(self) -> str:
        code = self._process.poll()
        if code is None:
            how = "crashed" if self._log.crashed.is_set() else "could not be initialized"
        else:
            how = f"crashed ({signal_name(-code)})" if code < 0 else f"ended with exit status {code}"
        return f"tritonserver {how}: {self._log.reason()}"

    def _unload_models(self) -> bool:
        """Unload all models; returns whether all requests were answered and all models closed in time."""
        deadline = time.monotonic() + UNLOAD_TIMEOUT_S
        for name in self._loaded_models():
            path = f"v2/repository/models/{in_url(name)}/unload"
            self.request("POST", path, timeout=deadline - time.monotonic())
        while (left := self._loaded_models()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return not left

    def _loaded_models(self) -> set[str]:
        """The models of which a version is loaded, being loaded or being unloaded."""
        return {entry["name"] for entry in self._index() if entry.get("state", "UNAVAILABLE") != "UNAVAILABLE"}

    def _index(self) -> list[dict[str, str]]:
        """The server's entry for each version that it knows, and for each model without a version."""
        index: list[dict[str, str]] = json.loads(self.request("POST", "v2/repository/index"))
        return index

    def load(self, model: str, config: Mapping[str, Any]) -> None:
        """Load a model with a configuration, however long it takes; HotrowError or OSError where that fails.

        Over gRPC if possible: over HTTP other clients of the server would have to wait.
        """
        if importlib.util.find_spec("tritonclient") and importlib.util.find_spec("grpc"):
            try:
                with self._as_client() as server:
                    return server.load_with(model, config)
            except (UnavailableError, ConfigurationError):
                if self.options.own_tls is None:
                    raise  # else the clients' authority may differ from the server's, or the certificate is outdated
        body = json.dumps({"parameters": {"config": json.dumps(config)}}).encode()
        self.request("POST", f"v2/repository/models/{in_url(model)}/load", body, timeout=LOAD_TIMEOUT_S)
        return None

    def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] = MappingProxyType({}),
        timeout: float = 2.0,
    ) -> bytes:
        """Call the server's HTTP endpoint; OSError or HTTPException where it fails."""
        url = f"http://{self._own_address('http')}/{path}"
        request = urllib.request.Request(url, method=method, headers=dict(headers))
        if method == "POST":
            request.data = body
        if self.options.restricted_key is not None:
            request.add_header(RESTRICTED_HEADER, self.options.restricted_key)
        with _direct.open(request, timeout=max(timeout, 0.1)) as response:
            return bytes(response.read())

    def _as_client(self) -> RemoteServer:
        tls = self.options.own_tls.own_client() if self.options.own_tls else None
        return RemoteServer(self._own_address("grpc"), restricted_key=self.options.restricted_key, tls=tls)

    def _own_address(self, endpoint: Endpoint) -> str:
        host, port = self.options.listens_at(endpoint)
        return authority(reachable(host), port)


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Connects to our own server directly, ignoring proxies of the environment."""


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for the server's files; ConfigurationError if the server could not be started from there."""
    if not is_plain(tempfile.gettempdir()):
        raise ConfigurationError(
            f"{tempfile.gettempdir()!r}, for temporary files: Triton starts processes through a shell, which would "
            "misread this name; set TMPDIR to another folder"
        )
    return tempfile.TemporaryDirectory(prefix=SERVE_FOLDER_PREFIX)


def _hide(repository: Path, models: Sequence[ServableModel]) -> bool:
    """Say what is not served; returns whether Triton has to see a view without it."""
    for folder in begun_models(repository):
        say(f"model {folder.name!r} is not loaded: its first version is not complete")
    hidden = misread_entries(repository, models)
    for path, reason in hidden:
        say(f"{str(path)!r} is hidden from the server: {reason}; remove or rename it")
    return bool(hidden)


def _are_to_complete(repository: Path) -> bool:
    names = incomplete_models(repository)
    if names:
        say(
            f"config.pbtxt of {', '.join(map(repr, names))} lacks inputs or outputs; Triton asks the backend for them, "
            "and each load of a model in Python or of hotrow starts one process more"
        )
    return bool(names)


def _leave_out(error: HotrowError) -> None:
    say(f"one model is not loaded: {error}")


@contextlib.contextmanager
def _adapted(repository: Path, folder: Path) -> Iterator[Path]:
    """A view of the repository in which HugeCTR users' config.pbtxt is rewritten for this server."""
    with RepositoryView.followed(repository, folder, has_gpu=has_gpu()) as view:
        if view.moved_to_cpu:
            names = ", ".join(sorted(view.moved_to_cpu))
            say(f"no GPU on this machine; models of KIND_GPU run on the CPU: {names}")
        yield folder


@contextlib.contextmanager
def _reaper(memory_prefix: str, folder: Path) -> Iterator[None]:
    """Start a reaper that cleans up if we are killed, or interrupted: perhaps while a server is started that nobody
    knows yet.
    """
    program = [sys.executable, "-I", "-S", reaper.__file__]
    process = subprocess.Popen(program, stdin=subprocess.PIPE, cwd="/", text=True, start_new_session=True)
    assert process.stdin is not None  # noqa: S101  it was opened as a PIPE
    last_line = ""
    try:
        process.stdin.write(json.dumps({"memory_prefix": memory_prefix, "folder": str(folder)}) + "\n")
        process.stdin.flush()
        yield
        last_line = "done\n"
    finally:
        process.communicate(last_line)  # `with process` waits for a quarter of a second only after an interruption
