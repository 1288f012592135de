"""`python -m tests.campaign.soak --minutes N`: a served model under steady load, and the resources of its processes.

A real Triton over Redis, RocksDB and an update stream; clients, updates, a swap each minute, a Redis that is killed and
started again. The slopes of memory, handles, threads, disk and shared memory, per hour, come last, with the verdict.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import psutil

from inference_session.errors import HotrowError
from inference_session.update_stream import Publisher
from tests.campaign.contents import MODEL, TABLES, random_question
from tests.campaign.expectations import Expectations, Writer
from tests.campaign.faults import Faults
from tests.campaign.journal import Journal
from tests.campaign.operator import Operator
from tests.campaign.plan import Plan
from tests.campaign.rows import encode
from tests.campaign.stores import Stores
from tests.campaign.target import TritonTarget
from tests.campaign.writers import StreamWriter

PLAN = Plan(Writer.STREAM, "redis", has_rocksdb=True, cache_bytes=8000, on_triton=True)
_SAMPLE_S = 5.0
_MIB = 1 << 20
_WARM_FRACTION = 0.25
"""The part of the time in which caches fill, and which is not measured."""
LIMITS = {"private_mib": 24.0, "handles": 6.0, "threads": 3.0, "disk_mib": 24.0, "shared_mib": 4.0}
"""How much each may grow in an hour: the measure's own variation, not a leak per swap, request or outage."""
_FAILURES = "failed requests", "failed threads"


@dataclass
class Load:
    """How much is done, and has been done."""

    num_clients: int
    pause_s: float
    """Of a client, between two requests."""
    rows_per_s: int
    swap_s: float
    outage_s: float
    done: Counter[str]


def main() -> int:
    """Run, and print a line each minute, then the slopes; the status is 1 where something grows or fails."""
    parser = argparse.ArgumentParser(description="A served model under steady load: does anything grow?")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--pause-s", type=float, default=0.05, help="Of a client, between two requests.")
    parser.add_argument("--rows-per-s", type=int, default=5000)
    parser.add_argument("--swap-s", type=float, default=60)
    parser.add_argument("--outage-s", type=float, default=45, help="Between two ends of Redis.")
    options = parser.parse_args()
    load = Load(options.clients, options.pause_s, options.rows_per_s, options.swap_s, options.outage_s, Counter())
    samples = _Soak(load).run(60 * options.minutes)
    grown = _report(samples)
    print(f"soak: {dict(load.done)}; {'flat' if not grown else 'grows: ' + ', '.join(grown)}")
    return bool(grown or any(load.done[kind] for kind in _FAILURES))


class _LearnedStores(Stores):
    """Each version has learned from what was published before it, as a trainer's has: its database does not grow with
    the age of the topics, of which this broker forgets nothing.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__(plan, folder)
        self._learned: dict[int, str] = {}

    def settings(self, version: int) -> Mapping[str, str]:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return {**super().settings(version), "update_since": self._learned.setdefault(version, now)}


class _Soak:
    """One run."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._folder = Path(tempfile.mkdtemp(prefix="hotrow-soak-"))
        self._stores = _LearnedStores(PLAN, self._folder)
        settings = {"cache_bytes": PLAN.cache_bytes, "keep_versions": 2, "store_timeout_ms": 5000}
        self._target = TritonTarget(self._folder / "repository", settings)
        self._ending = threading.Event()
        self._pushing = threading.Lock()

    def run(self, duration_s: float) -> list[dict[str, float]]:
        """The samples, one each `_SAMPLE_S`."""
        with self._stores:
            try:
                operator = self._begin()
                with self._threads(operator):
                    return self._watch(duration_s)
            finally:
                self._target.close()
                shutil.rmtree(self._folder, ignore_errors=True)

    def _begin(self) -> Operator:
        expectations = Expectations(Writer.STREAM)
        faults = Faults(None, Journal(), expectations)  # type: ignore[arg-type]  # it starts none
        operator = Operator(
            PLAN, self._folder, stores=self._stores, target=self._target, expectations=expectations, faults=faults
        )
        version = operator.publish()
        assert self._stores.stream_url is not None
        operator.writer = StreamWriter(self._stores.stream_url, expectations)
        operator.load(version)
        return operator

    @contextlib.contextmanager
    def _threads(self, operator: Operator):  # type: ignore[no-untyped-def]
        works: list[Callable[[], None]] = [self._ask] * self._load.num_clients
        works += [self._publish, lambda: self._swap(operator), self._break_redis]
        threads = [threading.Thread(target=self._counted, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ending.set()
            for thread in threads:
                thread.join()

    def _counted(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            self._load.done["failed threads"] += 1
            raise

    def _ask(self) -> None:
        rng = np.random.default_rng()
        while not self._ending.wait(self._load.pause_s):
            try:
                self._target.ask(random_question(rng).inputs)
            except HotrowError as error:
                print(f"a request failed: {error}", flush=True)
                self._load.done["failed requests"] += 1
            self._load.done["requests"] += 1

    def _publish(self) -> None:
        """Send this many rows a second, in batches like a trainer's."""
        rng, number = np.random.default_rng(0), 0
        assert self._stores.stream_url is not None
        with Publisher(self._stores.stream_url, MODEL, encoding="batch") as publisher:
            while not self._ending.wait(0.1):
                table = TABLES[number % len(TABLES)]
                keys = rng.integers(0, len(table.keys), self._load.rows_per_s // 10)
                publisher.publish(table.name, table.keys[keys], encode(table.number, keys, 0, number % 900_000))
                self._load.done["rows"] += len(keys)
                number += 1

    def _swap(self, operator: Operator) -> None:
        """A version each time; those before the last one are removed, as an operator would."""
        while not self._ending.wait(self._load.swap_s):
            with self._pushing:
                version = operator.publish()
            self._target.load(operator.directory(version))
            for old in [one for one in operator.contents if one < version - 1]:
                shutil.rmtree(operator.directory(old))
                shutil.rmtree(self._folder / "sources" / str(old), ignore_errors=True)
                shutil.rmtree(self._stores.database(old), ignore_errors=True)
                del operator.contents[old]
            self._load.done["swaps"] += 1

    def _break_redis(self) -> None:
        redis = self._stores.redis
        while redis is not None and not self._ending.wait(self._load.outage_s):
            with self._pushing:  # which needs it
                redis.stop(signal.SIGKILL)
                self._ending.wait(2)
                redis.start()
            self._load.done["Redis restarts"] += 1

    def _watch(self, duration_s: float) -> list[dict[str, float]]:
        samples: list[dict[str, float]] = []
        began_s = said_s = time.monotonic()
        while time.monotonic() - began_s < duration_s:
            self._ending.wait(_SAMPLE_S)
            samples.append({"s": time.monotonic() - began_s, **self._sample()})
            if time.monotonic() - said_s > 60:
                said_s = time.monotonic()
                print(", ".join(f"{name} {value:.0f}" for name, value in samples[-1].items()), flush=True)
        return samples

    def _sample(self) -> dict[str, float]:
        """Of launcher, server and backend processes together."""
        assert self._target.served is not None
        found: Counter[str] = Counter()
        shared: dict[str, int] = {}
        for process in self._target.served.family():
            with contextlib.suppress(psutil.Error):
                found["private_mib"] += process.memory_full_info().uss / _MIB  # type: ignore[assignment]
                found["handles"] += process.num_fds()
                found["threads"] += process.num_threads()
                shared.update(_shared_bytes(process))
        found["disk_mib"] = _size(self._folder) / _MIB  # type: ignore[assignment]
        found["shared_mib"] = sum(shared.values()) / _MIB  # type: ignore[assignment]
        return dict(found)


def _shared_bytes(process: psutil.Process) -> dict[str, int]:
    """Sizes of the shared memory regions that a process has mapped, by path; other servers have regions, too."""
    paths = {one.path for one in process.memory_maps() if one.path.startswith("/dev/shm/")}  # noqa: S108
    return {path: _size_of(Path(path)) for path in paths}


def _size_of(file: Path) -> int:
    """0 if it has been removed: its mapped part is private memory by then."""
    try:
        return file.stat().st_blocks * 512
    except OSError:
        return 0


def _size(folder: Path) -> int:
    """Bytes that a folder takes; of files by several names once."""
    sizes: dict[int, int] = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def _report(samples: list[dict[str, float]]) -> list[str]:
    """Print the slope of each measure, by the median of all pairs of samples; returns what grows beyond its limit."""
    warm = samples[int(len(samples) * _WARM_FRACTION) :]
    grown = []
    for name, limit in LIMITS.items():
        slope = _slope_per_hour(np.array([one["s"] for one in warm]), np.array([one[name] for one in warm]))
        print(f"{name}: {warm[0][name]:.1f} to {warm[-1][name]:.1f}, slope {slope:+.2f} per hour (limit {limit:g})")
        if slope > limit:
            grown.append(name)
    return grown


def _slope_per_hour(seconds: np.ndarray, values: np.ndarray) -> float:
    """Theil and Sen's: the median over all pairs, which swaps, that hold two versions for a moment, do not move."""
    first, second = np.triu_indices(len(seconds), 1)
    return float(np.median((values[second] - values[first]) / (seconds[second] - seconds[first])) * 3600)


if __name__ == "__main__":
    sys.exit(main())
