"""Measures the cost of look-ups over stores: rows missing from the cache, many clients, and the work in the background.

    python benchmarks/stored_rows.py       200 k rows x 128, three minutes

Three goals, each a ratio within this run; keys are drawn afresh for every request, and every answer is checked once.

missing     a request of which a tenth of the keys has to come from Redis costs at most the same request with all keys
            cached, plus 1.2 x the bare fetch of those keys (by the store alone, and by redis-py in one pipeline)
clients     requests/s of 1 to 64 clients: more of them never lower it
background  p99 of such requests while rows are promoted to Redis, against the same rows missing and not promoted,
            and while the cache is refreshed without a pause, against no work: at most 1.05

The compared cases take turns in many short windows, because machines change meanwhile. p99 is that of all windows of a
kind, its range is that of four parts of the run. The ratio of `nothing` to itself shows the machine's resolution.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from stores import DIM, NAMESPACE, fill, pipelined_hmget

from inference_session.embedding_cache.cpu import CpuEmbeddingCache
from inference_session.embedding_cache.cpu_budget import bytes_to_hold
from inference_session.model_spec import TableSpec
from inference_session.parameter_server.base import EmbeddingStore
from inference_session.parameter_server.create import create_store
from inference_session.parameter_server.server import ParameterServer
from inference_session.parameter_server.tier import Tier
from inference_session.rows.base import look_up_keys
from inference_session.rows.stored import StoredRows

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.testing.servers import RedisServer

NUM_ROWS, NUM_HOT = 200_000, 20_000
NUM_KEYS, NUM_MISSING = 1_000, 100
SPEC = TableSpec("table", "table", NUM_ROWS, DIM, keys="stored")
ROUNDS = 200
CLIENTS, CLIENTS_ROUNDS, CLIENTS_S = (1, 2, 4, 8, 16, 32, 64), 4, 1.0
WINDOWS, WINDOW_S, NUM_PARTS = 24, 0.25, 4
PAUSE_S = 0.01

Keys = NDArray[np.int64]
Vectors = NDArray[np.float32]


class Rows:
    """Keys, the first of which are hot, and their vectors."""

    def __init__(self) -> None:
        rng = np.random.default_rng()
        self.keys = rng.integers(-(2**63), 2**63 - 1, NUM_ROWS)
        self.vectors = rng.standard_normal((NUM_ROWS, DIM), np.float32)

    def draw(self, rng: np.random.Generator, num_missing: int) -> NDArray[np.int64]:
        """Positions of a request's keys, with this many not hot."""
        hot = rng.integers(0, NUM_HOT, NUM_KEYS - num_missing)
        return np.concatenate([hot, rng.integers(NUM_HOT, NUM_ROWS, num_missing)])


@contextlib.contextmanager
def cached(rows: Rows, *tiers: Tier) -> Iterator[StoredRows]:
    """A cache that holds the hot rows and some more, over these tiers."""
    cache_bytes = bytes_to_hold({"table": DIM}, {"table": 2 * NUM_HOT})
    cache = CpuEmbeddingCache({"table": DIM}, cache_bytes, num_rows={"table": NUM_ROWS})
    source = StoredRows([SPEC], [cache], ParameterServer(tiers))
    out = np.empty((NUM_HOT, DIM), np.float32)
    for _ in range(3):  # so that they count as hot
        look_up_keys(source.readers[0], 0, rows.keys[:NUM_HOT], out)
    try:
        yield source
    finally:
        source.close()


def main() -> None:
    """Run all."""
    rows = Rows()
    with tempfile.TemporaryDirectory() as folder, RedisServer() as server:
        database = f"rocksdb://{folder}/db"
        with create_store(server.url, NAMESPACE, {"table": DIM}, timeout_ms=60_000) as store:
            fill("Redis", store, rows.keys, rows.vectors)
        with create_store(database, NAMESPACE, {"table": DIM}, writable=True) as store:
            fill("RocksDB", store, rows.keys, rows.vectors)
        bench_missing(rows, server)
        bench_clients(rows, server)
        bench_background(rows, server, database)


def bench_missing(rows: Rows, server: RedisServer) -> None:
    """The cost of a tenth of the keys."""
    rng = np.random.default_rng()
    bare = open_redis(server)
    out, part = np.empty((NUM_KEYS, DIM), np.float32), np.empty((NUM_MISSING, DIM), np.float32)
    times = []
    with cached(rows, Tier("redis", open_redis(server), volatile=True)) as source, bare, server.client() as client:
        for _ in range(ROUNDS):
            drawn = rows.draw(rng, NUM_MISSING)
            hit_s = timed(lambda: look_up_keys(source.readers[0], 0, rows.keys[rows.draw(rng, 0)], out))
            bare_s = timed(lambda: bare.fetch("table", rows.keys[rows.draw(rng, NUM_MISSING)[-NUM_MISSING:]], part))
            peer_s = timed(lambda: pipelined_hmget(client, rows.keys[rows.draw(rng, NUM_MISSING)[-NUM_MISSING:]], part))
            miss_s = timed(lambda k=rows.keys[drawn]: look_up_keys(source.readers[0], 0, k, out))  # type: ignore[misc]
            assert np.array_equal(out, rows.vectors[drawn])
            times.append((hit_s, miss_s, bare_s, peer_s))
    hit_us, miss_us, bare_us, peer_us = np.median(np.array(times), axis=0) * 1e6
    print(f"missing: {NUM_KEYS} keys cached {hit_us:.0f} us, {NUM_MISSING} of them from Redis {miss_us:.0f} us")
    for name, us in (("the store's bare fetch", bare_us), ("redis-py's pipeline", peer_us)):
        print(f"  {(miss_us - hit_us) / us:.2f} x {name} ({us:.0f} us), wanted 1.2")


def bench_clients(rows: Rows, server: RedisServer) -> None:
    """Requests/s by number of clients."""
    rates: dict[int, list[float]] = {num_clients: [] for num_clients in CLIENTS}
    with cached(rows, Tier("redis", open_redis(server), volatile=True)) as source:
        for _ in range(CLIENTS_ROUNDS):
            for num_clients, found in rates.items():
                found.append(len(latencies(rows, source, num_clients, CLIENTS_S)) / CLIENTS_S)
    print("clients: requests/s")
    best = 0.0
    for num_clients, found in rates.items():
        rate = float(np.median(found))
        best = max(best, rate)
        print(
            f"  {num_clients:>3} clients: {rate:>6.0f} ({min(found):.0f} to {max(found):.0f}),"
            f" {rate / best:.2f} of the best so far"
        )


def bench_background(rows: Rows, server: RedisServer, database: str) -> None:
    """p99 during work in the background."""
    persistent = create_store(database, NAMESPACE, {"table": DIM})
    tier = Tier("redis", open_redis(server), volatile=True, touches=True)
    with cached(rows, tier, Tier("rocksdb", persistent)) as source, open_redis(server) as other:
        kinds = works(rows, source, tier, other)
        found: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
        for _ in range(WINDOWS):
            for kind, work in kinds.items():
                found[kind].append(beside(rows, source, work))
    print("background: p99 of one client")
    report("nothing again", found["nothing again"], "nothing", found["nothing"])
    report("promoting", found["promoting"], "the same rows missing", found["missing"])
    report("refreshing", found["refreshing"], "nothing", found["nothing"] + found["nothing again"])


def report(kind: str, windows: list[list[float]], other: str, other_windows: list[list[float]]) -> None:
    """One line: the ratio over all windows, and the range of the ratios of parts of the run."""
    ratios = [p99(windows[i::NUM_PARTS]) / p99(other_windows[i::NUM_PARTS]) for i in range(NUM_PARTS)]
    print(
        f"  {kind} / {other}: {p99(windows) / p99(other_windows):.2f} ({min(ratios):.2f} to {max(ratios):.2f}),"
        f" {p99(windows) * 1e6:.0f} us against {p99(other_windows) * 1e6:.0f} us, wanted 1.05"
    )


def p99(windows: list[list[float]]) -> float:
    """p99 of all requests in these windows."""
    return float(np.quantile(np.concatenate(windows), 0.99))


def works(rows: Rows, source: StoredRows, tier: Tier, other: EmbeddingStore) -> dict[str, Callable[[], None]]:
    """The background work, repeated during the requests."""
    rng = np.random.default_rng()

    def lose(promotes: bool) -> None:
        tier.cache_missed_keys = promotes
        other.erase("table", rows.keys[rng.integers(NUM_HOT, NUM_ROWS, NUM_MISSING)])
        time.sleep(PAUSE_S)

    def rest() -> None:
        tier.cache_missed_keys = False
        time.sleep(PAUSE_S)

    return {
        "nothing": rest,
        "missing": lambda: lose(promotes=False),
        "promoting": lambda: lose(promotes=True),
        "nothing again": rest,
        "refreshing": source.writer.refresh,
    }


def beside(rows: Rows, source: StoredRows, work: Callable[[], None]) -> list[float]:
    """Seconds of one client's requests while a thread works."""
    ending = threading.Event()

    def repeat() -> None:
        while not ending.is_set():
            work()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        return latencies(rows, source, 1, WINDOW_S)
    finally:
        ending.set()
        thread.join()


def latencies(rows: Rows, source: StoredRows, num_clients: int, seconds: float) -> list[float]:
    """Seconds of each request answered in some seconds; this many clients send one request after another."""
    found: list[float] = []
    end = time.perf_counter() + seconds

    def ask() -> None:
        rng = np.random.default_rng()
        out = np.empty((NUM_KEYS, DIM), np.float32)
        while time.perf_counter() < end:
            keys = rows.keys[rows.draw(rng, NUM_MISSING)]
            took_s = timed(lambda k=keys: look_up_keys(source.readers[0], 0, k, out))  # type: ignore[misc]
            if time.perf_counter() < end:
                found.append(took_s)

    threads = [threading.Thread(target=ask) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def open_redis(server: RedisServer) -> EmbeddingStore:
    return create_store(server.url, NAMESPACE, {"table": DIM}, timeout_ms=60_000)


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
