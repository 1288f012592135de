"""Detects dead and hung backend processes, which the server does not notice, and has their models loaded again.

dead      a zombie child of the server (stubs.py) for `DEAD_S`: an unloaded one is also a zombie for a moment
stopped   seen in state T for `STOPPED_S`
given up  the server has waited for its end for `AWAITED_S`, and it has not loaded its model: where a process gets no
          processor for a second or two of a load, Triton takes it for dead, and frees the memory that both share. The
          process waits there for a message, and the server for the process. It waits too, without harm, for one that
          takes long to end after an unload
hung      has sent no heartbeat for `SILENT_S` (heartbeat.py), and its version does not answer a request either: silence
          alone may be a long computation that holds the interpreter

The model is loaded with its current configuration plus the count of such reloads. The change makes Triton load a new
instance next to the old one, and gives the new process the count to report. The versions stay those that were ready, or
become those of a load in progress; a version that a client unloads meanwhile stays unloaded. If their folders are gone,
the highest version is loaded, as in a server that starts. A hung process is killed
once the new one serves, which ends its requests with an error. If that takes the server down, because it shares locks
with the process, the server is started again, on the same ports with the same versions.

Triton keeps the previous load of a model for ever where a process of it died: for each request that it answers "Stub
process is not healthy", it leaks a reference to the model. So it never ends the other instances' processes. They get
`DRAIN_S` to finish their requests, and are killed then.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol
from urllib.error import HTTPError

from inference_session.errors import HotrowError
from triton_backend.backend import heartbeat
from triton_backend.backend.heartbeat import RESTARTS_PARAMETER
from triton_backend.client.probe import encode_probe
from triton_backend.launcher import stubs
from triton_backend.launcher.log import say
from triton_backend.launcher.stubs import Stub
from triton_backend.repository.chosen_versions import with_versions
from triton_backend.repository.model_config import CONFIG_FILE
from triton_backend.repository.servable import in_url, is_version

POLL_S = 0.25
OBSERVE_S = 2.0
"""How often the server is asked what it serves while its processes stay the same; else every `POLL_S`."""
DEAD_S = 1.5
STARTING_S = 5.0
"""The longest that a process may be unknown. One that failed to load is waited for by the server at once."""
STOPPED_S = 2.0
SUSPICIOUS_S = 4.0
"""A silence of this length is logged."""
SILENT_S = 15.0
AWAITED_S = 15.0
PROBE_TIMEOUT_S = 10.0
RETRY_S = (1.0, 2.0, 5.0, 15.0, 30.0)
DRAIN_S = 30.0
"""How long processes may stay that a load has replaced."""
RECENT_S = 60.0
"""A server crash this soon after the loss of a backend process is attributed to the loss."""


class Server(Protocol):
    """The server to watch."""

    @property
    def pid(self) -> int: ...

    @property
    def repository(self) -> Path:
        """The repository as the server sees it."""

    @property
    def heartbeats(self) -> Path:
        """The folder where backend processes beat."""

    @property
    def probe_key(self) -> str:
        """What marks a request as a probe (probe.py)."""

    def request(
        self, method: str, path: str, body: bytes = b"", *, headers: Mapping[str, str] = ..., timeout: float = ...
    ) -> bytes:
        """Call the server's HTTP endpoint; OSError or HTTPException where it fails."""

    def load(self, model: str, config: Mapping[str, Any]) -> None:
        """Load a model with a configuration; HotrowError or OSError where that fails."""


@dataclass(frozen=True)
class LoadedVersions:
    """What is served of a model: enough to load it again unchanged."""

    versions: tuple[int, ...]
    config: Mapping[str, Any]


@dataclass(eq=False)
class Process:
    """What is known of a child of the server, from look to look."""

    stub: Stub | None = None
    """None: it is not known yet whose it is."""
    state: str = ""
    since: float = field(default_factory=time.monotonic)
    """When it was first seen in this state."""
    is_lost: bool = False
    """Found dead, hung or replaced, which is handled once."""
    has_loaded: bool = False
    """Its model."""
    is_suspected: bool = False
    is_examined: bool = False
    ends_at: float | None = None
    """When it is to be gone, if a load has replaced it."""

    def lasted_s(self, state: str) -> float:
        """How long it has been in this state."""
        if self.state != state:
            self.state, self.since = state, time.monotonic()
        return time.monotonic() - self.since


def ready_versions(index: Sequence[Mapping[str, str]]) -> dict[str, list[int]]:
    """The versions that answer, ascending, by model, of Triton's index of its repository."""
    ready = sorted((entry["name"], int(entry["version"])) for entry in index if entry.get("state") == "READY")
    return {name: [version for _, version in group] for name, group in groupby(ready, itemgetter(0))}


class Watchdog:
    """Watches the backend processes of one server. `look` has to be called every `POLL_S`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._processes: dict[int, Process] = {}
        """The children of the server at the last look."""
        self._awaited: dict[int, float] = {}
        """Since when the server waits for the end of processes."""
        self._loaded: dict[str, LoadedVersions] = {}
        self._loading: set[str] = set()
        """Models of which a version was being loaded at the last look."""
        self._ambiguous: set[str] = set()
        """Names of ready models whose configuration was refused: several models of several repositories have them."""
        self._missing: set[str] = set()
        """Models that have not been loaded since the server was started again."""
        self._lock = threading.Lock()  # of the next three
        self._replaced: defaultdict[str, list[Stub]] = defaultdict(list)
        """By model: processes to end once the model has been loaded again."""
        self._restarts: Counter[str] = Counter()
        self._healing: dict[str, threading.Thread] = {}
        self._observed_at = self._lost_at = self._awaited_at = -RECENT_S

    def look(self) -> None:
        """Check every backend process once, and start the necessary actions."""
        present = stubs.children(self._server.pid, known=self._processes)
        is_changing = bool(self._loading) or self._processes.keys() != {*present}
        for pid in self._processes.keys() - {*present}:
            if self._processes.pop(pid).stub:
                heartbeat.forget(self._server.heartbeats, pid)  # it may have been killed
        for pid in present:
            process = self._processes.setdefault(pid, Process())
            process.stub = process.stub or stubs.identify(pid, self._server.heartbeats)
        # Loads start and end processes: note what they changed before the server can go down.
        if is_changing or time.monotonic() - self._observed_at > OBSERVE_S:
            self._observe()
        for pid, process in self._processes.items():
            if not process.is_lost:
                self._judge(pid, process)
        self._end_replaced()
        # A server of many models has thousands of threads.
        if not all(process.has_loaded or process.is_lost for process in self._processes.values()):
            self.end_given_up()

    def end_given_up(self) -> None:
        """Kill processes that the server has given up: it would wait for their end for ever, and so would a load."""
        now = time.monotonic()
        if now - self._awaited_at < OBSERVE_S:
            return
        self._awaited_at = now
        self._awaited = {pid: self._awaited.get(pid, now) for pid in stubs.awaited(self._server.pid)}
        for pid, since in self._awaited.items():
            process = self._processes.get(pid) or Process()
            if now - since <= AWAITED_S or process.has_loaded or process.is_lost or not stubs.state(pid):
                continue
            if stub := stubs.identify(pid, self._server.heartbeats):
                self._processes[pid] = process
                process.is_lost = True
                self._lost_at = now
                say(f"{stub} has not ended, although the server gave it up {now - since:.0f} s ago, and is killed")
                self._end(stub)

    def lost_one_lately(self) -> bool:
        """Whether a backend process was lost so recently that it may have taken the server with it."""
        return time.monotonic() - self._lost_at < RECENT_S

    def lose_all(self) -> None:
        """The server and its loaded models are gone: `reload_all` loads them into the next server."""
        self._missing = set(self._loaded)
        for pid, process in self._processes.items():
            if process.stub:
                heartbeat.forget(self._server.heartbeats, pid)

    def reload_all(self) -> None:
        """Load the previous models into a server that has been started again."""
        for of in (self._processes, self._replaced, self._healing):
            of.clear()
        for model in self._missing.copy():
            self._heal(model)

    def _judge(self, pid: int, process: Process) -> None:
        stub, state = process.stub, stubs.state(pid)
        lasted_s = process.lasted_s(state)
        if stub is None:
            if lasted_s > STARTING_S:
                self._note_unknown(pid, process)
        elif state == "Z" and lasted_s > DEAD_S:
            self._lose(process, stub, stubs.end_of(pid))
        elif state == "T" and lasted_s > STOPPED_S:
            self._lose(process, stub, "is stopped")
        elif state not in ("Z", "T") and self._is_silent(process, stub):
            process.is_examined = True
            threading.Thread(target=self._examine, args=(process, stub), name="hotrow-examine", daemon=True).start()

    def _note_unknown(self, pid: int, process: Process) -> None:
        """Report a process that has died before it was known. Triton, which waits for its first message, then waits
        without end.
        """
        if stubs.is_zombie(pid):
            process.is_lost = True
            say(f"backend process {pid} {stubs.end_of(pid)} as it began: if a load does not end, restart the server")

    def _is_silent(self, process: Process, stub: Stub) -> bool:
        """Whether it has been silent long enough to be examined, and is not being examined yet."""
        beat = heartbeat.last_beat(self._server.heartbeats, stub.pid)
        silence_s = 0.0 if beat is None else time.monotonic() - beat
        was_suspected, process.is_suspected = process.is_suspected, silence_s >= SUSPICIOUS_S
        if process.is_suspected and not was_suspected:
            say(f"{stub} has been silent for {silence_s:.0f} s")
        return silence_s > SILENT_S and not process.is_examined

    def _examine(self, process: Process, stub: Stub) -> None:
        """Have a silent version answer a request. One that is being loaded is not asked."""
        path = f"v2/models/{in_url(stub.model)}/versions/{stub.version}"
        with suppress(OSError, HTTPException):
            metadata = json.loads(self._server.request("GET", path))
            headers, body = encode_probe(metadata["inputs"], self._server.probe_key)
            try:
                self._server.request("POST", f"{path}/infer", body, headers=headers, timeout=PROBE_TIMEOUT_S)
            except HTTPError:
                pass  # an error is an answer
            except OSError:
                self._lose(process, stub, "is hung")
        process.is_examined = False

    def _lose(self, process: Process, stub: Stub, how: str) -> None:
        process.is_lost = True
        self._lost_at = time.monotonic()
        say(f"{stub} {how}")
        self._observe(PROBE_TIMEOUT_S)  # what a busy server has swapped in meanwhile must not be undone
        loaded = self._loaded.get(stub.model)
        if loaded and stub.version in loaded.versions:
            self._heal(stub.model, stub)
        else:  # it was being loaded or unloaded, which has to finish first
            self._end(stub)
            if stub.model in self._ambiguous:
                say(f"several models are called {stub.model!r}, so none can be loaded again: restart the server")

    def _heal(self, model: str, *lost: Stub) -> None:
        """Load a model again, in a thread, because loads may take long; then end the processes that were lost."""
        with self._lock:
            self._restarts[model] += 1
            self._replaced[model].extend(lost)
            if (thread := self._healing.get(model)) is None or not thread.is_alive():
                self._healing[model] = threading.Thread(
                    target=self._load, args=(model,), name=f"hotrow-heal-{model}", daemon=True
                )
                self._healing[model].start()

    def _load(self, model: str) -> None:
        """Load it until that has succeeded after the last loss."""
        attempt = done = 0
        while (replaced := self._finished(model, done)) is None:
            number = self._restarts[model]
            if self._try_load(model, number, attempt):
                done = number
            else:
                attempt += 1
        for stub in replaced:
            self._end(stub)
        say(f"model {model!r} {'serves again' if model in self._loaded else 'was unloaded and stays unloaded'}")

    def _finished(self, model: str, done: int) -> list[Stub] | None:
        """The processes to end, if no loss came after number `done`: the next one starts a thread of its own. None: one
        came.
        """
        with self._lock:
            if self._restarts[model] > done:
                return None
            if self._healing.get(model) is threading.current_thread():
                del self._healing[model]
            return self._replaced.pop(model, [])

    def _try_load(self, model: str, number: int, attempt: int) -> bool:
        """Load it once; False: that failed, and some time has passed since."""
        try:
            self._load_once(model, number, attempt)
        except (HotrowError, OSError, HTTPException) as error:
            wait_s = RETRY_S[min(attempt, len(RETRY_S) - 1)]
            say(f"model {model!r} could not be loaded again, next attempt in {wait_s:.0f} s: {error}")
            time.sleep(wait_s)
            return False
        return True

    def _load_once(self, model: str, number: int, attempt: int) -> None:
        self._await_loads_of_others(model)
        if (loaded := self._loaded.get(model)) is None:
            return  # a client has unloaded it
        lost = {stub.version for stub in self._replaced[model]}
        if lost and lost.isdisjoint(loaded.versions):
            return  # a client has loaded another version meanwhile
        versions = self._versions_left(model, loaded.versions) if attempt > 1 else loaded.versions
        config = with_versions(loaded.config, versions)
        config["parameters"] = {**config.get("parameters", {}), RESTARTS_PARAMETER: {"string_value": str(number)}}
        before = [one for one in self._processes.copy().values() if one.stub and one.stub.model == model]
        self._server.load(model, config)
        for process in before:
            process.ends_at = time.monotonic() + DRAIN_S
        self._missing.discard(model)
        _let_newer_versions_be_noticed(self._server.repository / model, versions)

    def _versions_left(self, model: str, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """The wanted versions that still have folders; if none has, the highest, which a server that starts serves."""
        try:
            names = [path.name for path in (self._server.repository / model).iterdir()]
        except OSError:
            return wanted
        present = {int(name) for name in names if is_version(name)}
        left = present.intersection(wanted) or set(sorted(present)[-1:]) or set(wanted)
        if gone := sorted(set(wanted) - left):
            say(f"the folder of model {model!r} version {gone[0]} is gone; loading version {max(left)}")
        return tuple(sorted(left))

    def _await_loads_of_others(self, model: str) -> None:
        """Wait for loads in progress: the server would too, and what they load is wanted."""
        self._observe()
        while model in self._loading:
            time.sleep(POLL_S)
            self._observe()

    def _observe(self, timeout_s: float = OBSERVE_S) -> None:
        """Record what is served. What cannot be queried now keeps its recorded value."""
        self._observed_at = time.monotonic()
        with suppress(OSError, HTTPException):
            # Before the query: its answer lacks what is loaded meanwhile.
            missing, present = self._missing.copy(), self._processes.copy()
            healing = {model for model, thread in list(self._healing.items()) if thread.is_alive()}
            index = json.loads(self._server.request("POST", "v2/repository/index", timeout=timeout_s))
            self._loading = {entry["name"] for entry in index if entry.get("state") == "LOADING"}
            ready = ready_versions(index)
            for model in set(self._loaded) - set(ready) - missing - (self._loading & healing):
                self._loaded.pop(model, None)
            try:
                self._read_configs(ready, timeout_s)
            finally:
                self._settle(present, self._loading | healing)

    def _read_configs(self, ready: Mapping[str, Sequence[int]], timeout_s: float) -> None:
        refused = {*ready}
        for model, versions in ready.items():
            path = f"v2/models/{in_url(model)}/config"
            with suppress(HTTPError):  # it was unloaded meanwhile, or is one of several models of this name
                config = json.loads(self._server.request("GET", path, timeout=timeout_s))
                self._loaded[model] = LoadedVersions(tuple(versions), config)
                refused.discard(model)
        self._ambiguous = refused

    def _settle(self, present: Mapping[int, Process], loading: set[str]) -> None:
        """Note which processes have loaded their models. The server calls a version ready also while it loads it again:
        the new processes have loaded it when the old ones are gone. Where these went unseen, two loads have followed
        each other between two looks, and the processes of the second may still load it.
        """
        versions: defaultdict[tuple[str, int], list[Process]] = defaultdict(list)
        for pid in sorted(present, key=stubs.began):
            process = present[pid]
            if process.stub and not process.is_lost:
                versions[process.stub.model, process.stub.version].append(process)
        for (model, _), processes in versions.items():
            if model not in loading and not any(process.has_loaded for process in processes):
                for process in processes[: self._num_instances(model)]:
                    process.has_loaded = True

    def _num_instances(self, model: str) -> int | None:
        """How many processes a version of a model has; None: it is not served."""
        if (loaded := self._loaded.get(model)) is None:
            return None
        groups = loaded.config.get("instance_group", [])
        return sum(group.get("count", 1) * max(len(group.get("gpus", [])), 1) for group in groups) or None

    def _end_replaced(self) -> None:
        """Kill processes that the server has not ended although a load has replaced them."""
        for process in self._processes.values():
            if process.stub and process.ends_at and time.monotonic() >= process.ends_at and not process.is_lost:
                process.is_lost = True
                say(f"{process.stub} was replaced and is killed: the server does not end it")
                self._end(process.stub)

    def _end(self, stub: Stub) -> None:
        """Kill it if it still lives, and remove its shared memory and heartbeat, which no other process removes."""
        with suppress(ProcessLookupError):
            os.kill(stub.pid, signal.SIGKILL)
        stubs.remove_memory(stub)
        heartbeat.forget(self._server.heartbeats, stub.pid)


def _let_newer_versions_be_noticed(folder: Path, loaded: tuple[int, ...]) -> None:
    """After a load with our configuration the server treats all files older than the load as known. If a version has
    been published and not loaded, a later load without configuration has to find a change.
    """
    with suppress(OSError):  # the repository may be read-only
        if any(is_version(path.name) and int(path.name) > max(loaded) for path in folder.iterdir()):
            os.utime(folder / CONFIG_FILE)
