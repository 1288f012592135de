"""Calls in threads that no interrupt waits for."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from inference_session.platform.daemon_threads import DaemonThreads
from tests.testing.programs import PROGRAM_S


def test_results_and_errors_are_the_callers() -> None:
    """The end of the context waits for all calls."""
    begun = threading.Event()
    with DaemonThreads(2) as threads:
        results = list(threads.map(lambda number: number * 2, range(10)))
        failed = threads.submit(int, "x")
        last = threads.submit(begun.wait, timeout=0.01)
    assert results == list(range(0, 20, 2))
    assert isinstance(failed.exception(), ValueError)
    assert last.done()


def test_calls_that_have_not_begun_can_be_cancelled() -> None:
    """Those under way end as usual."""
    begun, may_end = threading.Event(), threading.Event()

    def wait() -> bool:
        begun.set()
        return may_end.wait()

    with DaemonThreads(1) as threads:
        first, second = threads.submit(wait), threads.submit(wait)
        begun.wait()
        threads.shutdown(wait=False, cancel_futures=True)
        may_end.set()
    assert first.result()
    with pytest.raises(CancelledError):
        second.result()


READ_WHAT_DOES_NOT_ANSWER = """
import sys, threading
from pathlib import Path
from inference_session.model_source import Copy, local_source
from inference_session.version_directory import manifest
from tests.testing.ctrl_c import CtrlC

def wait(*_):
    ctrl_c.press()
    threading.Event().wait()

ctrl_c = CtrlC()

local_source.LocalSource.read = manifest.sha256_of = wait
if sys.argv[1] == "copy":
    with Copy(sys.argv[2], sys.argv[3]) as copy:
        copy.run()
else:
    manifest.write_manifest(Path(sys.argv[2]))
"""


@pytest.mark.parametrize("work", ["copy", "checksums"])
def test_what_is_interrupted_does_not_wait_for_what_it_reads(tmp_path: Path, work: str) -> None:
    """Neither does the process when it ends."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_bytes(b"content")
    command = [sys.executable, "-c", READ_WHAT_DOES_NOT_ANSWER, work, tmp_path / "source", tmp_path / "target"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S, check=False)

    assert done.returncode == -signal.SIGINT, done.stderr
    assert "KeyboardInterrupt" in done.stderr
    assert not (tmp_path / "target").exists()
