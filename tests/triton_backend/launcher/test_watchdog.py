"""What the watch-dog does without a server; test_healing.py tests it with a real one."""

from __future__ import annotations

import json
import subprocess
import sys
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from tests.testing.servers import wait_until
from triton_backend.launcher import stubs, watchdog
from triton_backend.launcher.stubs import Stub
from triton_backend.launcher.watchdog import LoadedVersions, Process, Watchdog

_SERVER = """
import subprocess, time
child = subprocess.Popen(["sleep", "1000"])
child.kill()
print(child.pid, flush=True)
time.sleep(1000)
"""


class FakeServer:
    """A process that answers nothing."""

    probe_key = ""

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid, self.repository, self.heartbeats = pid, folder, folder

    def request(self, *_: Any, **__: Any) -> bytes:
        raise ConnectionRefusedError

    def load(self, *_: Any) -> None:
        raise AssertionError


def test_a_process_that_died_as_it_began_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Triton waits for it without end, and says nothing."""
    monkeypatch.setattr(watchdog, "STARTING_S", 0.0)
    with subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            child = int(server.stdout.readline())
            wait_until(lambda: stubs.is_zombie(child), "its end")
            watched = Watchdog(FakeServer(server.pid, tmp_path))
            for _ in range(3):
                watched.look()
        finally:
            server.kill()

    said = capsys.readouterr().err
    assert said.startswith(f"hotrow: backend process {child} died of SIGKILL as it began")
    assert said.count("\n") == 1


def test_a_process_that_is_lost_late_ends_after_a_load_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is lost in the moment in which the one before it is ended."""
    first, second = (Stub(2**31 + number, "ctr", 1, f"none-{number}") for number in range(2))
    events: list[str] = []

    class LoadingServer(FakeServer):
        def load(self, *_: Any) -> None:
            events.append("load")

    watched = Watchdog(LoadingServer(2**31, tmp_path))
    watched._loaded["ctr"] = LoadedVersions((1,), {})

    def end(stub: Stub) -> None:
        if stub is first:
            watched._lose(Process(), second, "is hung")
        events.append(stub.memory)

    monkeypatch.setattr(watched, "_end", end)
    watched._lose(Process(), first, "is hung")
    wait_until(lambda: len(events) == 4, "both loads and both ends")
    assert events.index(second.memory) > len(events) - 1 - events[::-1].index("load")
    assert events[0] == "load"


@pytest.mark.parametrize(
    ("groups", "ended"), [([{"count": 1}], [2, 3]), ([{"count": 1, "gpus": [0, 1]}], [3]), ([], [])]
)
def test_of_two_loads_between_two_looks_the_second_is_watched(
    groups: list[dict[str, Any]], ended: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server calls the version ready meanwhile, and has ended the process that was known."""

    class ReadyServer(FakeServer):
        def request(self, method: str, *_: Any, **__: Any) -> bytes:
            index = [{"name": "ctr", "version": "1", "state": "READY"}]
            return json.dumps(index if method == "POST" else {"instance_group": groups}).encode()

    present, given_up = [9], set[int]()
    monkeypatch.setattr(watchdog, "AWAITED_S", -1.0)
    monkeypatch.setattr(watchdog, "OBSERVE_S", -1.0)
    monkeypatch.setattr(stubs, "children", lambda *_, **__: list(present))
    monkeypatch.setattr(stubs, "identify", lambda pid, _: Stub(pid, "ctr", 1, f"none-{pid}"))
    monkeypatch.setattr(stubs, "state", lambda _: "S")
    monkeypatch.setattr(stubs, "began", lambda pid: pid)
    monkeypatch.setattr(stubs, "awaited", lambda _: given_up)
    watched = Watchdog(ReadyServer(2**31, tmp_path))
    found: list[int] = []
    monkeypatch.setattr(watched, "_end", lambda stub: found.append(stub.pid))
    watched.look()
    present[:] = [3, 2, 1]
    watched.look()
    given_up.update(present)
    watched.look()
    assert sorted(found) == ended


def test_a_model_whose_name_others_have_does_not_keep_the_rest_from_being_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --model-namespacing, Triton refuses to say anything of such a model by its name."""
    loads: list[str] = []

    class NamespacingServer(FakeServer):
        def request(self, method: str, path: str, *_: Any, **__: Any) -> bytes:
            if path == "v2/models/ctr/config":
                raise HTTPError(path, 400, "There are 2 identifiers of model 'ctr'", Message(), None)
            models = (("ctr", "1"), ("ctr", "2"), ("rank", "1"))
            index = [{"name": name, "version": version, "state": "READY"} for name, version in models]
            return json.dumps(index if method == "POST" else {}).encode()

        def load(self, model: str, _: Any) -> None:
            loads.append(model)

    watched = Watchdog(NamespacingServer(2**31, tmp_path))
    monkeypatch.setattr(watched, "_end", lambda stub: None)
    for number, model in enumerate(("ctr", "rank")):
        watched._lose(Process(), Stub(2**31 + number, model, 1, f"none-{number}"), "is hung")
    wait_until(lambda: bool(loads), "the load")
    assert loads == ["rank"]
    assert "several models are called 'ctr', so none can be loaded again" in capsys.readouterr().err
