"""Locks between processes, which end with their holder."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from inference_session.platform.file_locks import locked
from tests.testing.servers import PATIENCE_S

FORKS = """
import contextlib, os, signal, sys
from pathlib import Path
from inference_session.platform.file_locks import locked, try_lock

def is_free():
    return try_lock(os.open(sys.argv[1], os.O_RDONLY))

with contextlib.suppress(ZeroDivisionError), locked(Path(sys.argv[1])):
    child = os.fork()
    if child == 0:
        signal.pause()
    print(is_free())
    1 / int(sys.argv[2])
print(is_free())
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
"""
"""Forks while it holds a lock; with 0 as its argument, it ends that by an error."""


@pytest.mark.parametrize("argument", ["0", "1"], ids=["after_an_error", "as_planned"])
def test_a_process_that_was_forked_meanwhile_does_not_keep_a_lock(tmp_path: Path, argument: str) -> None:
    """Workers that a trainer forks while it saves live on; whoever saves next would wait for their end."""
    command = [sys.executable, "-c", FORKS, str(tmp_path), argument]
    assert subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout == "False\nTrue\n"


def test_who_has_to_wait_is_told(tmp_path: Path) -> None:
    """The holder may be a process that was stopped, for which the wait has no end."""
    told, entered = threading.Event(), threading.Event()

    def wait() -> None:
        with locked(tmp_path, told.set):
            entered.set()

    with locked(tmp_path, lambda: pytest.fail("nobody has it")):
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert told.wait(PATIENCE_S)
        assert not entered.is_set()
    waiting.join(PATIENCE_S)
    assert entered.is_set()
