"""`hotrow serve`: start, stop, and all failures of either."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from inference_session.errors import HotrowError
from tests.testing.programs import PROGRAM_S
from tests.testing.served import Serve, Served, is_running, name_of, shared_memory, start
from tests.testing.servers import PATIENCE_S, wait_until
from triton_backend.launcher.command import ServerCommand
from triton_backend.launcher.ports import served_ports
from triton_backend.launcher.server import ServerOptions, TritonServer
from triton_backend.repository.servable import ServableModel

pytestmark = pytest.mark.triton

ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.same(request.inputs()[0])]) for request in requests]

    def same(self, x):
        return pb_utils.Tensor.from_dlpack("y", x.to_dlpack())  # whatever NumPy is installed
"""
CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""


def add_model(repository: Path, name: str, *, code: str | None = ECHO, config: str = CONFIG) -> Path:
    """A model of Triton's own python backend; returns its folder."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    if code is not None:
        (version / "model.py").write_text(code, encoding="utf-8")
    (repository / name / "config.pbtxt").write_text(config, encoding="utf-8")
    return version.parent


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with the models `echo` and `other`."""
    return add_models(tmp_path)


def add_models(folder: Path) -> Path:
    """A repository with the models `echo` and `other`."""
    add_model(folder / "repository", "echo")
    add_model(folder / "repository", "other")
    return folder / "repository"


@pytest.fixture(scope="module")
def linked(tritonserver: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server for tests that do no more than look at it; a link leads to its repository."""
    folder = tmp_path_factory.mktemp("linked")
    link = folder / "a name with 'quotes' and spaces"
    link.symlink_to(add_models(folder))
    (link / "lost+found").mkdir()  # as at the top of a file system
    (link / "begun" / ".tmp-1").mkdir(parents=True)
    for name in ("gone", "echo/latest", "echo/7"):
        (link / name).symlink_to(folder / "absent")
    for name in ("echo/5.tmp", "echo/ +6", f"echo/{2**63}", "other/0"):
        (link / name).mkdir()
    (link / "echo" / "3").mkdir()  # not chosen, and nothing is in it
    with (link / "echo" / "config.pbtxt").open("a", encoding="utf-8") as config:
        config.write("version_policy { specific { versions: [ 1 ] } }")
    served = start(link)
    yield served
    served.close()


def run_serve(repository: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """`hotrow serve` that is expected to end by itself."""
    command = [sys.executable, "-m", "hotrow", "serve", "--repository", str(repository), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S, check=False)


def free_ports() -> list[str]:
    """Flags for free ports."""
    return [flag for name in ("http", "grpc", "metrics") for flag in (f"--{name}-port", "0")]


def free_options(repository: Path, *models: str) -> ServerOptions:
    """The same, where a server is started in this process."""
    return ServerOptions(repository, models, http_port=0, grpc_port=0, metrics_port=0)


def echo(client: Any, module: Any, model: str = "echo") -> None:
    """Send one request and check its answer."""
    x = np.array([[1, 2], [3, 4]], np.float32)
    tensor = module.InferInput("x", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    np.testing.assert_array_equal(client.infer(model, [tensor]).as_numpy("y"), x)


def assert_nothing_left(family: list[psutil.Process], launcher: int) -> None:
    """No process of the family runs, and no shared memory of theirs is left."""
    assert [process for process in family if is_running(process)] == []
    assert shared_memory(launcher) == []


def test_serves_every_model_on_every_endpoint(linked: Served) -> None:
    """All models of the repository answer over HTTP and gRPC, and the metrics are there."""
    with linked.http_client() as client:
        echo(client, tritonclient.http)
        echo(client, tritonclient.http, "other")
    with linked.grpc_client() as client:
        echo(client, tritonclient.grpc)
    with urllib.request.urlopen(linked.metrics) as page:  # noqa: S310  a page of ours
        assert b"nv_inference_count" in page.read()
    addresses = (linked.http, linked.grpc, linked.metrics.removesuffix("/metrics"))
    assert {int(address.rpartition(":")[2]) for address in addresses} <= served_ports()


def test_serves_the_models_asked_for(serve: Serve, repository: Path) -> None:
    """With --model, the others of the repository stay unloaded; what is said to be served is the newest version."""
    shutil.copytree(repository / "other" / "1", repository / "other" / "2")

    served = serve(repository, "--model", "other")

    assert served.announced == "other (version 2)"
    with served.grpc_client() as client:
        assert client.is_model_ready("other")
        assert not client.is_model_ready("echo")


def test_listens_on_this_machine_only(linked: Served) -> None:
    """Without --host no other machine can connect."""
    listening = {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in linked.family()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


def test_what_triton_would_stumble_over_is_hidden(linked: Served) -> None:
    """Links that lead nowhere, and names that are almost versions, harm no other: one line names each of them."""
    with linked.grpc_client() as client:
        index = client.get_model_repository_index(as_json=True)["models"]
        client.load_model("echo")
        echo(client, tritonclient.grpc)
    said = "".join(linked.errors)

    assert [(model["name"], model.get("version")) for model in index if "state" in model] == [
        ("echo", "1"),
        ("other", "1"),
    ]
    assert "model 'begun' is not loaded: its first version is not complete" in said
    for name in ("gone", "echo/latest", "echo/7"):
        assert f"{linked.repository / name}' is hidden from the server: the link leads nowhere" in said.replace(
            '"', "'"
        )
    assert said.count("it is not a version number, but Triton would treat it as one") == 4
    assert len(linked.errors) == 8


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_with_clients_connected_leaves_nothing(serve: Serve, repository: Path, number: signal.Signals) -> None:
    """A signal ends server and stubs, and their shared memory, though clients hold connections."""
    served = serve(repository)
    family = served.family()
    host, port = served.http.split(":")
    with socket.create_connection((host, int(port))) as idle, served.grpc_client() as client:
        idle.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle.recv(100)
        echo(client, tritonclient.grpc)
        assert shared_memory(served.process.pid)

        status = served.stop(number)

    assert status == 0
    assert len(family) >= 4
    assert_nothing_left(family, served.process.pid)


def test_a_signal_while_the_server_is_being_started_leaves_nothing(
    repository: Path, tritonserver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server runs then, but the launcher does not know it yet. It waits until the reaper has ended it."""
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(command: ServerCommand, models: Sequence[ServableModel]) -> subprocess.Popen[bytes]:
        started.append(start_server(command, models))
        raise KeyboardInterrupt

    start_server = ServerCommand.start
    monkeypatch.setattr(ServerCommand, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        TritonServer.start(free_options(repository))
    with started.pop() as server:
        assert server.poll() is not None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("reached", ["tritonserver", "triton_python_b"])
def test_a_signal_during_the_start_leaves_nothing(
    repository: Path, number: signal.Signals, reached: str, tritonserver: None
) -> None:
    """Whether the server has begun, or its backend processes have: all of them end, and so does their shared memory."""
    command = [sys.executable, "-m", "hotrow", "serve", "--repository", str(repository), *free_ports()]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        family: list[psutil.Process] = []

        def has_come_so_far() -> bool:
            assert process.poll() is None
            family[:] = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            return any(name_of(one).startswith(reached) for one in family)

        wait_until(has_come_so_far, f"{reached} to be started")
        process.send_signal(number)
        process.wait(timeout=PATIENCE_S)
    wait_until(lambda: not any(map(is_running, family)), "the end of all processes")
    wait_until(lambda: not shared_memory(process.pid), "the end of their shared memory")


def test_requests_under_way_are_answered_before_the_stop(serve: Serve, tmp_path: Path) -> None:
    """A request that is being computed when the signal comes still gets its answer."""
    begun, go_on = tmp_path / "begun", tmp_path / "go_on"
    waiting = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch()\n"
    waiting += f"        while not pathlib.Path({str(go_on)!r}).exists(): time.sleep(0.01)\n        return ["
    add_model(tmp_path / "repository", "slow", code=ECHO.replace("return [", waiting))
    served = serve(tmp_path / "repository")
    with served.grpc_client() as client, ThreadPoolExecutor() as threads:
        answer = threads.submit(echo, client, tritonclient.grpc, "slow")
        wait_until(begun.exists, "the request to be computed")
        served.process.send_signal(signal.SIGTERM)
        go_on.touch()

        answer.result(timeout=PATIENCE_S)
    assert served.process.wait(timeout=PATIENCE_S) == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, 40])
def test_a_server_that_dies_is_noticed(serve: Serve, repository: Path, number: int) -> None:
    """When the server dies by a signal, the launcher says so, ends with an error, and clears up after it."""
    served = serve(repository)
    family = served.family()

    served.server().send_signal(number)
    status = served.process.wait(timeout=PATIENCE_S)

    assert status == 1
    assert_nothing_left(family, served.process.pid)
    # Of the others the server itself logs where it was.
    if name := {signal.SIGKILL: "SIGKILL", signal.SIGBUS: "SIGBUS", 40: "signal 40"}.get(number):
        wait_until(lambda: any(f"crashed ({name})" in line for line in served.errors), "the signal to be named")


@pytest.mark.parametrize("name", ["http", "grpc", "metrics"])
def test_a_taken_port_is_named(repository: Path, name: str, tritonserver: None) -> None:
    """A port in use ends the command at once, with its number and the flag that changes it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = run_serve(repository, *free_ports(), f"--{name}-port", str(port))

    assert result.returncode == 1
    assert f"port {port} of 127.0.0.1 cannot be used" in result.stderr
    assert f"--{name}-port" in result.stderr


def test_a_model_that_does_not_load_is_named(tmp_path: Path, tritonserver: None) -> None:
    """When a model fails to load, the command ends with the reason."""
    add_model(tmp_path, "good")
    add_model(tmp_path, "bad", code='raise ValueError("no such \\"luck\\"")')

    command = [sys.executable, "-m", "hotrow", "serve", "--repository", str(tmp_path), *free_ports()]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        said = process.communicate(timeout=PROGRAM_S)[1]

    assert process.returncode == 1
    assert "model 'bad' version 1 failed to load: ValueError: no such \"luck\"" in said
    assert shared_memory(process.pid) == []


def test_a_folder_that_no_server_starts_from_is_refused(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tritonserver: None
) -> None:
    """Triton would wait for processes that a shell cannot start."""
    (tmp_path / "of mine").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "of mine"))

    result = run_serve(repository, *free_ports())

    assert result.returncode == 1
    assert "of mine', for temporary files: Triton starts processes through a shell" in result.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "absent"}, "has no model 'absent'; models: 'echo', 'other'"),
        ({"remove": "echo/1/model.py"}, "Triton would wait for it forever"),
        ({"remove": "echo/config.pbtxt"}, "config.pbtxt does not exist"),
        ({"rename": ("echo/1", "echo/1.tmp")}, "contains no version"),
        ({"rename": ("echo/1", "echo/one")}, "contains no version"),
        ({"rename": ("echo", "my echo")}, "model 'my echo': Triton starts its process through a shell"),
        ({"rename": ("echo", "echo;exit")}, "model 'echo;exit': Triton starts its process through a shell"),
        ({"rename": ("echo", "écho")}, "allowed: ASCII letters, digits and any of"),
        ({"config": 'backend: "onnxruntime"'}, "this server has no backend 'onnxruntime'; backends: 'hotrow'"),
        ({"config": 'name: "x" backend: "python"'}, "name is 'x', but the folder is 'echo'"),
        ({"config": "backend: {"}, "not readable as a Triton model configuration: line 1"),
        ({"config": 'backend: "hotrow"'}, "session.json: no such file"),
    ],
)
def test_what_would_hang_or_fail_is_refused(
    repository: Path, change: dict[str, Any], message: str, tritonserver: None
) -> None:
    """A repository that Triton cannot serve is an error before any server is started, which `hotrow serve` prints."""
    if "remove" in change:
        (repository / change["remove"]).unlink()
    if "rename" in change:
        (repository / change["rename"][0]).rename(repository / change["rename"][1])
    if "config" in change:
        (repository / "echo" / "config.pbtxt").write_text(change["config"], encoding="utf-8")
    options = free_options(repository, *([change["model"]] if "model" in change else []))

    with pytest.raises(HotrowError) as refused, TritonServer.start(options):
        pass

    assert message in str(refused.value)


def test_an_unknown_repository_is_refused(tmp_path: Path, tritonserver: None) -> None:
    """A folder that does not exist is an error that names it."""
    result = run_serve(tmp_path / "absent")

    assert result.returncode == 1
    assert "absent: no such folder" in result.stderr


def test_management_can_be_restricted(serve: Serve, repository: Path, tmp_path: Path) -> None:
    """With --restrict-apis only clients that send the key may load models; all clients may infer."""
    key = tmp_path / "key"
    key.write_text("s3cret\n", encoding="utf-8")
    served = serve(repository, "--restrict-apis", str(key))

    with served.grpc_client() as client:
        echo(client, tritonclient.grpc)
        with pytest.raises(InferenceServerException, match="restricted"):
            client.load_model("echo")
        client.load_model("echo", headers={"triton-grpc-protocol-hotrow-key": "s3cret"})
    with served.http_client() as client:
        with pytest.raises(InferenceServerException, match="restricted"):
            client.unload_model("echo")
        client.unload_model("echo", headers={"hotrow-key": "s3cret"})
    assert served.stop() == 0


def test_flags_behind_two_dashes_go_to_the_server(serve: Serve, repository: Path) -> None:
    """Flags of tritonserver that hotrow has none for can be given; with this one, a bad model harms no other."""
    (repository / "broken").mkdir()
    served = serve(repository, "--", "--id=the-server", "--allow-metrics=false", "--exit-on-error=false")

    with urllib.request.urlopen(f"http://{served.http}/v2") as page:
        assert json.loads(page.read())["name"] == "the-server"
    assert served.announced == "echo (version 1)"
    assert served.metrics == ""
    assert f"one model is not loaded: model 'broken': {repository}/broken/config.pbtxt" in "".join(served.errors)


def test_a_server_that_stays_but_cannot_serve_is_an_error(repository: Path, tritonserver: None) -> None:
    """With this flag a server that cannot be initialized does not end: the command ends it, and says why."""
    unusable = ("--", "--exit-on-error=false", "--cache-config=nothing,size=1")
    result = run_serve(repository, *free_ports(), *unusable)

    assert result.returncode == 1
    assert "tritonserver could not be initialized: its last lines:" in result.stderr
    assert "unable to find 'libtritoncache_nothing.so'" in result.stderr


def test_code_in_the_users_folder_is_not_imported(
    serve: Serve, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model.py where the command is run does not get in the way of a model's own code."""
    (tmp_path / "model.py").write_text("raise RuntimeError('not this one')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    served = serve(Path("repository"))

    with served.grpc_client() as client:
        echo(client, tritonclient.grpc)


def test_a_link_to_a_repository_is_followed(linked: Served) -> None:
    """A repository may be given as a symbolic link, with a name of any characters."""
    assert linked.repository.is_symlink()
    with linked.grpc_client() as client:
        assert client.is_model_ready("echo")
