"""Runs a tutorial as a reader would: writes its files, runs its commands, and starts the servers that it starts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.testing.servers import PATIENCE_S, free_port

_BLOCK = re.compile(r'^```(\w+)(?: title="(.+?)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_INSTALLED = re.compile(r"^(python3 -m venv|\. venv/bin/activate|pip install).*$", re.MULTILINE)
"""What the environment of the tests has done already."""
_TALKS_TO_A_SERVER = re.compile(r"^(hotrow (?:load|roll-back|versions)\b.*)$", re.MULTILINE)
_DOCTOR = re.compile(r"^hotrow doctor.*$", re.MULTILINE)


@dataclass
class Tutorial:
    """One page, in a folder of its own."""

    page: Path
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    """What each command printed."""

    def __post_init__(self) -> None:
        self._http, self._grpc, self._metrics = free_port(), free_port(), free_port()
        self._server: subprocess.Popen[str] | None = None

    def run(self) -> None:
        """Do all of it; an AssertionError names the command that fails, or the output that differs."""
        output = ""
        try:
            for language, title, text in _BLOCK.findall(self.page.read_text(encoding="utf-8")):
                block = self._with_free_ports(text)
                if language == "python" and title:
                    (self.folder / title).write_text(block, encoding="utf-8")
                elif language == "sh":
                    output = self._command(block)
                    self.outputs.append(output)
                elif language == "text" and output:
                    assert block in output, f"the page shows\n{block}\nwhere the command prints\n{output}"
                    output = ""
        finally:
            self._stop_server()

    def _with_free_ports(self, text: str) -> str:
        for port, free in {"8000": self._http, "8001": self._grpc, "8002": self._metrics}.items():
            text = re.sub(rf"(localhost|127\.0\.0\.1):{port}\b", rf"\1:{free}", text)
        text = _TALKS_TO_A_SERVER.sub(rf"\1 --url localhost:{self._grpc}", text)
        ports = f" --http-port {self._http} --grpc-port {self._grpc} --metrics-port {self._metrics}"
        return _DOCTOR.sub(lambda line: line[0] + ports, text)

    def _command(self, block: str) -> str:
        script = _INSTALLED.sub("", block).strip()
        if script.startswith("hotrow serve"):
            return self._serve(script)
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert ended.returncode == 0, f"{script}\nended with status {ended.returncode}:\n{ended.stdout}"
        return ended.stdout

    def _serve(self, script: str) -> str:
        self._stop_server()
        ports = f" --http-port {self._http} --grpc-port {self._grpc} --metrics-port {self._metrics}"
        with (self.folder / "server.log").open("w") as log:
            self._server = subprocess.Popen(
                ["bash", "-c", "exec " + script + ports],
                cwd=self.folder,
                env=self._environment(),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._server.stdout is not None
        lines: list[str] = []
        for line in self._server.stdout:
            lines.append(line)
            if line.startswith("model "):
                return "".join(lines)
        raise AssertionError(f"{script} does not serve:\n{(self.folder / 'server.log').read_text()}")

    def _stop_server(self) -> None:
        if self._server is not None:
            self._server.send_signal(signal.SIGINT)
            self._server.communicate(timeout=PATIENCE_S)
            assert self._server.returncode == 0
            self._server = None

    def _environment(self) -> dict[str, str]:
        commands = str(Path(sys.executable).parent)
        return {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", **self.environment}
