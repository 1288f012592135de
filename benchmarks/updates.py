"""Updates through a real broker: goal G11.

    python benchmarks/updates.py              400 k rows of 512 bytes, about two minutes
    python benchmarks/updates.py --quick      100 k rows

apply       a fresh consumer reads all that has been published. Rows/s by the clock, which the broker limits where it is
            slower, and by the processor time that this process spends: what one core applies. Every row is compared
            with what was published, once. The goal: 264 k rows/s (HugeCTR's 1.1 Gb/s), and 5 x the live rate
live        meanwhile (`--rate` rows/s are published by another process) the time from publishing to serving, and
            requests of 64 samples x 26 tables compared with those of an idle session, in turns: p99 at most 1 s, and
            1.1 x. `busy` is an idle session while a publisher runs whose rows no session reads: what is above its ratio
            is the cost of updates

Tiers: `files` keeps changed rows in memory, in front of the files; the others have a cache over those stores.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import onnx
from numpy.typing import NDArray
from triton import FEATURES, SAMPLES, graph

from inference_session import InferenceSession
from inference_session.importers.onnx import import_onnx
from inference_session.update_stream import Publisher
from inference_session.update_stream.publisher import Encoding

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.testing.broker import Broker
from tests.testing.servers import RedisServer

DIM, ROWS_PER_TABLE = 128, 4_000
GOAL_PER_S = 264_000
TABLE = "table0"
PROBE = ROWS_PER_TABLE - 1
"""A row whose first element is when it was published."""
PUBLISH_S = 0.05
ROUNDS = 3
NUM_ROWS, NUM_ROWS_QUICK = 400_000, 100_000

TIERS = ("files", "RocksDB", "Redis", "Redis and RocksDB")

Rows = tuple[NDArray[np.int64], NDArray[np.float32]]


class Delays(NamedTuple):
    """The delays of one round, in seconds."""

    requests: NDArray[np.float64]
    served: NDArray[np.float64]
    """From publishing to serving."""


def write_version(folder: Path, model: str) -> Path:
    """A model whose tables have rows of 512 bytes."""
    rng = np.random.default_rng(0)
    tables = [rng.standard_normal((ROWS_PER_TABLE, DIM), np.float32) for _ in range(FEATURES)]
    layers = [rng.standard_normal(shape, np.float32) / np.float32(64) for shape in ((FEATURES * DIM, 64), (64, 1))]
    onnx.save(graph(tables, layers), folder / "model.onnx")
    return import_onnx(folder / "model.onnx", folder / model / "1", model).version_dir


@contextlib.contextmanager
def stores(tiers: str, version_dir: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Settings of a session with these tiers, which hold the version's rows."""
    with contextlib.ExitStack() as stack:
        settings: dict[str, Any] = {}
        if "Redis" in tiers:
            settings["volatile_store"] = stack.enter_context(RedisServer()).url
        if "RocksDB" in tiers:
            database = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
            settings["persistent_store"] = f"rocksdb://{database}/db"
        for url in settings.values():
            push = [sys.executable, "-m", "hotrow", "push", str(version_dir), "--to", url]
            subprocess.run(push, check=True, stdout=subprocess.DEVNULL)
        yield settings


def bench_apply(version_dir: Path, url: str, rows: Rows, settings: Mapping[str, Any]) -> tuple[float, float]:
    """Rows/s, by wall clock and by processor time, at which a new consumer applies all rows."""
    keys, vectors = rows
    with InferenceSession.open(version_dir, update_stream=url, catch_up_s=0, **settings) as session:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        while session.stats()["updates"]["updated_rows"] < len(keys):
            time.sleep(0.01)
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
        for i in range(0, len(keys), 50_000):
            assert np.array_equal(session.lookup(TABLE, keys[i : i + 50_000]), vectors[i : i + 50_000])
    return len(keys) / seconds, len(keys) / cpu_seconds


def publish_live(url: str, model: str, rate: int, stop: Event) -> None:
    """A trainer's process: changed rows at a steady rate, and when they were published."""
    rng = np.random.default_rng()
    due = time.monotonic()
    with Publisher(url, model, encoding="batch") as publisher:
        while not stop.is_set():
            keys = rng.integers(0, PROBE, int(rate * PUBLISH_S))
            publisher.publish(TABLE, keys, rng.standard_normal((len(keys), DIM), np.float32))
            publisher.publish(TABLE, [PROBE], np.full((1, DIM), _clock_s(), np.float32))
            publisher.flush()
            due += PUBLISH_S
            time.sleep(max(0.0, due - time.monotonic()))


def _clock_s() -> float:
    """The same in all processes, and small enough to be a float32 with milliseconds."""
    return time.monotonic() % 10_000


@contextlib.contextmanager
def publishing(url: str, model: str, rate: int) -> Iterator[None]:
    """Another process publishes during the context."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    process = context.Process(target=publish_live, args=(url, model, rate, stop))
    process.start()
    try:
        yield
    finally:
        stop.set()
        process.join()


def ask(session: InferenceSession, seconds: float) -> Delays:
    """Requests, 200 a second, and how old the row is that was published last whenever it has changed."""
    rng = np.random.default_rng()
    requests, served, last = [], [], session.lookup(TABLE, [PROBE])[0, 0]
    end = time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        session.predict({"ids": rng.integers(0, ROWS_PER_TABLE, (SAMPLES, FEATURES))})
        requests.append(time.perf_counter() - begin)
        if (published := session.lookup(TABLE, [PROBE])[0, 0]) != last:
            last = published
            served.append(_clock_s() - published)
        time.sleep(max(0.0, begin + 0.005 - time.perf_counter()))
    return Delays(np.array(requests), np.array(served))


def bench_live(version_dir: Path, url: str, rate: int, seconds: float, settings: Mapping[str, Any]) -> None:
    """Delays while rows are published, compared with those of an idle session."""
    model = version_dir.parent.name
    with InferenceSession.open(version_dir, update_stream=url, **settings) as session:
        ask(session, 1.0)
        ratios, served = [], []
        for _ in range(ROUNDS):
            idle = ask(session, seconds)
            with publishing(url, "nobody", rate):
                busy = ask(session, seconds)
            with publishing(url, model, rate):
                wait_for_rows(session)
                live = ask(session, seconds)
            ratios.append([np.quantile(delays.requests, 0.99) for delays in (idle, busy, live)])
            served.append(live.served)
    idle_ms, busy_ms, live_ms = np.median(ratios, axis=0) * 1e3
    delays_ms = np.concatenate(served) * 1e3
    print(
        f"  live at {rate / 1e3:.0f} k rows/s: published to served p50 {np.quantile(delays_ms, 0.5):.0f} ms,"
        f" p99 {np.quantile(delays_ms, 0.99):.0f} ms (goal: at most 1000)"
    )
    print(
        f"  requests p99: idle {idle_ms:.2f} ms; busy {busy_ms:.2f} ms, ratio {busy_ms / idle_ms:.2f};"
        f" live {live_ms:.2f} ms, ratio {live_ms / idle_ms:.2f} (goal: at most 1.1)"
    )


def wait_for_rows(session: InferenceSession) -> None:
    """Wait until the first rows of a publisher are served."""
    before = session.stats()["updates"]["messages"]
    while session.stats()["updates"]["messages"] == before:
        time.sleep(0.01)


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 k rows, short rounds")
    parser.add_argument("--rate", type=int, default=20_000, help="rows/s published while serving")
    parser.add_argument("--tiers", choices=TIERS, action="append", help="these alone")
    options = parser.parse_args()
    rng = np.random.default_rng()
    num_rows = NUM_ROWS_QUICK if options.quick else NUM_ROWS
    rows = rng.permutation(num_rows), rng.standard_normal((num_rows, DIM), np.float32)
    print(f"{num_rows} rows x {4 * DIM} bytes, {os.cpu_count()} cores\n")
    for tiers in options.tiers or TIERS:
        print(tiers)
        with tempfile.TemporaryDirectory() as name, Broker() as broker:
            folder = Path(name)
            for encoding in get_args(Encoding):
                version_dir = write_version(folder, f"m{encoding}")
                publish(broker.url, version_dir.parent.name, encoding, rows)
                with stores(tiers, version_dir, folder) as settings:
                    by_clock, by_cpu = bench_apply(version_dir, broker.url, rows, settings)
                print(
                    f"  {encoding:<6} applied: {by_clock / 1e3:.0f} k rows/s, {by_clock / options.rate:.1f} x live;"
                    f" per core {by_cpu / 1e3:.0f} k rows/s, {by_cpu / GOAL_PER_S:.2f} x the goal"
                )
            version_dir = write_version(folder, "live")
            with stores(tiers, version_dir, folder) as settings:
                bench_live(version_dir, broker.url, options.rate, 2.0 if options.quick else 5.0, settings)
        print()


def publish(url: str, model: str, encoding: Encoding, rows: Rows) -> None:
    """Publish rows at full speed."""
    begin = time.perf_counter()
    with Publisher(url, model, encoding=encoding) as publisher:
        for i in range(0, len(rows[0]), 10_000):
            publisher.publish(TABLE, rows[0][i : i + 10_000], rows[1][i : i + 10_000])
    print(f"  {encoding:<6} published: {len(rows[0]) / (time.perf_counter() - begin) / 1e3:.0f} k rows/s")


if __name__ == "__main__":
    main()
