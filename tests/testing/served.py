"""A real tritonserver, started by `hotrow serve` as a user would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException

from tests.testing.servers import PATIENCE_S, wait_until

NUMPY_1 = np.__version__.startswith("1.")
"""The tritonserver of the nvidia-pytriton wheel passes strings to NumPy 1 only."""


@dataclass
class Served:
    """A running `hotrow serve`."""

    process: subprocess.Popen[str]
    repository: Path
    http: str
    """host:port, as tritonclient wants it."""
    grpc: str
    metrics: str
    errors: list[str]
    """Lines of stderr so far."""
    reader: threading.Thread
    announced: str = ""
    """The first model that it announces, with its versions."""

    def grpc_client(self) -> Any:
        """A tritonclient for gRPC; the caller closes it."""
        return grpc_client.InferenceServerClient(self.grpc)

    def http_client(self) -> Any:
        """A tritonclient for HTTP; the caller closes it."""
        return http_client.InferenceServerClient(self.http, network_timeout=PATIENCE_S, connection_timeout=PATIENCE_S)

    def family(self) -> list[psutil.Process]:
        """The launcher, the server and its stubs."""
        launcher = psutil.Process(self.process.pid)
        return [launcher, *launcher.children(recursive=True)]

    def server(self) -> psutil.Process:
        """The tritonserver that runs now."""
        return next(process for process in self.family() if name_of(process) == "tritonserver")

    def stubs(self, model: str = "", version: int | None = None) -> list[psutil.Process]:
        """The backend processes that live, of a model and a version if these are given."""
        found = []
        for process in self.family():
            try:
                arguments = process.cmdline()
            except psutil.NoSuchProcess:  # it has ended since it was listed, or is a zombie
                continue
            if len(arguments) > 1 and "stub" in Path(arguments[0]).name:
                code = Path(arguments[1])  # <repository>/<model>/<version>/model.py
                if model in ("", code.parent.parent.name) and version in (None, int(code.parent.name)):
                    found.append(process)
        return found

    def stub(self, model: str, version: int | None = None) -> psutil.Process:
        """The one backend process of a model, or a version, when the replaced ones have ended."""
        wait_until(lambda: len(self.stubs(model, version)) == 1, f"one process of {model!r}, version {version}")
        return self.stubs(model, version)[0]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal the launcher and return its exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout=PATIENCE_S)

    def close(self) -> None:
        """Stop it if it still runs. What it has logged is printed, which pytest shows beside a test that fails."""
        if self.process.poll() is None:
            self.stop()
        self.reader.join()
        print("".join(self.errors))
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


Serve = Callable[..., Served]


def is_ready(client: Any, model: str) -> bool:
    """Whether the server says so, if one runs at the moment."""
    try:
        return bool(client.is_model_ready(model))
    except InferenceServerException:
        return False


def name_of(process: psutil.Process) -> str:
    """The program's arguments; none if it has ended since it was listed."""
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""


def is_running(process: psutil.Process) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def start(repository: Path | str, *flags: str) -> Served:
    """Run `hotrow serve` on free ports and return when it has announced its models."""
    ports = [argument for name in ("http", "grpc", "metrics") for argument in (f"--{name}-port", "0")]
    process = subprocess.Popen(
        [sys.executable, "-m", "hotrow", "serve", "--repository", str(repository), *ports, *flags],
        env={"HOTROW_CACHE_DIR": str(Path(repository).parent / "cache"), **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    errors: list[str] = []
    reader = threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True)
    reader.start()
    served = Served(process, Path(repository), "", "", "", errors, reader)
    for line in process.stdout:
        name, _, value = line.strip().partition(" ")
        if name == "model":
            served.announced = value.strip()
            return served
        setattr(served, name.lower(), value.strip().removeprefix("http://" if name == "HTTP" else ""))
    served.close()
    raise AssertionError(f"hotrow serve ended with {process.returncode}: {''.join(errors)}")


def shared_memory(launcher: int) -> list[Path]:
    """The shared memory of the server that a process started."""
    return list(Path("/dev/shm").glob(f"hotrow_{launcher}_*"))  # noqa: S108


def metric(served: Served, line: str) -> float:
    """The value of the one line of /metrics that begins so."""
    with urllib.request.urlopen(served.metrics, timeout=PATIENCE_S) as page:  # noqa: S310  a page of ours
        lines = [text for text in page.read().decode().splitlines() if text.startswith(line)]
    assert len(lines) == 1, (line, lines)
    return float(lines[0].rpartition(" ")[2])
