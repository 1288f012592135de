"""Backend processes that die or hang, and what is left when a launcher is killed."""

from __future__ import annotations

import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from inference_session.version_directory.session_file import read_spec
from tests.testing.command_line import hotrow, run_main
from tests.testing.served import Serve, Served, is_ready, is_running
from tests.testing.served_requests import DENSE, IDS, ask, counters
from tests.testing.servers import wait_until
from tests.testing.triton_models import ctr_answer, write_ctr, write_flat
from triton_backend.backend.heartbeat import FOLDER_VARIABLE, INTERVAL_S, last_beat
from triton_backend.launcher import stubs, watchdog
from triton_backend.launcher.server import ServerOptions, TritonServer
from triton_backend.repository.config_writer import write_model_config
from triton_backend.repository.model_config import CONFIG_FILE

pytestmark = pytest.mark.triton


_PYTHON_MODEL = """
import os, pathlib, signal, threading, time

class TritonPythonModel:
    def initialize(self, args):
        {initialize}

    def execute(self, requests): ...

    def finalize(self):
        {finalize}
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two versions of `ctr`."""
    write_ctr(tmp_path / "repository" / "ctr" / "1")
    write_ctr(tmp_path / "repository" / "ctr" / "2", scale=3)
    return tmp_path / "repository"


@pytest.fixture
def two_models(repository: Path) -> Path:
    """The same, and another model."""
    write_flat(repository / "flat" / "1")
    return repository


def await_scale(served: Served, scale: float) -> None:
    """Wait until a version answers that scales its sums so."""
    wait_until(lambda: scale_of(served) == scale, f"an answer scaled by {scale}")


def scale_of(served: Served) -> float | None:
    """The factor by which the version that answers scales its sums; None if none answers."""
    with served.grpc_client() as client:
        try:
            answer = ask(client, "ctr", {"ids": IDS, "dense": DENSE}, client_timeout=5).as_numpy("OUTPUT0")
        except InferenceServerException:
            return None
    return float((answer / ctr_answer(IDS, DENSE)).mean())


def is_healthy(served: Served) -> bool:
    """Whether `hotrow health` says that the server is healthy."""
    return run_main("health", "--model", "ctr", "--url", served.grpc).code == 0


def restarts(served: Served, model: str) -> float:
    """How often the model's backend process was replaced; -1 while there are no metrics."""
    try:
        return counters(served, model=model).get("hotrow_backend_restarts_total", -1)
    except OSError:
        return -1


def await_line(served: Served, text: str) -> None:
    """Wait for a line of the launcher's log."""
    wait_until(lambda: any(text in line for line in served.errors), f"{text!r} in the log")


@pytest.mark.parametrize(("number", "how"), [(signal.SIGKILL, "died"), (signal.SIGSTOP, "is stopped")])
def test_a_lost_backend_process_is_replaced(serve: Serve, two_models: Path, number: signal.Signals, how: str) -> None:
    """Killed or stopped: it is logged and counted, and the same version answers again; other models never stop."""
    served = serve(two_models)
    with served.grpc_client() as client:
        config = client.get_model_config("ctr", as_json=True)["config"]
        assert config["version_policy"] == {"latest": {"num_versions": 1}}
    await_scale(served, 3)
    lost = served.stub("ctr")
    beats = Path(lost.environ()[FOLDER_VARIABLE])
    assert (beats / str(lost.pid)).exists()

    lost.send_signal(number)
    await_line(served, f"backend process {lost.pid} of model 'ctr' version 2 {how}")
    await_line(served, "model 'ctr' serves again")

    # A process that is killed while it shares a lock may take the server down, which is started again then.
    await_scale(served, 3)
    wait_until(lambda: is_healthy(served), "health")
    wait_until(lambda: restarts(served, "ctr") >= 1, "the loss to be counted")
    went_down = any("ended together" in line for line in served.errors)
    assert went_down or restarts(served, "flat") == 0
    wait_until(lambda: not is_running(lost), "the end of the lost process")
    wait_until(lambda: not (beats / str(lost.pid)).exists(), "the end of its heartbeat")
    launcher = psutil.Process(served.process.pid)
    wait_until(lambda: all(is_running(child) for child in launcher.children()), "the end of the lost process's guard")
    assert served.stop() == 0


def test_the_other_instances_of_a_lost_process_end(
    tritonserver: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Triton does not end them where it has refused requests of the lost one; that they end is no loss."""
    monkeypatch.setattr(watchdog, "DRAIN_S", 1.0)
    version = tmp_path / "repository" / "ctr" / "1"
    write_ctr(version)
    (version.parent / CONFIG_FILE).unlink()
    write_model_config(version, read_spec(version), "ctr", num_instances=2)
    options = ServerOptions(tmp_path / "repository", http_port=0, grpc_port=0, metrics_port=0)
    # A process that is killed while it shares a lock takes the server down: that says nothing about other instances.
    assert any(is_loss_of_one(options, monkeypatch, capsys) for _ in range(5))


def is_loss_of_one(options: ServerOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether the server went on when one of two instances was killed; it has to count one loss, and answer again."""
    with (
        monkeypatch.context() as patched,
        TritonServer.start(options) as server,
        grpc_client.InferenceServerClient(server.endpoints["gRPC"]) as client,
    ):
        lost, other = (process for process in psutil.Process(server.pid).children() if is_running(process))
        lost.kill()
        wait_until(lambda: not is_answered(client), "a request that is refused")

        wait_until(lambda: is_gone(other, server), "the end of the other instance")
        patched.setattr(watchdog, "DEAD_S", 0.0)
        for _ in range(2):
            server._watchdog.look()

        wait_until(lambda: is_answered(client) or server._has_ended(), "an answer")
        goes_on = not server._has_ended()
    losses = [line for line in capsys.readouterr().err.splitlines() if " died " in line]
    assert not goes_on or losses == [f"hotrow: backend process {lost.pid} of model 'ctr' version 1 died of SIGKILL"]
    return goes_on


def is_answered(client: Any) -> bool:
    """Whether a request is answered."""
    try:
        ask(client, "ctr", {"ids": IDS, "dense": DENSE})
    except InferenceServerException:
        return False
    return True


def is_gone(process: psutil.Process, server: TritonServer) -> bool:
    """Whether a process has ended, after another look of the watch-dog."""
    server._watchdog.look()
    return not is_running(process)


def test_a_backend_process_that_dies_before_it_is_seen_is_replaced(serve: Serve, repository: Path) -> None:
    """On a busy machine, one can be loaded and die between two looks of the watch-dog."""
    served = serve(repository)
    launcher = psutil.Process(served.process.pid)
    launcher.suspend()
    hotrow("load", "ctr", "--version", "1", "--url", served.grpc)
    lost = served.stub("ctr", version=1)
    lost.kill()
    wait_until(lambda: not is_running(lost), "its end")
    launcher.resume()

    await_line(served, f"backend process {lost.pid} of model 'ctr' version 1 died")
    await_line(served, "model 'ctr' serves again")
    await_scale(served, 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_health_notices_without_a_watchdog(serve: Serve, repository: Path, number: signal.Signals) -> None:
    """If no launcher replaces a lost process, as on a server not started by us, `hotrow health` still reports it."""
    served = serve(repository)
    launcher = psutil.Process(served.process.pid)
    launcher.suspend()
    served.stub("ctr").send_signal(number)

    ended = run_main("health", "--model", "ctr", "--url", served.grpc)

    launcher.kill()  # which takes less time than a stop that waits for the lost process
    served.process.wait()
    assert ended.code == 1
    assert ended.err.count("\n") == 1


def test_a_model_of_any_allowed_name_is_replaced(serve: Serve, repository: Path) -> None:
    """Triton does not decode what is escaped in an URL; and the models that follow such a name are replaced too."""
    name = "a+b@c,d=e%20"
    shutil.copytree(repository / "ctr", repository / name)
    config = repository / name / "config.pbtxt"
    config.write_text(config.read_text(encoding="utf-8").replace('"ctr"', f'"{name}"'), encoding="utf-8")
    served = serve(repository)
    await_scale(served, 3)

    for model in (name, "ctr"):
        served.stub(model).kill()
        await_line(served, f"model {model!r} serves again")

    await_scale(served, 3)
    assert served.stop() == 0


def test_the_version_that_was_chosen_comes_back(serve: Serve, repository: Path) -> None:
    """A loss does not undo a roll-back, nor load a version that was only published; a bare load then does."""
    served = serve(repository)
    hotrow("roll-back", "ctr", "--url", served.grpc)
    write_ctr(repository / "ctr" / "3", scale=5)

    served.stub("ctr", version=1).kill()
    await_line(served, "model 'ctr' serves again")
    await_scale(served, 1)

    load_ctr(served)
    await_scale(served, 5)


def test_a_version_whose_folder_is_gone_is_replaced_by_the_highest(serve: Serve, repository: Path) -> None:
    """Else the model would not be served until somebody loads it."""
    served = serve(repository)
    await_scale(served, 3)
    shutil.rmtree(repository / "ctr" / "2")

    served.stub("ctr", 2).kill()

    await_scale(served, 1)
    wait_until(lambda: "version 2 is gone; loading version 1" in "".join(served.errors), "a message")


def test_a_model_that_cannot_be_loaded_again_can_be_unloaded(serve: Serve, repository: Path) -> None:
    """An unload wins over the retries of the load."""
    served = serve(repository)
    lost = served.stub("ctr")
    network = (repository / "ctr" / "2" / "dense.onnx").rename(repository / "dense.onnx")
    lost.kill()
    await_line(served, "model 'ctr' could not be loaded again")

    with served.grpc_client() as client:
        with suppress(InferenceServerException):  # it may have gone down with the process, and its models with it
            client.unload_model("ctr")
        wait_until(
            lambda: any("stays unloaded" in line or "ended together" in line for line in served.errors), "either"
        )

        network.rename(repository / "ctr" / "2" / "dense.onnx")
        if not any("ended together" in line for line in served.errors):
            assert not is_ready(client, "ctr")
            client.load_model("ctr")
    await_scale(served, 3)


def test_a_load_that_is_under_way_when_a_process_is_lost_is_not_undone(serve: Serve, repository: Path) -> None:
    """Another version that is loaded while the serving one hangs is served, whatever the watch-dog does."""
    served = serve(repository)
    lost = served.stub("ctr")

    with ThreadPoolExecutor(1) as thread:
        load = thread.submit(hotrow, "load", "ctr", "--version", "1", "--url", served.grpc)
        wait_until(lambda: load.done() or bool(served.stubs("ctr", 1)), "the load to begin")
        with suppress(psutil.NoSuchProcess):  # the load has been faster
            lost.suspend()
    load.result()
    wait_until(lambda: not is_running(lost), "the end of the lost process")

    await_scale(served, 1)


def test_a_server_that_goes_down_with_a_backend_process_is_started_again(serve: Serve, repository: Path) -> None:
    """Its ports, models and versions come back; the loss is counted."""
    served = serve(repository)
    hotrow("load", "ctr", "--version", "1", "--url", served.grpc)
    server = served.server()
    lost = served.stub("ctr", version=1)
    lost.kill()
    await_line(served, f"backend process {lost.pid}")

    with suppress(psutil.NoSuchProcess):  # it may have gone down by itself
        server.send_signal(signal.SIGABRT)
    await_line(served, "tritonserver ended together")
    await_scale(served, 1)

    wait_until(lambda: restarts(served, "ctr") >= 1, "the loss to be counted")
    assert served.stop() == 0


@pytest.mark.parametrize("victims", [["launcher"], ["launcher", "tritonserver"]])
@pytest.mark.parametrize("loading", [False, True])
def test_a_killed_launcher_leaves_nothing(serve: Serve, two_models: Path, victims: list[str], loading: bool) -> None:
    """Server, stubs (a stopped one too) and shared memory are gone soon after, also in the middle of a load."""
    served = serve(two_models)
    served.stub("flat").suspend()
    with ThreadPoolExecutor(1) as thread:
        if loading:
            old = served.stub("ctr")
            (two_models / "ctr" / "2" / "touched").touch()
            thread.submit(load_ctr, served)
            wait_until(lambda: any(stub != old for stub in served.stubs("ctr")), "a new backend process")
        family = served.family()
        assert shared_memory_of(served)

        if "tritonserver" in victims:
            served.server().kill()
        served.process.kill()
        served.process.wait()

    wait_until(lambda: not any(is_running(process) for process in family), "the end of all processes")
    wait_until(lambda: not shared_memory_of(served), "the end of their shared memory")


def shared_memory_of(served: Served) -> list[Path]:
    """The regions of its backend processes."""
    return list(Path("/dev/shm").glob(f"hotrow_{served.process.pid}_*"))  # noqa: S108


def load_ctr(served: Served) -> None:
    """A load by a bare client."""
    with served.grpc_client() as client:
        client.load_model("ctr")


def test_backend_processes_do_not_outlive_a_server_of_others(serve: Serve, repository: Path) -> None:
    """If no launcher clears up after a killed server, they notice, exit and remove their shared memory."""
    served = serve(repository)
    launcher, *others = served.family()
    reaper = next(process for process in others if "reaper.py" in " ".join(process.cmdline()))
    stubs = served.stubs()
    memory = [Path("/dev/shm", stub.cmdline()[2]) for stub in stubs]  # noqa: S108
    folder = Path(stubs[0].environ()[FOLDER_VARIABLE]).parent
    reaper.kill()
    launcher.suspend()

    served.server().kill()

    wait_until(lambda: not any(is_running(stub) for stub in stubs), "the end of the backend processes")
    wait_until(lambda: not any(path.exists() for path in memory), "the end of their shared memory")
    launcher.kill()
    served.process.wait()
    shutil.rmtree(folder)


def test_a_backend_process_that_is_held_in_a_call_does_not_outlive_its_server(serve: Serve, repository: Path) -> None:
    """Its call into Triton's metrics holds the interpreter when server, launcher and reaper are killed."""
    served = serve(repository)
    family = served.family()
    launcher, server = family[0], served.server()
    reaper = next(process for process in family if "reaper.py" in " ".join(process.cmdline()))
    beats = Path(served.stubs()[0].environ()[FOLDER_VARIABLE])
    launcher.suspend()
    server.suspend()  # which keeps the calls that come from returning
    wait_until(lambda: all(is_silent(beats, stub) for stub in served.stubs()), "the processes to be held")

    for process in (reaper, launcher, server):
        process.kill()
    served.process.wait()

    wait_until(lambda: not any(is_running(process) for process in family), "the end of all processes")
    wait_until(lambda: not shared_memory_of(served), "the end of their shared memory")
    shutil.rmtree(beats.parent)


def is_silent(beats: Path, stub: psutil.Process) -> bool:
    """Whether a backend process has missed its last beats."""
    beat = last_beat(beats, stub.pid)
    return beat is not None and time.monotonic() - beat > 4 * INTERVAL_S


def test_readiness_survives_failed_loads(serve: Serve, repository: Path) -> None:
    """/v2/health/ready stays 200 while versions come, go and fail."""
    served = serve(repository)
    with served.http_client() as http, served.grpc_client() as grpc:
        write_ctr(repository / "ctr" / "3", scale=5)
        (repository / "ctr" / "3" / "session.json").write_text("{", encoding="utf-8")
        with pytest.raises(InferenceServerException):
            grpc.load_model("ctr")
        assert http.is_server_ready()
    await_scale(served, 3)


def add_python_model(repository: Path, initialize: str, finalize: str = "pass", *, name: str = "python") -> None:
    """A model whose process does this as it is loaded and unloaded."""
    code = repository / name / "1" / "model.py"
    code.parent.mkdir(parents=True)
    code.write_text(_PYTHON_MODEL.format(initialize=initialize, finalize=finalize), encoding="utf-8")
    tensors = (f'{kind} {{ name: "{kind}" data_type: TYPE_FP32 dims: 2 }}' for kind in ("input", "output"))
    (repository / name / CONFIG_FILE).write_text("\n".join(['backend: "python"', *tensors]), encoding="utf-8")


def test_a_start_that_waits_for_a_process_it_gave_up_is_begun_again(
    serve: Serve, tmp_path: Path, tritonserver: None
) -> None:
    """Triton takes a process that gets no processor for dead, and frees its memory: it crashes, or waits for it."""
    marker = tmp_path / "stopped"
    stops = f"marker = pathlib.Path({str(marker)!r})\n"
    stops += "        is_first = not marker.exists()\n"
    stops += "        marker.write_text(f'{os.getppid()} {os.getpid()}')\n"
    stops += "        is_first and os.kill(os.getpid(), signal.SIGSTOP)"
    add_python_model(tmp_path / "repository", stops)
    with ThreadPoolExecutor(1) as thread:
        start = thread.submit(serve, tmp_path / "repository")
        wait_until(lambda: marker.exists() and len(marker.read_text("utf-8").split()) == 2, "the process to stop")
        server, stopped = map(int, marker.read_text("utf-8").split())
        wait_until(lambda: stopped in stubs.awaited(server), "the server to give it up")
        os.kill(stopped, signal.SIGCONT)

        served = start.result()
    assert served.announced == "python (version 1)"
    await_line(served, "tritonserver took a backend process for dead while it loaded, and is started again")


def test_a_load_whose_process_does_not_end_fails(
    tritonserver: None, two_models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that has not loaded its model has to end; Triton would wait for it, and the load call, without end."""
    monkeypatch.setattr(watchdog, "AWAITED_S", 0.0)
    monkeypatch.setattr(watchdog, "OBSERVE_S", 0.0)
    options = ServerOptions(two_models, models=("flat",), http_port=0, grpc_port=0, metrics_port=0)
    add_python_model(
        two_models, 'threading.Thread(target=time.sleep, args=(1000,)).start()\n        raise OSError("no")'
    )
    with (
        TritonServer.start(options) as server,
        grpc_client.InferenceServerClient(server.endpoints["gRPC"]) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        load = thread.submit(client.load_model, "python")
        wait_until(lambda: server._watchdog.look() or load.done(), "the load to fail")

        with pytest.raises(InferenceServerException, match="no"):
            load.result()
        assert is_ready(client, "flat")
    said = "of model 'python' version 1 has not ended, although the server gave it up"
    assert said in capsys.readouterr().err


def test_a_process_that_takes_long_to_end_is_left_alone(
    tritonserver: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server waits for an unloaded one as it does for one that it gave up, also while it loads another model."""
    monkeypatch.setattr(watchdog, "AWAITED_S", -1.0)
    monkeypatch.setattr(watchdog, "OBSERVE_S", 0.0)
    loads, ends, may_go_on, ended = (tmp_path / name for name in ("loads", "ends", "may_go_on", "ended"))
    waits = f"while not os.path.exists({str(may_go_on)!r}): time.sleep(0.01)"
    touch = "pathlib.Path({!r}).touch()\n        ".format
    repository = tmp_path / "repository"
    add_python_model(repository, "pass", touch(str(ends)) + waits + "\n        " + touch(str(ended)), name="slow")
    add_python_model(repository, touch(str(loads)) + waits)
    options = ServerOptions(repository, models=("slow",), http_port=0, grpc_port=0, metrics_port=0)
    with (
        TritonServer.start(options) as server,
        grpc_client.InferenceServerClient(server.endpoints["gRPC"]) as client,
        ThreadPoolExecutor(2) as threads,
    ):
        [slow] = stubs.children(server.pid)
        load = threads.submit(client.load_model, "python")
        wait_until(loads.exists, "the load")
        unload = threads.submit(client.unload_model, "slow")
        wait_until(ends.exists, "the unload")
        wait_until(lambda: slow in stubs.awaited(server.pid), "the server to wait for its end")
        for _ in range(3):
            server._watchdog.look()
        may_go_on.touch()
        load.result()
        unload.result()
        wait_until(lambda: not stubs.state(slow), "its end")
    assert ended.exists()


def test_a_process_that_is_given_up_as_a_version_is_loaded_again_is_found(
    tritonserver: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server calls the version ready all the while."""
    monkeypatch.setattr(watchdog, "AWAITED_S", -1.0)
    monkeypatch.setattr(watchdog, "OBSERVE_S", 0.0)
    fails = tmp_path / "fails"
    initialize = f"if not os.path.exists({str(fails)!r}): return\n        "
    initialize += 'threading.Thread(target=time.sleep, args=(1000,)).start()\n        raise OSError("no")'
    add_python_model(tmp_path / "repository", initialize)
    options = ServerOptions(tmp_path / "repository", http_port=0, grpc_port=0, metrics_port=0)
    with (
        TritonServer.start(options) as server,
        grpc_client.InferenceServerClient(server.endpoints["gRPC"]) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        server._watchdog.look()
        fails.touch()
        for changed in (CONFIG_FILE, "1/model.py"):  # Triton keeps a version whose files are as before
            os.utime(tmp_path / "repository" / "python" / changed)
        load = thread.submit(client.load_model, "python")
        wait_until(lambda: server._watchdog.look() or load.done(), "the load to fail")

        with pytest.raises(InferenceServerException, match="no"):
            load.result()
        assert server.served_versions() == {"python": [1]}
