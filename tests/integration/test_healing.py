"""Backend processes that die or hang, and what is left when a launcher is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from tritonclient.utils import InferenceServerException

from tests.integration.conftest import Serve, Served
from tests.integration.models import ctr_answer, write_ctr, write_flat
from tests.integration.test_requests import DENSE, IDS, ask, counters

pytestmark = pytest.mark.triton


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two versions of `ctr`, and another model."""
    write_ctr(tmp_path / "repository" / "ctr" / "1")
    write_ctr(tmp_path / "repository" / "ctr" / "2", scale=3)
    write_flat(tmp_path / "repository" / "flat" / "1")
    return tmp_path / "repository"


def stub_of(served: Served, model: str) -> psutil.Process:
    """The backend process of a model."""
    for process in served.family():
        try:
            arguments = process.cmdline()
        except psutil.ZombieProcess:
            continue
        if f"{model}_0_0" in arguments:
            return process
    raise AssertionError(f"no backend process of {model!r}")


def scale_of(served: Served, *, timeout_s: float = 5) -> float | None:
    """By what the version that answers scales its sums; None where none answers."""
    with served.grpc_client() as client:
        try:
            answer = ask(client, "ctr", {"ids": IDS, "dense": DENSE}, client_timeout=timeout_s).as_numpy("OUTPUT0")
        except InferenceServerException:
            return None
    return float((answer / ctr_answer(IDS, DENSE)).mean())


def until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds; a failure after two minutes, whatever else the machine does."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def health(served: Served) -> subprocess.CompletedProcess[str]:
    """`hotrow health`, as a probe runs it."""
    command = [sys.executable, "-m", "hotrow", "health", "--model", "ctr", "--url", served.grpc]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("number", "how"), [(signal.SIGKILL, "died"), (signal.SIGSTOP, "is stopped")])
def test_a_lost_backend_process_is_replaced(serve: Serve, repository: Path, number: signal.Signals, how: str) -> None:
    """Killed or stopped: it is logged and counted, and the version that served answers again; others never stop."""
    served = serve(repository)
    with served.grpc_client() as client:
        config = client.get_model_config("ctr", as_json=True)["config"]
        assert config["version_policy"] == {"latest": {"num_versions": 1}}
    assert scale_of(served) == 3
    lost = stub_of(served, "ctr")

    lost.send_signal(number)
    said = f"backend process {lost.pid} of model 'ctr' version 2 {how}"
    until(lambda: any(said in line for line in served.errors))
    until(lambda: scale_of(served) == 3)

    assert health(served).returncode == 0
    assert counters(served, model="ctr")["hotrow_backend_restarts_total"] == 1
    assert counters(served, model="flat")["hotrow_backend_restarts_total"] == 0
    until(lambda: not Path(f"/proc/{lost.pid}").exists() or lost.status() == psutil.STATUS_ZOMBIE)
    assert served.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_health_notices_without_a_watchdog(serve: Serve, repository: Path, number: signal.Signals) -> None:
    """Where nobody replaces a lost process, as on a server of others, `hotrow health` still tells."""
    served = serve(repository)
    launcher = psutil.Process(served.process.pid)
    launcher.suspend()
    stub_of(served, "ctr").send_signal(number)

    result = health(served)

    launcher.resume()
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1


def test_the_version_that_was_chosen_comes_back(serve: Serve, repository: Path) -> None:
    """A loss does not undo a roll-back, nor load a version that was published and not loaded; a bare load then does."""
    served = serve(repository)
    command = [sys.executable, "-m", "hotrow", "roll-back", "ctr", "--url", served.grpc]
    subprocess.run(command, capture_output=True, timeout=60, check=True)
    write_ctr(repository / "ctr" / "3", scale=5)

    stub_of(served, "ctr").kill()
    until(lambda: any("serves again" in line for line in served.errors))
    assert scale_of(served) == 1

    with served.grpc_client() as client:
        client.load_model("ctr")
    assert scale_of(served) == 5


def test_a_server_that_goes_down_with_a_backend_process_is_started_again(serve: Serve, repository: Path) -> None:
    """Its ports, models and versions come back; the loss is counted."""
    served = serve(repository)
    command = [sys.executable, "-m", "hotrow", "load", "ctr", "--version", "1", "--url", served.grpc]
    subprocess.run(command, capture_output=True, timeout=60, check=True)
    server = next(process for process in served.family() if process.name() == "tritonserver")
    lost = stub_of(served, "ctr")
    lost.kill()
    until(lambda: any(f"process {lost.pid}" in line for line in served.errors))

    server.send_signal(signal.SIGABRT)
    until(lambda: not server.is_running())
    until(lambda: scale_of(served) == 1)

    assert counters(served, model="ctr")["hotrow_backend_restarts_total"] >= 1
    assert served.stop() == 0


@pytest.mark.parametrize("victims", [["launcher"], ["launcher", "tritonserver"]])
@pytest.mark.parametrize("loading", [False, True])
def test_a_killed_launcher_leaves_nothing(serve: Serve, repository: Path, victims: list[str], loading: bool) -> None:
    """Server, stubs (a stopped one too) and shared memory are gone soon after, in the middle of a load as well."""
    served = serve(repository)
    family = served.family()
    memory = set(Path("/dev/shm").glob(f"hotrow_{served.process.pid}_*"))  # noqa: S108
    assert memory
    stub_of(served, "flat").suspend()
    if loading:
        threading.Thread(target=_load_again, args=(served, repository), daemon=True).start()

    for process in family:
        if process.pid == served.process.pid or process.name() in victims:
            os.kill(process.pid, signal.SIGKILL)
    served.process.wait()

    until(lambda: not any(_runs(process) for process in family))
    until(lambda: not list(Path("/dev/shm").glob(f"hotrow_{served.process.pid}_*")))  # noqa: S108


def _load_again(served: Served, repository: Path) -> None:
    (repository / "ctr" / "2" / "touched").touch()
    try:
        with served.grpc_client() as client:
            client.load_model("ctr")
    except InferenceServerException:
        pass  # as it has to be


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_backend_processes_do_not_outlive_a_server_of_others(serve: Serve, repository: Path) -> None:
    """Where nobody clears up after a killed server, they notice, end themselves and remove their memory."""
    served = serve(repository)
    launcher, *others = served.family()
    reaper = next(process for process in others if "reaper.py" in " ".join(process.cmdline()))
    stubs = [stub_of(served, name) for name in ("ctr", "flat")]
    memory = [Path("/dev/shm", stub.cmdline()[2]) for stub in stubs]  # noqa: S108
    reaper.kill()
    launcher.suspend()

    next(process for process in others if process.name() == "tritonserver").kill()

    until(lambda: not any(_runs(stub) for stub in stubs))
    assert not any(path.exists() for path in memory)
    launcher.kill()
    served.process.wait()


def test_readiness_survives_failed_loads(serve: Serve, repository: Path) -> None:
    """/v2/health/ready stays 200 while versions come, go and fail."""
    served = serve(repository)
    with served.http_client() as http, served.grpc_client() as grpc:
        write_ctr(repository / "ctr" / "3", scale=5)
        (repository / "ctr" / "3" / "session.json").write_text("{", encoding="utf-8")
        with pytest.raises(InferenceServerException):
            grpc.load_model("ctr")
        assert http.is_server_ready()
        np.testing.assert_equal(scale_of(served), 3)
