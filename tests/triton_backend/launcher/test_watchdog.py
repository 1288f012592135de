"""What the watch-dog does without a server; test_healing.py tests it with a real one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.testing.servers import wait_until
from triton_backend.launcher import stubs, watchdog
from triton_backend.launcher.stubs import Stub
from triton_backend.launcher.watchdog import LoadedVersions, Watchdog

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
            watched._lose(second, "is hung")
        events.append(stub.memory)

    monkeypatch.setattr(watched, "_end", end)
    watched._lose(first, "is hung")
    wait_until(lambda: len(events) == 4, "both loads and both ends")
    assert events.index(second.memory) > len(events) - 1 - events[::-1].index("load")
    assert events[0] == "load"
