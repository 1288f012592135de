"""The processes of a server, found in /proc."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from tests.testing.servers import wait_until
from triton_backend.launcher import stubs

_SERVER = """
import subprocess, sys, threading, time
threading.stack_size(65536)
start = lambda: subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
children = [start()]
other = threading.Thread(target=lambda: children.append(start()))
other.start(), other.join()
children.append(subprocess.Popen(["true"]))
for _ in range(int(sys.argv[1])):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
print(*(child.pid for child in children), flush=True)
time.sleep(1000)
"""


@pytest.fixture(params=[0, 500], ids=["few threads", "many threads"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[int, list[int], int]]:
    """A process with three children, of which one has ended and nobody waits for, and its number of threads."""
    num_threads = request.param + len(psutil.pids()) if request.param else 0
    command = [sys.executable, "-c", _SERVER, str(num_threads)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        children = list(map(int, process.stdout.readline().split()))
        yield process.pid, children, num_threads + 1
        for pid in (process.pid, *children):
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()


def test_children_of_all_threads_are_found(server: tuple[int, list[int], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of many models has so many threads that looking at each would take a processor all its time."""
    pid, children, num_threads = server
    read_file, paths = stubs._read, list[str]()

    def read(path: str) -> str:
        paths.append(path)
        return read_file(path)

    monkeypatch.setattr(stubs, "_read", read)

    assert sorted(stubs.children(pid)) == sorted(children)
    assert len(paths) <= max(2, num_threads - 100)


def test_a_known_child_that_moves_to_another_thread_is_not_lost(
    server: tuple[int, list[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That thread has been looked at already. One of them has died, and nobody would know it again."""
    pid, children, _ = server
    monkeypatch.setattr(stubs, "_listed_children", lambda _: children[:1])

    assert stubs.children(pid, known=[*children, pid]) == children


@pytest.mark.parametrize(
    ("command", "how"),
    [
        ("kill -SEGV $$", "died of SIGSEGV"),
        ("kill -40 $$", "died of signal 40"),
        ("exit 3", "died with exit status 3"),
    ],
)
def test_how_a_child_ended_is_told(command: str, how: str) -> None:
    """As long as nobody has waited for it."""
    with subprocess.Popen(["sh", "-c", command]) as child:
        wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE, "its end")
        assert stubs.end_of(child.pid) == how

    assert stubs.end_of(child.pid) == "died"


def test_a_server_that_is_gone_has_none() -> None:
    """No error is raised for it."""
    with subprocess.Popen(["true"]) as process:
        process.wait()

    assert stubs.children(process.pid) == []


def test_a_child_whose_end_a_thread_waits_for_is_found() -> None:
    """Not one that no thread waits for, although threads wait for other things."""
    code = """
import subprocess, threading, time
children = [subprocess.Popen(["sleep", "1000"]) for _ in range(2)]
print(*(child.pid for child in children), flush=True)
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
children[1].wait()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        children = list(map(int, server.stdout.readline().split()))
        wait_until(lambda: stubs.awaited(server.pid) == {children[1]}, "it to wait")
        for pid in (server.pid, *children):
            psutil.Process(pid).kill()
    assert stubs.awaited(server.pid) == set()
