"""The Redis and RocksDB tiers compared with the packages they stand on, in one run: goal G10.

    python benchmarks/stores.py            200 k rows, under a minute
    python benchmarks/stores.py --full     1 M rows x 128

Ours is `EmbeddingStore.fetch`: keys in, one float32 array out. The peers get the same keys in the same layout. For
Redis that is redis-py with hiredis, a pipeline of one HMGET per partition, its replies joined into an array; for
RocksDB it is rocksdict's multiget on the very same database, its replies left as Python objects, and on a database
with rocksdict's default settings. Every repetition draws fresh keys, poisons its output and checks it. A line shows
the medians, the median of the ratio within a repetition, and its range.

Updates of a stream that several servers may write (`EmbeddingStore.apply`) are compared with `insert` of the same rows,
by the processor time of the Redis server: written by this server, and found written by another.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import redis
from numpy.typing import NDArray
from rocksdict import Options, Rdict, WriteBatch

from inference_session.parameter_server.base import EmbeddingStore
from inference_session.parameter_server.create import create_store
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.redis import layout as redis_layout
from inference_session.parameter_server.rocksdb.store import RocksDbStore
from inference_session.tables.ordered_updates import OrderedUpdates, SourceProgress

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.testing.servers import RedisServer

NUM_ROWS, NUM_ROWS_FULL = 200_000, 1_000_000
DIM = 128
NAMESPACE = Namespace("benchmark", "1")
TAG = NAMESPACE.tag("table")
REPETITIONS = 15

Keys = NDArray[np.int64]
Vectors = NDArray[np.float32]
Fetch = Callable[[Keys, Vectors], object]
"""Takes keys and a poisoned output."""


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="1 M rows")
    num_rows = NUM_ROWS_FULL if parser.parse_args().full else NUM_ROWS
    rng = np.random.default_rng()
    keys = rng.integers(-(2**63), 2**63 - 1, num_rows)
    vectors = rng.standard_normal((num_rows, DIM), np.float32)
    print(f"{num_rows} rows x {DIM} float32\n")
    bench_redis(keys, vectors)
    bench_updates(keys, vectors)
    bench_rocksdb(keys, vectors)


def bench_redis(keys: Keys, vectors: Vectors) -> None:
    """Over TCP and over a Unix socket."""
    with RedisServer() as server:
        sockets = {
            "TCP": (server.url, server.client()),
            "Unix socket": (f"unix://{server.socket_path}", redis.Redis(unix_socket_path=str(server.socket_path))),
        }
        for name, (url, client) in sockets.items():
            with create_store(url, NAMESPACE, {"table": DIM}, timeout_ms=60_000) as store, client:
                fill(f"Redis, {name}", store, keys, vectors)
                peers: dict[str, Fetch] = {"redis-py + hiredis": lambda k, out, c=client: pipelined_hmget(c, k, out)}
                compare(store, keys, vectors, peers)


def bench_updates(keys: Keys, vectors: Vectors) -> None:
    """What Redis pays for the notes of a stream's updates."""
    with RedisServer() as server, server.client() as client, contextlib.ExitStack() as opened:
        namespaces = NAMESPACE, Namespace("noted", "1"), Namespace("noted", "1")
        plain, first, second = (
            opened.enter_context(create_store(server.url, namespace, {"table": DIM}, timeout_ms=60_000))
            for namespace in namespaces
        )
        for num_rows in (100, 1_000, 10_000):
            times = []
            for repetition in range(REPETITIONS * max(1, 5_000 // num_rows)):
                rows = np.random.default_rng().permutation(len(keys))[:num_rows]
                updates = updates_of(keys[rows], vectors[rows], f"topic/{num_rows}", repetition)
                calls = (
                    lambda r=rows: plain.insert("table", keys[r], vectors[r]),
                    lambda u=updates: first.apply("table", u),
                    lambda u=updates: second.apply("table", u),
                )
                times.append([server_s(client, call) for call in calls])
            insert, written, found = np.sum(times, axis=0)
            print(
                f"  {num_rows:>6} rows: Redis's time relative to insert: written {written / insert:.2f},"
                f" found written by another server {found / insert:.2f}"
            )
    print()


def updates_of(keys: Keys, vectors: Vectors, source: str, number: int) -> OrderedUpdates:
    """Rows as the updates of that number from a source, each of which is as long as this."""
    begin, sources = number * len(keys), np.zeros(len(keys), np.intp)
    progress = [SourceProgress(source, "id", 0, begin, begin + len(keys))]
    return OrderedUpdates(keys, vectors, keys[:0], sources, sources[:0], progress)


def server_s(client: redis.Redis, call: Callable[[], object]) -> float:
    """Processor time of the server during a call, in seconds."""
    begin, _, end = _used_s(client), call(), _used_s(client)
    return end - begin


def _used_s(client: redis.Redis) -> float:
    used: Any = client.info("cpu")
    return float(used["used_cpu_user"] + used["used_cpu_sys"])


def bench_rocksdb(keys: Keys, vectors: Vectors) -> None:
    """A database as written by a push."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"rocksdb://{folder}/db"
        with create_store(url, NAMESPACE, {"table": DIM}, writable=True) as store:
            fill("RocksDB", store, keys, vectors)
        plain = default_database(f"{folder}/plain", keys, vectors)
        with create_store(url, NAMESPACE, {"table": DIM}) as store:
            assert isinstance(store, RocksDbStore)
            family = store.family("table")
            peers: dict[str, Fetch] = {
                "rocksdict multiget": lambda k, _: family.get(k.view("V8").tolist()),
                "the same, default settings": lambda k, _: plain.get(k.view("V8").tolist()),
            }
            compare(store, keys, vectors, peers)
        plain.close()


def fill(title: str, store: EmbeddingStore, keys: Keys, vectors: Vectors) -> None:
    """Insert all rows."""
    begin = time.perf_counter()
    for i in range(0, len(keys), 10_000):
        store.insert("table", keys[i : i + 10_000], vectors[i : i + 10_000])
    print(f"{title}: inserted {len(keys) / (time.perf_counter() - begin) / 1e3:.0f} k rows/s")


def default_database(path: str, keys: Keys, vectors: Vectors) -> Rdict:
    """The same rows in a database with rocksdict's own settings."""
    database = Rdict(path, Options(raw_mode=True))
    for i in range(0, len(keys), 10_000):
        batch = WriteBatch(raw_mode=True)
        for key, row in zip(keys[i : i + 10_000].view("V8").tolist(), vectors[i : i + 10_000], strict=True):
            batch.put(key, row.tobytes())
        database.write(batch)
    database.flush()
    return database


def pipelined_hmget(client: redis.Redis, keys: Keys, out: Vectors) -> None:
    """The code that a careful user of redis-py writes."""
    order, bounds = redis_layout.by_partition(keys, redis_layout.Partitioning(redis_layout.DEFAULT_PARTITIONS))
    parts = [(p, order[begin:end]) for p, (begin, end) in enumerate(pairwise(bounds)) if begin < end]
    pipeline = client.pipeline(transaction=False)
    for partition, positions in parts:
        pipeline.hmget(redis_layout.rows_name(TAG, partition), keys[positions].view("V8").tolist())
    for (_, positions), rows in zip(parts, pipeline.execute(), strict=True):
        out[positions] = np.frombuffer(b"".join(rows), np.float32).reshape(-1, DIM)


def compare(store: EmbeddingStore, keys: Keys, vectors: Vectors, peers: dict[str, Fetch]) -> None:
    """Ours against each peer, for several numbers of keys."""
    rng = np.random.default_rng()

    for num_keys in (100, 1_000, 10_000):
        for name, peer in peers.items():
            times = []
            for _ in range(REPETITIONS * max(1, 5_000 // num_keys)):
                drawn = rng.integers(0, len(keys), num_keys)
                ours_s, out = timed(lambda k, out: store.fetch("table", k, out), keys[drawn])
                assert np.array_equal(out, vectors[drawn])
                peer_s, _ = timed(peer, keys[rng.integers(0, len(keys), num_keys)])
                times.append((ours_s, peer_s))
            report(num_keys, name, np.array(times))
    print()


def timed(fetch: Fetch, keys: Keys) -> tuple[float, Vectors]:
    """Seconds that a fetch takes, and the output it was given."""
    out = np.full((len(keys), DIM), np.nan, np.float32)
    begin = time.perf_counter()
    fetch(keys, out)
    return time.perf_counter() - begin, out


def report(num_keys: int, peer: str, times: NDArray[np.float64]) -> None:
    """One line."""
    ours_us, peer_us = np.median(times, axis=0) * 1e6
    ratios = times[:, 1] / times[:, 0]
    low, ratio, high = np.quantile(ratios, (0.1, 0.5, 0.9))
    rate = num_keys / ours_us * 1e3
    print(
        f"  {num_keys:>6} keys: ours {ours_us:>8.0f} us ({rate:>5.0f} k keys/s), {peer} {peer_us:>8.0f} us,"
        f" ratio {ratio:.2f} ({low:.2f} to {high:.2f})"
    )


if __name__ == "__main__":
    main()
