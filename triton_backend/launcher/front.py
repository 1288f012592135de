"""nginx in front of tritonserver, because some requests crash the server: `hotrow serve --front`.

Its configuration front.conf says what it does. This module starts, watches and stops it. Only nginx reads and
writes requests.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from inference_session.errors import ConfigurationError, HotrowError
from triton_backend.launcher.command import Endpoint, ServerOptions
from triton_backend.launcher.log import say
from triton_backend.launcher.ports import authority, reachable
from triton_backend.launcher.process_group import end_group
from triton_backend.launcher.reaper import FRONT_FOLDER

MAX_BYTES = 64 << 20
"""The largest request. Triton has the same limit for HTTP from release 25.06 on."""
STOP_TIMEOUT_S = 12.0
"""How long requests in flight may take when it is stopped."""
_TEMPLATE = Path(__file__).with_name("front.conf")
SYSTEM_FOLDERS = "/usr/sbin:/usr/local/sbin"
"""Searched after PATH: Debian puts nginx there, and only root's PATH includes it."""
_MAX_WORKERS = 4
_MAX_FILES = 65536
_POLL_S = 0.02

_MAX_ARRAY_DEPTH = 16
"""More than the dimensions of any tensor. Triton's stack overflows at some ten thousands."""
_PLAIN_STRING = r'"(?!(?:{keys})"\s*+:)[^"\\]*+"'
_VALUE_STRING = r'"(?:[^"\\]++|\\[\s\S])*+"(?!\s*+:)'
_SMALL_SHAPE = r'"shape"\s*+:\s*+\[\s*+(?:1\s*+,\s*+)*+(?:\d[\s,]*+){0,7}+\]'
"""Below 10^7 elements: seven digits in all, after dimensions of 1."""
_COUNTABLE_SHAPE = r'"shape"\s*+:\s*+\[[\s,]*+(?:\d[\s,]*+){0,18}+\]'
"""Below 10^18 elements, of 8 bytes each: their number of bytes fits 64 bits."""


class FrontError(HotrowError, RuntimeError):
    """nginx did not start, or cannot be started again."""


def safe_json() -> str:
    r"""The bodies that Triton's HTTP endpoint survives, as a pattern of PCRE: those that begin with a JSON object
    without deep arrays, in which either each `shape` is small, or no tensor has its `data` in JSON. Where it is in
    binary, a shape whose number of elements overflows would end the backend process.

    Only the first object counts, as tensors in binary follow it. A key with an escape, such as "sh\u0061pe", fits
    neither. The pattern never backtracks, so its time grows with the body's size.
    """
    small = _object("small", _SMALL_SHAPE, _PLAIN_STRING.format(keys="shape"), _VALUE_STRING)
    binary = _object("binary", _COUNTABLE_SHAPE, _PLAIN_STRING.format(keys="shape|data"), _VALUE_STRING)
    return rf"^\s*+(?:{small}|{binary})"


def find_nginx() -> str:
    """The program; ConfigurationError where it is not installed."""
    found = shutil.which("nginx") or shutil.which("nginx", path=SYSTEM_FOLDERS)
    if found is None:
        raise ConfigurationError(
            "--front needs nginx, which is not installed (Debian, Ubuntu: apt-get install nginx-light; "
            "Fedora: dnf install nginx-core; conda: conda install nginx)"
        )
    return found


class Front:
    """A running nginx before a server.

    Args:
        options: of the server, ports resolved.
        folder: the launcher's; nginx gets a folder in it.
    """

    def __init__(self, options: ServerOptions, folder: Path) -> None:
        self._program = find_nginx()
        self._options = options
        self._folder = folder / FRONT_FOLDER
        self._folder.mkdir()
        self._config = self._folder / "nginx.conf"
        self._config.write_text(configuration(options, self._folder), encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and return when it listens; FrontError where it does not."""
        for name in ("http.sock", "grpc.sock"):  # left by a killed nginx, they would prevent a new start
            (self._folder / name).unlink(missing_ok=True)
        command = [self._program, "-c", str(self._config), "-p", str(self._folder)]
        self._process = subprocess.Popen(command, cwd=self._folder, stdin=subprocess.DEVNULL, start_new_session=True)
        while not all(self._listens(endpoint) for endpoint in ("http", "grpc")):
            if self._process.poll() is not None:
                raise FrontError(f"nginx ended with exit status {self._process.returncode}; see its messages above")
            time.sleep(_POLL_S)

    def look(self) -> None:
        """Start it again if it has ended."""
        if self._process is not None and self._process.poll() is not None:
            say("nginx ended and is being restarted")
            self._end()
            self.start()

    def stop(self) -> None:
        """Stop accepting requests, finish those in flight, and end it. Idempotent."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGQUIT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        self._end()
        self._process = None

    def _end(self) -> None:
        """Kill its remaining processes: its workers outlive it if it was killed."""
        assert self._process is not None  # noqa: S101  callers have checked
        end_group(self._process)

    def _listens(self, endpoint: Endpoint) -> bool:
        host, port = self._options.host_of(endpoint), self._options.port_of(endpoint)
        try:
            socket.create_connection((reachable(host), port), timeout=1).close()
        except OSError:
            return False
        return True


def configuration(options: ServerOptions, folder: Path) -> str:
    """The text of nginx.conf for a server; nginx works in `folder`."""
    num_files = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], _MAX_FILES)
    values = {
        "USER": "user root;" if os.geteuid() == 0 else "",
        "WORKERS": min(len(os.sched_getaffinity(0)), _MAX_WORKERS),
        "FILES": num_files,
        "CONNECTIONS": num_files // 2,
        "FOLDER": folder,
        "MAX_BYTES": MAX_BYTES,
        "TRITON_HTTP": authority(*options.listens_at("http")),
        "TRITON_GRPC": authority(*options.listens_at("grpc")),
        "HTTP": authority(options.host_of("http"), options.port_of("http")),
        "GRPC": authority(options.host_of("grpc"), options.port_of("grpc")) + (" ssl" if options.tls else ""),
        "TLS": _tls(options),
        "SAFE_JSON": "~" + safe_json().replace("\\", "\\\\"),
    }
    text = _TEMPLATE.read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    return text


def _tls(options: ServerOptions) -> str:
    if options.tls is None:
        return ""
    tls = options.tls
    lines = [
        "ssl_protocols TLSv1.2 TLSv1.3;",
        f"ssl_certificate {_quoted(tls.certificate.absolute())};",
        f"ssl_certificate_key {_quoted(tls.key.absolute())};",
    ]
    if tls.client_ca is not None:
        lines += [
            f"ssl_client_certificate {_quoted(tls.client_ca.absolute())};",
            "ssl_verify_client on;",
            "ssl_verify_depth 9;",
        ]
    return "\n        ".join(lines)


def _object(name: str, *strings: str) -> str:
    """A pattern of a JSON object, whatever is in it but for strings and deep arrays."""
    part = rf'(?<{name}_part>[^{{}}\[\]"]++|{"|".join(strings)}|(?&{name}))'
    array = ""
    for _ in range(_MAX_ARRAY_DEPTH):
        array = rf"|\[(?:(?&{name}_part){array})*+\]"
    return rf"(?<{name}>\{{(?:{part}{array})*+\}})"


def _quoted(path: Path) -> str:
    text = str(path)
    for character in '\\"':
        text = text.replace(character, "\\" + character)
    return f'"{text}"'
