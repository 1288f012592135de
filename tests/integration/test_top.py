"""`hotrow top` on a real server, as a process: one picture, and live through all that happens."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc_client

from tests.testing.served import Serve, Served
from tests.testing.servers import PATIENCE_S, free_port, wait_until
from tests.testing.triton_models import write_ctr

pytestmark = pytest.mark.triton
_TOP = [sys.executable, "-m", "hotrow", "top"]


def _ask(served: Served, stop: threading.Event) -> None:
    ids = grpc_client.InferInput("ids", (2, 3), "INT64")
    ids.set_data_from_numpy(np.ones((2, 3), np.int64))
    dense = grpc_client.InferInput("dense", (2, 2), "FP32")
    dense.set_data_from_numpy(np.ones((2, 2), np.float32))
    with served.grpc_client() as client:
        while not stop.wait(0.005):
            client.infer("ctr", [ids, dense])


class _Terminal:
    """`hotrow top` in a terminal of 50 lines, and all that it has drawn."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "180", "LINES": "50"}
        self.process = subprocess.Popen(
            [*_TOP, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        )
        os.close(theirs)
        self.drawn = ""

    def await_text(self, pattern: str) -> None:
        """Read on until this is drawn."""
        deadline = time.monotonic() + PATIENCE_S
        self.drawn = ""
        while not re.search(pattern, self.drawn):
            assert time.monotonic() < deadline, f"{pattern!r} was not drawn: {self.drawn[-2000:]!r}"
            if select.select([self._ours], [], [], 1)[0]:
                self.drawn += os.read(self._ours, 1 << 16).decode(errors="replace")

    def interrupt(self) -> int:
        """Ctrl-C; the exit status."""
        self.process.send_signal(signal.SIGINT)
        wait_until(self._has_ended, "the end")
        os.close(self._ours)
        return self.process.wait()

    def _has_ended(self) -> bool:
        """Whether it has ended, and all that it has drawn is read."""
        ended = self.process.poll() is not None
        with contextlib.suppress(OSError):  # a terminal without a writer cannot be read
            while select.select([self._ours], [], [], 0)[0] and (data := os.read(self._ours, 1 << 16)):
                self.drawn += data.decode(errors="replace")
        return ended


def test_one_picture(served: Served) -> None:
    """Requests, keys, memory and percentiles of a version are shown while it gets requests."""
    stop = threading.Event()
    shown = [""]

    def is_asked() -> bool:
        """Whether there were requests in the second that is shown; a busy machine may not answer any."""
        run = [*_TOP, "--once", "--metrics-url", served.metrics, "--url", served.grpc]
        shown[0] = subprocess.run(run, capture_output=True, text=True, check=False).stdout
        row = re.search(r"^ *ctr +1 +([\d,.]+) +0 +([\d,.]+) .* (us|ms|s) .*MiB", shown[0], re.MULTILINE)
        if row is None:
            return False
        requests, samples = (float(number.replace(",", "")) for number in row.groups()[:2])
        return 0 < requests < samples

    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(_ask, served, stop)
        try:
            wait_until(is_asked, "requests to be shown")
        finally:
            stop.set()
        asking.result()

    assert re.search(r"^ *ctr +1 +item +[\d,.]+ ", shown[0], re.MULTILINE)
    assert "\x1b" not in shown[0]


def test_live_through_a_swap_and_a_restart(serve: Serve, tmp_path: Path) -> None:
    """A new version, the end of the server and its return are seen in one view, which Ctrl-C ends cleanly."""
    write_ctr(tmp_path / "ctr" / "1")
    # Not a port that the kernel chooses: while nothing listens on it, the kernel could give it to the client's socket.
    port = str(free_port())
    served = serve(tmp_path, "--metrics-port", port)
    top = _Terminal("--metrics-url", served.metrics, "--interval", "0.2")
    top.await_text("ctr")

    shutil.copytree(tmp_path / "ctr" / "1", tmp_path / "ctr" / ".tmp-2")
    (tmp_path / "ctr" / ".tmp-2").rename(tmp_path / "ctr" / "2")
    with served.grpc_client() as client:
        client.load_model("ctr")
    top.await_text(r"ctr version 2 loaded in \d")

    assert served.stop() == 0
    top.await_text("no answer, trying again")
    serve(tmp_path, "--metrics-port", port)
    top.await_text("the server answers again")

    assert top.interrupt() == 0
    assert "Traceback" not in top.drawn


def test_no_server_is_one_line() -> None:
    """With --once, exit code 1."""
    run = [*_TOP, "--once", "--metrics-url", "http://127.0.0.1:1/metrics"]

    result = subprocess.run(run, capture_output=True, text=True, check=False)

    assert result.returncode == 1
    assert result.stderr.startswith("hotrow: http://127.0.0.1:1/metrics: cannot read the metrics of a server: ")
    assert result.stderr.count("\n") == 1
