"""Deletes the metrics of versions that are gone, except the last few of each model.

Triton keeps a metric until it is deleted. A process cannot delete its own: its end would race with the server's,
and a process that serves the same version shares them. So each process notes in a file what it has made. A process that
is loaded deletes what processes made that have ended, for versions that no process serves any more. Processes do both
under one lock, so that no version starts to use a metric while another process deletes it.

The files are in the folder of `hotrow serve`. If the server was started another way, metrics stay.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from inference_session.platform import file_locks
from inference_session.platform.small_files import write_whole
from triton_backend.backend.heartbeat import FOLDER_VARIABLE

NUM_KEPT = 3
"""Number of a model's unloaded versions whose metrics stay: dashboards compare a version with the one before."""


class MetricKey(NamedTuple):
    """The identity of a metric."""

    name: str
    description: str
    kind: str
    """`counter` or `gauge`."""
    labels: tuple[tuple[str, str], ...]


@dataclass
class Record:
    """The metrics that one process has made for a version."""

    model: str
    version: str
    pid: int
    started: str
    """When the process was started, from /proc: a process number may be reused."""
    metrics: list[MetricKey]

    @property
    def is_live(self) -> bool:
        """Whether the process still runs."""
        return _start_of(self.pid) == self.started


def folder() -> Path | None:
    """Where records are kept; None: nowhere."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    return Path(chosen, "metrics") if chosen else None


@contextmanager
def locked(records: Path) -> Iterator[None]:
    """Make and delete metrics while no other process does."""
    records.mkdir(exist_ok=True)
    with file_locks.locked(records):
        yield


def write(records: Path, model: str, version: str, metrics: Sequence[MetricKey]) -> None:
    """Record this process's metrics; metrics that ended processes made for the same version now belong to it too."""
    made, past = dict.fromkeys(metrics), [_claim_of(records)]
    for path, record in _read_all(records):
        if (record.model, record.version) == (model, version) and not record.is_live:
            made.update(dict.fromkeys(record.metrics))
            past.append(path)
    own = records / f"{os.getpid()}.json"
    _save(own, model, version, made)
    for path in past:
        if path != own:  # the number of a process that has ended may be ours now
            path.unlink(missing_ok=True)


def claim(records: Path, model: str, version: str) -> None:
    """Keep other processes from deleting the metrics that this one is about to make; OSError where that cannot be."""
    _save(_claim_of(records), model, version, ())


def _claim_of(records: Path) -> Path:
    return records / f"{os.getpid()}.claim.json"


def _save(path: Path, model: str, version: str, metrics: Iterable[MetricKey]) -> None:
    own = Record(model, version, os.getpid(), _start_of(os.getpid()), list(metrics))
    write_whole(path, json.dumps(asdict(own)).encode())


def delete_old(records: Path, model: str, delete: Callable[[MetricKey], None]) -> None:
    """Delete the metrics of the model's versions that are gone, except the last `NUM_KEPT`."""
    found = [(path, record) for path, record in _read_all(records) if record.model == model]
    live = {record.version for _, record in found if record.is_live}
    gone: dict[str, list[tuple[Path, Record]]] = {}
    for path, record in sorted(found, key=lambda each: each[0].stat().st_mtime_ns, reverse=True):
        if record.version not in live:
            gone.setdefault(record.version, []).append((path, record))
    for version in list(gone)[NUM_KEPT:]:
        for path, record in gone[version]:
            for metric in record.metrics:
                delete(metric)
            path.unlink()


def _read_all(records: Path) -> list[tuple[Path, Record]]:
    found = []
    for path in records.glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # half written by a process that was killed
            record = Record(**json.loads(path.read_text(encoding="utf-8")))
            record.metrics = [
                MetricKey(name, description, kind, tuple((key, value) for key, value in labels))
                for name, description, kind, labels in record.metrics
            ]
            found.append((path, record))
    return found


def _start_of(pid: int) -> str:
    """When a process was started; empty where it is gone, or a zombie."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""
