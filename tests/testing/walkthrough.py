"""Runs a page of the manual as a reader would: writes its files, runs its commands, starts its servers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.testing.manual import ROOT, Block, blocks
from tests.testing.programs import PROGRAM_S
from tests.testing.servers import PATIENCE_S, free_port

_INSTALLED = re.compile(r"^(python3 -m venv|\. venv/bin/activate|pip install|apt-get install).*$", re.MULTILINE)
"""Commands that the tests' environment makes unnecessary."""
_ASKS_A_SERVER = re.compile(
    r"^(hotrow (?:load|roll-back|versions|smoke-test)\b(?!.* --url ).*?)(?=\s+#|$)", re.MULTILINE
)
_PORTS = {"http": "8000", "grpc": "8001", "metrics": "8002"}
_TAKES_PORTS = re.compile(r"^(hotrow (?:doctor|serve))\b", re.MULTILINE)


@dataclass
class Walkthrough:
    """One page, in a separate folder.

    `replaced` maps names in the page to real ones, such as the address of a store. `prelude` has Python that
    runs before Python blocks that are not files, by a text that the block holds. Blocks that begin with a text of
    `not_run` are not run.
    """

    page: Path
    folder: Path
    replaced: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    prelude: Mapping[str, str] = field(default_factory=dict)
    not_run: Collection[str] = ()
    outputs: list[str] = field(default_factory=list)
    """What each command printed."""

    def __post_init__(self) -> None:
        self._free = {name: free_port() for name in _PORTS}
        self._server: subprocess.Popen[str] | None = None

    def run(self) -> None:
        """Do all of it; an AssertionError names the command that fails, or the output that differs."""
        skipped = set(self.not_run)
        try:
            for block in blocks(self.page):
                begins = {text for text in self.not_run if block.text.startswith(text)}
                if begins:
                    skipped -= begins
                else:
                    self._take(block)
        finally:
            self._stop_server()
        assert not skipped, f"{self.page.name} has no block that begins with {skipped}"

    def serve(self, repository: str) -> None:
        """Start the server that the page expects."""
        self._start_server(self.placed(f"hotrow serve --repository {repository}"))

    def run_python(self, code: str) -> str:
        """Run a program in the page's folder; what it prints."""
        (self.folder / "block.py").write_text(code, encoding="utf-8")
        return self._shell("python block.py")

    def _take(self, block: Block) -> None:
        text = self.placed(block.text)
        if block.language == "python":
            if block.title:
                (self.folder / block.title).write_text(text, encoding="utf-8")
            else:
                before = "".join(self.placed(code) for held, code in self.prelude.items() if held in text)
                self.outputs.append(self.run_python(before + text))
        elif block.language == "sh":
            self.outputs.append(self._commands(text))
        elif block.language == "text" and self.outputs:
            assert text in self.outputs[-1], f"{block} shows\n{text}\nwhere the command prints\n{self.outputs[-1]}"

    def placed(self, text: str) -> str:
        """The text with this machine's places and ports."""
        text = text.replace("\\\n", " ")
        for named, there in self.replaced.items():
            text = text.replace(named, there)
        for name, port in _PORTS.items():
            text = re.sub(rf"(localhost|127\.0\.0\.1):{port}\b", rf"\1:{self._free[name]}", text)
        text = _ASKS_A_SERVER.sub(rf"\1 --url localhost:{self._free['grpc']}", text)
        ports = "".join(f" --{name}-port {port}" for name, port in self._free.items())
        return _TAKES_PORTS.sub(rf"\1{ports}", text)

    def _commands(self, block: str) -> str:
        script = _INSTALLED.sub("", block).strip()
        if "hotrow doctor" in script:  # it requires that the ports are free
            self._stop_server()
        serves = re.search(r"^hotrow serve .*$", script, re.MULTILINE)
        if not serves:
            return self._shell(script)
        printed = self._start_server(f"{script[: serves.start()]}\nexec {serves[0]}")
        return printed + self._shell(script[serves.end() :])

    def _shell(self, script: str) -> str:
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PROGRAM_S,
            check=False,
        )
        assert ended.returncode == 0, f"{script}\nended with status {ended.returncode}:\n{ended.stdout}"
        return ended.stdout

    def _start_server(self, script: str) -> str:
        self._stop_server()
        with (self.folder / "server.log").open("w") as log:
            self._server = subprocess.Popen(
                ["bash", "-c", script],
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
        self._server.wait(PATIENCE_S)
        self._server = None
        raise AssertionError(f"{script} does not serve:\n{(self.folder / 'server.log').read_text()}")

    def _stop_server(self) -> None:
        if self._server is not None:
            self._server.send_signal(signal.SIGINT)
            self._server.communicate(timeout=PATIENCE_S)
            assert self._server.returncode == 0
            self._server = None

    def _environment(self) -> dict[str, str]:
        """The environment of a reader who has installed this repository's code."""
        commands = str(Path(sys.executable).parent)
        installed = {"PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        return {"HOTROW_CACHE_DIR": str(self.folder / "cache"), **os.environ, **installed, **self.environment}
