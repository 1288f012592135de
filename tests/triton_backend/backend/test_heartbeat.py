"""How a backend process lets others watch it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.testing.servers import wait_until
from triton_backend.backend import guard, heartbeat
from triton_backend.backend.heartbeat import Heartbeat, last_beat


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process beats, fast and without a guard."""
    monkeypatch.setenv(heartbeat.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.01)
    monkeypatch.setattr(heartbeat, "start_guard", lambda: None)
    return tmp_path


def test_a_process_beats_until_it_is_stopped(folder: Path) -> None:
    """Other processes can read the time of the last beat; no file is left afterwards."""
    begin = time.monotonic()
    beating = Heartbeat()
    wait_until(lambda: (last_beat(folder, os.getpid()) or 0) > begin, "a beat")
    beating.stop()

    assert list(folder.iterdir()) == []


def test_a_full_disk_does_not_end_the_beat(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that cannot write the time tries again."""
    written: list[int] = []

    def write(handle: int, content: bytes, offset: int) -> int:
        written.append(len(content))
        return write_file(handle, content, offset)

    (folder / str(os.getpid())).symlink_to("/dev/full")
    write_file = os.pwrite
    monkeypatch.setattr(os, "pwrite", write)
    beating = Heartbeat()
    wait_until(lambda: len(written) > 2, "further beats")
    beating.stop()


def guarded(folder: Path, *, server: int, forks: bool = False) -> tuple[subprocess.Popen[bytes], Path]:
    """A process that starts a guard as a backend process does, and hands its pipe on to a child; its shared memory."""
    memory = Path("/dev/shm", f"hotrow_test_guard_{os.getpid()}_{folder.name}")  # noqa: S108
    memory.touch()
    code = (
        "import os, subprocess, sys, time\n"
        f"arguments = [sys.executable, '-I', '-S', {guard.__file__!r}, str(os.getpid()), '{server}', {memory.name!r}]\n"
        "guard = subprocess.Popen(arguments, stdin=subprocess.PIPE)\n"
        f"os.fork() if {forks} else None\n"
        "time.sleep(3600)\n"
    )
    return subprocess.Popen([sys.executable, "-c", code]), memory


def test_a_guard_ends_a_process_whose_server_is_gone(tmp_path: Path) -> None:
    """And removes its shared memory."""
    with subprocess.Popen(["true"]) as gone:
        pass
    process, memory = guarded(tmp_path, server=gone.pid)

    assert process.wait(60) == -9
    wait_until(lambda: not memory.exists(), "the memory to be removed")


@pytest.mark.parametrize("forks", [False, True])
def test_a_guard_leaves_a_process_alone_whose_server_lives(tmp_path: Path, forks: bool) -> None:
    """If only it is killed, its memory is left to the server. A process forked from it does not hold up the guard."""
    process, memory = guarded(tmp_path, server=os.getpid(), forks=forks)
    wait_until(lambda: len(children_of(process.pid)) == 1 + forks, "the guard")
    guarding, *forked = children_of(process.pid)  # in the order of their start

    process.kill()
    process.wait()
    assert memory.exists()
    memory.unlink()

    wait_until(lambda: not Path(f"/proc/{guarding}").exists() or is_zombie(guarding), "the end of the guard")
    for child in forked:
        os.kill(child, signal.SIGKILL)


def test_a_guard_outlasts_a_server_that_outlives_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton removes the memory of a killed process when it unloads the model, which it may end without."""
    memory = tmp_path / "memory"
    memory.touch()
    with subprocess.Popen(["sleep", "1000"]) as server:
        num_polls = 0

        def poll(seconds: float) -> None:
            nonlocal num_polls
            num_polls += 1
            if num_polls == 100:
                server.kill()
                server.wait()

        monkeypatch.setattr(time, "sleep", poll)
        guard.remove_left(memory, server.pid)
    assert num_polls == 100
    assert not memory.exists()


def children_of(pid: int) -> list[int]:
    """The processes that its main thread has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def is_zombie(pid: int) -> bool:
    """Whether it has ended, and its parent has not waited for it."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z"
