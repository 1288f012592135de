"""The server under test: sessions of this process, or a real Triton."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import psutil
from tritonclient.utils import InferenceServerException

from inference_session import InferenceSession
from inference_session.errors import HotrowError, SessionClosedError, UnavailableError
from inference_session.versions import VersionManager
from tests.campaign.contents import MODEL, SPEC, TABLES, Arrays, every_key
from tests.testing.model_settings import add_settings
from tests.testing.served import Served, start
from tests.testing.servers import PATIENCE_S, free_port, wait_until
from triton_backend.client.server import RemoteServer
from triton_backend.repository.config_writer import write_model_config

_LOADED = re.compile(r"hotrow_model_version_info\{.*\} 1$")


class Target(Protocol):
    """Serves one version of the model at a time."""

    def ask(self, inputs: Arrays) -> Arrays:
        """One request; any error is raised."""

    def load(self, directory: Path) -> None:
        """Let a version take over; returns when it answers all requests that begin."""

    def update_in_place(self, number: int) -> None:
        """Let the current content of the version's folder, content `number`, take over."""

    def refresh(self) -> None:
        """Let the cache read its rows again from the stores."""

    def is_well(self) -> bool:
        """Whether every store is in use."""

    def describe(self) -> str:
        """The state that helps to explain a finding."""

    def close(self) -> None:
        """Stop answering."""


def rows_of(target: Target) -> Arrays:
    """Every row of every table, from answers."""
    answer = target.ask(every_key())
    return {table.name: answer[f"{table.name}_rows"][: len(table.keys), 0] for table in TABLES}


class SessionTarget:
    """The version that serves, replaced while requests are under way, as a server would."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = dict(settings)
        self._manager: VersionManager | None = None
        self._leases: dict[VersionManager, int] = {}
        self._free = threading.Condition()

    @property
    def session(self) -> InferenceSession:
        """The session that serves, for the only thread that replaces it."""
        assert self._manager is not None
        with self._manager.lease() as session:
            return session

    def ask(self, inputs: Arrays) -> Arrays:
        """See Target."""
        with self._leased() as manager, manager.lease() as session:
            return dict(session.run(inputs))

    def load(self, directory: Path) -> None:
        """See Target."""
        new = VersionManager(directory, lambda: InferenceSession.open(directory, **self._settings))
        with self._free:
            old, self._manager = self._manager, new
            self._leases[new] = 0
        self._end(old)

    def update_in_place(self, number: int) -> None:
        """See Target."""
        wait_until(self._is_updated, "the new content to be taken")

    def refresh(self) -> None:
        """See Target."""
        self.session.refresh()

    def is_well(self) -> bool:
        """See Target."""
        return all(tier["failure"] is None for tier in self.session.stats().get("tiers", {}).values())

    def describe(self) -> str:
        """See Target: what the tiers and the stream have done, and why they are out."""
        if self._manager is None:
            return "no session"
        stats = self.session.stats()
        tiers = stats.get("tiers", {})
        return f"tiers: {tiers}, updates: {stats['updates']}"

    def close(self) -> None:
        """See Target."""
        old, self._manager = self._manager, None
        self._end(old)

    def _is_updated(self) -> bool:
        """Try it; on a busy machine the new content may not catch up in time with the updates that are served."""
        assert self._manager is not None
        with contextlib.suppress(UnavailableError):
            return self._manager.update()
        return False

    def _end(self, manager: VersionManager | None) -> None:
        if manager is not None:
            with self._free:
                self._free.wait_for(lambda: not self._leases[manager])
                del self._leases[manager]
            manager.close()

    @contextlib.contextmanager
    def _leased(self) -> Iterator[VersionManager]:
        with self._free:
            manager = self._manager
            if manager is None:
                raise SessionClosedError("the target has been closed")
            self._leases[manager] += 1
        try:
            yield manager
        finally:
            with self._free:
                self._leases[manager] -= 1
                self._free.notify_all()


class TritonTarget:
    """`hotrow serve` in front of the repository."""

    def __init__(self, repository: Path, settings: Mapping[str, Any]) -> None:
        self._repository = repository
        self._settings = {**settings, "watch_interval_s": 0.2, "refresh_interval_s": 1}
        self._ports = [free_port() for _ in range(3)]
        self._clients = threading.local()
        self.served: Served | None = None

    def ask(self, inputs: Arrays) -> Arrays:
        """See Target. On a busy machine an answer may take long."""
        return dict(self._client().ask(MODEL, inputs, timeout_s=PATIENCE_S / 2))

    def load(self, directory: Path) -> None:
        """See Target."""
        if self.served is None:
            self._configure(directory)
            self.start()
            return
        with self._remote() as remote:
            remote.load_versions(MODEL, [int(directory.name)])

    def update_in_place(self, number: int) -> None:
        """See Target."""
        wait_until(lambda: self._content() == number, f"content {number} to serve")

    def refresh(self) -> None:
        """See Target. It is done each second."""

    def is_well(self) -> bool:
        """See Target."""
        assert self.served is not None
        with urllib.request.urlopen(self.served.metrics, timeout=PATIENCE_S) as page:  # noqa: S310  a page of ours
            lines = page.read().decode().splitlines()
        # Those of versions that are gone stay for a while, as they were last.
        served = {line.split('version="')[1].split('"')[0] for line in lines if _LOADED.match(line)}
        tiers = [line for line in lines if line.startswith("hotrow_tier_up{")]
        return all(line.endswith(" 1") for line in tiers if line.split('version="')[1].split('"')[0] in served)

    def describe(self) -> str:
        """See Target: the last lines that the server has logged."""
        return "" if self.served is None else "".join(self.served.errors[-15:])

    def close(self) -> None:
        """See Target."""
        if self.served is not None:
            self.served.close()

    def start(self) -> None:
        """Start the server, on the same ports each time."""
        names = ("--http-port", "--grpc-port", "--metrics-port")
        flags = [text for name, port in zip(names, self._ports, strict=True) for text in (name, str(port))]
        self.served = start(self._repository, *flags)

    def recover(self) -> int:
        """Wait for answers, starting `hotrow serve` again if it has ended, as what supervises it would; returns the
        content that answers.
        """
        assert self.served is not None
        launcher = self.served.process
        wait_until(lambda: launcher.poll() is not None or self._content() is not None, "answers, or the launcher's end")
        if launcher.poll() is not None:
            self.served.close()
            wait_until(lambda: all(map(_is_free, self._ports)), "the ports to be free")
            self.start()
        found: list[int | None] = [None]

        def answers() -> bool:
            found[0] = self._content()
            return found[0] is not None

        wait_until(answers, "an answer")
        return found[0] or 0

    def answers(self) -> bool:
        """Whether a request is answered now."""
        return self._content() is not None

    def process(self, what: str) -> psutil.Process:
        """One of the processes that serve: `stub`, `server` or `launcher`."""
        assert self.served is not None
        if what == "stub":
            return self.served.stub(MODEL)
        return self.served.server() if what == "server" else psutil.Process(self.served.process.pid)

    def _content(self) -> int | None:
        try:
            return int(self._client().ask(MODEL, every_key())["content"][0, 0])
        except (HotrowError, InferenceServerException):
            return None

    def _client(self) -> RemoteServer:
        """The calling thread has its own."""
        client = getattr(self._clients, "remote", None)
        if client is None:
            client = self._clients.remote = self._remote()
        return client

    def _remote(self) -> RemoteServer:
        return RemoteServer(f"127.0.0.1:{self._ports[1]}")

    def _configure(self, directory: Path) -> None:
        add_settings(write_model_config(directory, SPEC, MODEL), self._settings)


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
