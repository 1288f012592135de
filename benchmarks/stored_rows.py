"""What look-ups over stores cost: rows missing from the cache, many clients, and the work in the background.

    python benchmarks/stored_rows.py       200 k rows x 128, about a minute

Three goals, each a ratio within this run; keys are drawn afresh for every request, and every answer is checked once.

missing     a request of which a tenth of the keys has to come from Redis costs at most the same request with all keys
            cached, plus 1.2 x the bare fetch of those keys (by the store alone, and by redis-py in one pipeline)
clients     requests/s of 1 to 64 clients: more of them never lower it
background  p99 of such requests while rows are promoted to Redis, and while the cache is refreshed, beside p99 without:
            at most 1.05. `others` is a thread that fetches as much without promoting or refreshing anything: what is
            above its ratio is the cost of the work, not of the processor that it takes.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import redis
from numpy.typing import NDArray

from inference_session.embedding_cache.cpu_cache import CpuEmbeddingCache, bytes_to_hold
from inference_session.formats.native import TableSpec
from inference_session.parameter_server import redis_layout
from inference_session.parameter_server.base import EmbeddingStore
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.server import ParameterServer
from inference_session.parameter_server.store_url import create_store
from inference_session.parameter_server.tier import Tier
from inference_session.row_source import CachedRows

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.parameter_server.servers import RedisServer

DIM, NUM_ROWS, NUM_HOT = 128, 200_000, 20_000
NUM_KEYS, NUM_MISSING = 1_000, 100
NAMESPACE = Namespace("benchmark", "1")
SPEC = TableSpec("table", "table", NUM_ROWS, DIM, keys="stored")
ROUNDS = 200
SECONDS = 2.0

Keys = NDArray[np.int64]
Vectors = NDArray[np.float32]


class Rows:
    """Keys, the first of which are hot, and their vectors."""

    def __init__(self) -> None:
        rng = np.random.default_rng()
        self.keys = rng.integers(-(2**63), 2**63 - 1, NUM_ROWS)
        self.vectors = rng.standard_normal((NUM_ROWS, DIM), np.float32)

    def draw(self, rng: np.random.Generator, num_missing: int) -> NDArray[np.int64]:
        """Positions of a request's keys, so many of them not hot."""
        hot = rng.integers(0, NUM_HOT, NUM_KEYS - num_missing)
        return np.concatenate([hot, rng.integers(NUM_HOT, NUM_ROWS, num_missing)])

    def fill(self, store: EmbeddingStore) -> None:
        for i in range(0, NUM_ROWS, 10_000):
            store.insert("table", self.keys[i : i + 10_000], self.vectors[i : i + 10_000])


@contextlib.contextmanager
def cached(rows: Rows, *tiers: Tier) -> Iterator[CachedRows]:
    """A cache that holds the hot rows and some more, over these tiers."""
    cache_bytes = bytes_to_hold({"table": DIM}, {"table": 2 * NUM_HOT})
    cache = CpuEmbeddingCache({"table": DIM}, cache_bytes, num_rows={"table": NUM_ROWS})
    source = CachedRows([SPEC], cache, ParameterServer(tiers), num_threads=1)
    out = np.empty((NUM_HOT, DIM), np.float32)
    for _ in range(3):  # such that they are known as hot
        source.fetch(0, rows.keys[:NUM_HOT], out)
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
            rows.fill(store)
        with create_store(database, NAMESPACE, {"table": DIM}, writable=True) as store:
            rows.fill(store)
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
            hit_s = timed(lambda: source.fetch(0, rows.keys[rows.draw(rng, 0)], out))
            bare_s = timed(lambda: bare.fetch("table", rows.keys[rows.draw(rng, NUM_MISSING)[-NUM_MISSING:]], part))
            peer_s = timed(lambda: pipelined(client, rows.keys[rows.draw(rng, NUM_MISSING)[-NUM_MISSING:]], part))
            miss_s = timed(lambda k=rows.keys[drawn]: source.fetch(0, k, out))  # type: ignore[misc]
            assert np.array_equal(out, rows.vectors[drawn])
            times.append((hit_s, miss_s, bare_s, peer_s))
    hit_us, miss_us, bare_us, peer_us = np.median(np.array(times), axis=0) * 1e6
    print(f"missing: {NUM_KEYS} keys cached {hit_us:.0f} us, {NUM_MISSING} of them from Redis {miss_us:.0f} us")
    for name, us in (("the store's bare fetch", bare_us), ("redis-py's pipeline", peer_us)):
        print(f"  {(miss_us - hit_us) / us:.2f} x {name} ({us:.0f} us), wanted 1.2")


def bench_clients(rows: Rows, server: RedisServer) -> None:
    """Requests/s by number of clients."""
    print("clients: requests/s")
    with cached(rows, Tier("redis", open_redis(server), volatile=True)) as source:
        best = 0.0
        for num_clients in (1, 2, 4, 8, 16, 32, 64):
            rate = len(latencies(rows, source, num_clients)) / SECONDS
            best = max(best, rate)
            print(f"  {num_clients:>3} clients: {rate:>6.0f}, {rate / best:.2f} of the best so far")


def bench_background(rows: Rows, server: RedisServer, database: str) -> None:
    """p99 beside work in the background."""
    persistent = create_store(database, NAMESPACE, {"table": DIM})
    redis_store = open_redis(server)
    tiers = [Tier("redis", redis_store, volatile=True, cache_missed_keys=True, touches=True)]
    ratios: dict[str, list[float]] = {"others": [], "promoting": [], "refreshing": []}
    with cached(rows, *tiers, Tier("rocksdb", persistent)) as source, open_redis(server) as other:
        for _ in range(4):
            alone = p99(rows, source, lambda _: time.sleep(0.01))
            for name, work in works(rows, source, other).items():
                ratios[name].append(p99(rows, source, work) / alone)
    print("background: p99 beside that without, of one client")
    for name, found in ratios.items():
        print(f"  {name}: {np.median(found):.2f} ({min(found):.2f} to {max(found):.2f}), wanted 1.05")


def works(rows: Rows, source: CachedRows, other: EmbeddingStore) -> dict[str, Callable[[np.random.Generator], None]]:
    """What goes on beside the requests, a hundred times a second."""
    part = np.empty((NUM_MISSING, DIM), np.float32)

    def cold(rng: np.random.Generator) -> Keys:
        return rows.keys[rows.draw(rng, NUM_MISSING)[-NUM_MISSING:]]

    def fetch(rng: np.random.Generator) -> None:
        other.fetch("table", cold(rng), part)
        time.sleep(0.01)

    def promote(rng: np.random.Generator) -> None:
        other.erase("table", cold(rng))  # some of which the requests then find in the tier below
        time.sleep(0.01)

    def refresh(_: np.random.Generator) -> None:
        source.refresh()
        time.sleep(0.5)

    return {"others": fetch, "promoting": promote, "refreshing": refresh}


def p99(rows: Rows, source: CachedRows, work: Callable[[np.random.Generator], None]) -> float:
    """Of requests beside a thread that works."""
    ending = threading.Event()

    def repeat() -> None:
        rng = np.random.default_rng()
        while not ending.is_set():
            work(rng)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        return float(np.quantile(latencies(rows, source, 1), 0.99))
    finally:
        ending.set()
        thread.join()


def latencies(rows: Rows, source: CachedRows, num_clients: int) -> list[float]:
    """Seconds of each request that so many clients have answered, one after the other each."""
    found: list[float] = []
    end = time.perf_counter() + SECONDS

    def ask() -> None:
        rng = np.random.default_rng()
        out = np.empty((NUM_KEYS, DIM), np.float32)
        while time.perf_counter() < end:
            keys = rows.keys[rows.draw(rng, NUM_MISSING)]
            found.append(timed(lambda k=keys: source.fetch(0, k, out)))  # type: ignore[misc]

    threads = [threading.Thread(target=ask) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def open_redis(server: RedisServer) -> EmbeddingStore:
    return create_store(server.url, NAMESPACE, {"table": DIM}, timeout_ms=60_000)


def pipelined(client: redis.Redis, keys: Keys, out: Vectors) -> None:
    """What a careful user of redis-py writes."""
    order, bounds = redis_layout.by_partition(keys, redis_layout.Partitioning(redis_layout.DEFAULT_PARTITIONS))
    parts = [(p, order[begin:end]) for p, (begin, end) in enumerate(pairwise(bounds)) if begin < end]
    pipeline = client.pipeline(transaction=False)
    for partition, positions in parts:
        name = redis_layout.rows_name(NAMESPACE.tag("table"), partition)
        pipeline.hmget(name, keys[positions].view("V8").tolist())
    for (_, positions), found in zip(parts, pipeline.execute(), strict=True):
        out[positions] = np.frombuffer(b"".join(found), np.float32).reshape(-1, DIM)


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
