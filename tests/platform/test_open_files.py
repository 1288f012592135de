"""Open files that processes pass to each other, with real processes that end at any time."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from inference_session.errors import ConfigurationError
from inference_session.platform import open_files
from inference_session.platform.open_files import FileExchange, OpenFiles, close_all
from tests.testing.servers import wait_until

NAME = "0123abcd"
HOLDER = """
import os, resource, sys
from inference_session.platform.open_files import FileExchange, OpenFiles
exchange = FileExchange(sys.argv[1])
with exchange.turn():
    found = exchange.ask()
    if found is None:
        memory = os.memfd_create("rows")
        os.write(memory, sys.argv[2].encode())
        found = OpenFiles(b"made by " + sys.argv[2].encode(), [memory, *map(os.memfd_create, "abc")])
    offer = exchange.offer(found)
print(found.description.decode(), flush=True)
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
for line in sys.stdin:
    if line == "close\\n":
        offer.close()
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]) if line == "open no files\\n" else limits)
    print("done", flush=True)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files whose path is longer than the address of a socket."""
    long = tmp_path / ("long" * 30)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    return long / f"hotrow-{os.getuid()}"


@pytest.fixture
def holders() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that hold files; those that are left end with the test."""
    running: list[subprocess.Popen[str]] = []
    yield running
    for process in running:
        process.kill()
        process.communicate()


def started(holders: list[subprocess.Popen[str]], content: str) -> str:
    """Start one that holds, and makes where nobody has them, files of this content; returns what it says of them."""
    command = [sys.executable, "-c", HOLDER, NAME, content]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    holders.append(process)
    assert process.stdout is not None
    return process.stdout.readline()


def tell(process: subprocess.Popen[str], command: str) -> None:
    """Wait until it has done that."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{command}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


def opened() -> set[tuple[str, str]]:
    """Files that this process has open, by number. Those of earlier tests may be closed by a collection of garbage."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the folder itself
            found.add((link.name, str(link.readlink())))
    return found


def found() -> str | None:
    """What is in the file that is passed to this process."""
    exchange = FileExchange(NAME)
    with exchange.turn():
        files = exchange.ask()
    if files is None:
        return None
    assert len(files.descriptors) == 4
    content = os.pread(files.descriptors[0], 100, 0).decode()
    assert files.description.decode() == f"made by {content}"
    close_all(files.descriptors)
    return content


def test_who_comes_later_gets_the_files_of_the_first(holders: list[subprocess.Popen[str]]) -> None:
    """Also once the first has been killed; when nobody has them any more, they are made again."""
    assert found() is None
    assert started(holders, "one") == "made by one\n"
    assert started(holders, "two") == "made by one\n"
    assert found() == "one"
    holders[0].kill()
    holders[0].wait()
    assert found() == "one"
    assert started(holders, "three") == "made by one\n"
    for process in holders[1:]:
        process.kill()
        process.wait()
    assert found() is None
    assert started(holders, "four") == "made by four\n"


def test_files_of_other_names_are_others(holders: list[subprocess.Popen[str]]) -> None:
    """Whatever they share the beginning of the name with."""
    started(holders, "one")
    for name in ("0123abce", "0", NAME + "0"):
        exchange = FileExchange(name)
        with exchange.turn():
            assert exchange.ask() is None


def test_what_was_closed_is_not_passed_any_more(holders: list[subprocess.Popen[str]], folder: Path) -> None:
    """And leaves nothing but the file of the lock."""
    started(holders, "one")
    tell(holders[0], "close")
    assert found() is None
    assert [path.name for path in folder.iterdir()] == ["lock.0"]


def test_sockets_of_processes_that_were_killed_are_removed(holders: list[subprocess.Popen[str]], folder: Path) -> None:
    """By the next that asks."""
    started(holders, "one")
    holders[0].kill()
    holders[0].wait()
    assert len([*folder.iterdir()]) == 2
    assert found() is None
    assert [path.name for path in folder.iterdir()] == ["lock.0"]


def test_a_process_that_stands_still_holds_nobody_up(
    holders: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one is asked, or nobody has the files; once it goes on, it passes them again."""
    started(holders, "one")
    os.kill(holders[0].pid, signal.SIGSTOP)
    os.waitid(os.P_PID, holders[0].pid, os.WSTOPPED | os.WNOWAIT)
    with monkeypatch.context() as patch:
        patch.setattr(open_files, "_TIMEOUT_S", 0.001)
        for _ in range(200):  # more than wait for a socket
            assert found() is None
    os.kill(holders[0].pid, signal.SIGCONT)
    wait_until(lambda: found() == "one", "the files")  # nobody waits for a place in a queue that is full


def test_too_many_open_files_are_an_error(holders: list[subprocess.Popen[str]]) -> None:
    """Wherever the limit is reached, nothing stays open, and the process that has the files is asked again later."""
    started(holders, "one")
    limits, before = resource.getrlimit(resource.RLIMIT_NOFILE), opened()
    first_free = os.dup(0)
    os.close(first_free)
    refused, limit = 0, first_free
    while True:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
            assert found() == "one"
            break
        except ConfigurationError as error:
            assert "Too many open files); raise the limit of open files (ulimit -n)" in str(error)  # noqa: PT017
            refused, limit = refused + 1, limit + 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert opened() <= before
    assert refused >= 6  # the lock, the folder and the socket, and all but one of the files


def test_a_process_with_too_many_open_files_passes_its_own_later(
    holders: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it can open files again."""
    started(holders, "one")
    tell(holders[0], "open no files")
    assert found() == "one"  # Linux takes a descriptor before it waits for a connection
    with monkeypatch.context() as patch:
        patch.setattr(open_files, "_TIMEOUT_S", 0.2)
        assert found() is None
    tell(holders[0], "open files")
    assert found() == "one"


def test_an_offer_ends_where_its_own_thread_closes_it() -> None:
    """There garbage may be collected, and tables with it that share their memory."""

    class ClosedWhenAsked(list[int]):
        def __iter__(self) -> Iterator[int]:
            offer.close()
            return iter([-1])

    before = opened()
    exchange = FileExchange(NAME)
    offer = exchange.offer(OpenFiles(b"", ClosedWhenAsked()))
    assert exchange.ask() is None
    offer.close()
    assert opened() <= before


def test_the_folder_is_locked_while_files_are_offered(folder: Path) -> None:
    """So that systemd does not remove sockets that are old: it locks folders that it cleans up."""
    offer = FileExchange(NAME).offer(OpenFiles(b"", []))
    opened = os.open(folder, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    offer.close()
    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(opened)


def test_others_wait_while_one_makes_the_files(holders: list[subprocess.Popen[str]]) -> None:
    """Who comes meanwhile gets what was made then."""
    exchange = FileExchange(NAME)
    with exchange.turn():
        command = [sys.executable, "-c", HOLDER, NAME, "other"]
        holders.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        memory = os.memfd_create("rows")
        offer = exchange.offer(OpenFiles(b"made here", [memory]))
    assert holders[0].stdout is not None
    assert holders[0].stdout.readline() == "made here\n"
    offer.close()
    os.close(memory)


def test_who_waits_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """To load large tables takes minutes."""
    caplog.set_level("INFO")
    exchange = FileExchange(NAME)

    def take_turn() -> None:
        with exchange.turn():
            pass

    take_turn()
    assert not caplog.messages
    with ThreadPoolExecutor(1) as pool:
        with exchange.turn():
            waiting = pool.submit(take_turn)
            wait_until(lambda: caplog.messages == ["Waiting while another process opens tables"], "the message")
        waiting.result()


def test_files_pass_within_a_process_and_none_stays_open() -> None:
    """Two sessions of one process share rows as well; long descriptions and many files pass."""
    exchange, description = FileExchange(NAME), b"x" * (1 << 20)
    before = opened()
    memories = [os.memfd_create(str(number)) for number in range(64)]
    offer = exchange.offer(OpenFiles(description, memories))
    for _ in range(3):
        files = exchange.ask()
        assert files is not None
        assert files.description == description
        assert [os.fstat(each).st_ino for each in files.descriptors] == [os.fstat(each).st_ino for each in memories]
        assert not any(os.get_inheritable(each) for each in files.descriptors)
        close_all(files.descriptors)
    offer.close()
    offer.close()
    close_all(memories)
    assert opened() <= before


@pytest.mark.parametrize("mode", [0o755, 0o770, None])
def test_a_folder_that_others_may_enter_is_refused(folder: Path, mode: int | None) -> None:
    """They could pass rows of theirs; nor is a link followed."""
    if mode is None:
        folder.symlink_to(folder.parent)
    else:
        folder.mkdir()
        folder.chmod(mode)
    with pytest.raises(ConfigurationError, match="no other user may enter"):
        FileExchange(NAME)


def test_a_folder_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the way out."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(ConfigurationError, match=r"absent/hotrow-\d+: processes cannot pass memory .* set TMPDIR"):
        FileExchange(NAME)


def test_a_machine_without_a_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python looks for one in several places."""

    def no_folder() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", no_folder)
    with pytest.raises(ConfigurationError, match=r"^the folder for temporary files: .*\['/tmp'\]\); set TMPDIR"):
        FileExchange(NAME)
