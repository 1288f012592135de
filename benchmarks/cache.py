"""The CPU embedding cache: its hit path against mapped tables, its hit rate against LRU, its writers.

    python benchmarks/cache.py [--trace FILE]

The trace (xz, big-endian int64 keys; else generated keys) is replayed key by key, every miss inserted. Every
repetition of a look-up draws fresh keys, poisons the outputs and checks them; a line shows the medians and the median
and range of the ratio within a repetition.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from inference_session.embedding_cache.cpu import CpuEmbeddingCache
from inference_session.kernels.cpu import lookup as cpu
from inference_session.kernels.records import TABLE, Lookup, key_segments
from inference_session.model_spec import TableSpec
from inference_session.tables.table_file import TableFile, write_table
from tests.testing.traces import generated_trace, read_trace

REPETITIONS = 41
COMPARED = ((1, 1_000_000, 128, 1 << 16), (1, 1_000_000, 16, 1 << 16), (26, 10_000, 16, 64), (26, 10_000, 128, 64))
"""Tables, rows of each, embedding_dim, and keys of each that are looked up."""
NUM_ROWS_WRITTEN = 200_000
NUM_TRACED_KEYS = 400_000

Keys = NDArray[np.int64]
ONE = np.ones(1, np.int64)


def timed(work: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compare_with_files(num_tables: int, num_rows: int, dim: int, num_keys: int) -> None:
    """The same keys and rows, once in mapped files and once in the cache, one kernel call each."""
    generator = np.random.default_rng()
    names = [f"t{t}" for t in range(num_tables)]
    keys = generator.integers(-(2**63), 2**63 - 1, (num_tables, num_rows))
    rows = generator.random((num_tables, num_rows, dim), np.float32)
    cache = CpuEmbeddingCache(
        dict.fromkeys(names, dim), 4 * num_tables * num_rows * (4 * dim + 64), num_rows=dict.fromkeys(names, num_rows)
    )
    held = []
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for t, name in enumerate(names):
            write_table(Path(folder) / name, [rows[t]], keys=[keys[t]])
            files.append(TableFile.open(Path(folder) / name, TableSpec(name, name, num_rows, dim)))
            cache.insert(name, keys[t], rows[t])
            held.append(np.flatnonzero(np.isin(keys[t], cache.dump(name))))
        tables = np.array([file.record() for file in files], TABLE)
        out = np.empty((num_tables, num_keys, dim), np.float32)
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(REPETITIONS):
            for taken, records in ((theirs, tables), (ours, None)):
                chosen = np.stack([generator.choice(h, num_keys) for h in held])
                asked = np.take_along_axis(keys, chosen, axis=1)
                out.fill(np.nan)
                segments = key_segments([*asked], [*out])
                counts = np.zeros(num_tables, np.int64)
                if records is None:
                    taken.append(timed(lambda: read_cache(cache, segments, counts)))  # noqa: B023
                else:
                    taken.append(timed(lambda: cpu.look_up(records, segments, counts, counts[:0])))  # noqa: B023
                assert np.array_equal(out, np.take_along_axis(rows, chosen[..., None], axis=1))
    ratios = np.array(theirs) / np.array(ours)
    count = num_tables * num_keys
    print(
        f"{num_tables:2} tables x {num_keys:5} keys, dim {dim:3}   files {count / np.median(theirs) / 1e6:6.1f}"
        f"  cache {count / np.median(ours) / 1e6:6.1f} M keys/s  ratio {np.median(ratios):.2f}"
        f" ({ratios.min():.2f}-{ratios.max():.2f})  goal >= 0.8"
    )


def read_cache(cache: CpuEmbeddingCache, segments: NDArray[np.void], counts: Keys) -> None:
    """As a session reads."""
    num_keys = segments["num_rows"].copy()
    assert not cache.look_up(Lookup(segments, num_keys, counts))


def show_hit_rates(keys: Keys) -> None:
    """The hit rate compared with LRU, on a recommender's keys."""
    for num_rows in (1_000, 10_000, 50_000):
        cache = CpuEmbeddingCache({"t": 1}, 1 << 24, num_rows={"t": num_rows})
        vector = np.zeros((1, 1), np.float32)
        for begin in range(len(keys)):
            key = keys[begin : begin + 1]
            if cache.look_up(Lookup(key_segments([key], [vector]), ONE, np.zeros(1, np.int64))):
                cache.insert("t", key, vector)
        stats = cache.stats()
        ours, lru = stats.hits / len(keys), lru_hit_rate(keys, stats.capacity)
        print(f"{stats.capacity:6} rows   LRU {lru:.4f}  cache {ours:.4f}  gain {ours - lru:+.4f}  goal >= +0.02")


def lru_hit_rate(keys: Keys, capacity: int) -> float:
    """An exact LRU with the same number of rows."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for key in keys.tolist():
        if key in held:
            held.move_to_end(key)
            hits += 1
        else:
            held[key] = None
            if len(held) > capacity:
                held.popitem(last=False)
    return hits / len(keys)


def show_writers(num_rows: int, dim: int) -> None:
    """Rows inserted per second into a full cache, and look-ups during writes."""
    generator = np.random.default_rng()
    cache = CpuEmbeddingCache({"t": dim}, num_rows * (4 * dim + 64))
    batch = 1 << 14
    vectors = generator.random((batch, dim), np.float32)

    def insert() -> None:
        cache.insert("t", generator.integers(0, 10 * num_rows, batch), vectors)

    while not cache.stats().evictions:
        insert()
    rates = [batch / timed(insert) for _ in range(REPETITIONS)]
    print(f"inserting into a full cache, dim {dim}: {np.median(rates) / 1e6:.2f} M rows/s")
    held = cache.dump("t")
    requests = [generator.choice(held, 4096) for _ in range(200)]
    out = np.empty((4096, dim), np.float32)

    def look_up(keys: Keys) -> None:
        cache.look_up(Lookup(key_segments([keys], [out]), np.array([len(keys)]), np.zeros(1, np.int64)))

    alone = [timed(lambda: look_up(request)) for request in requests]  # noqa: B023
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            cache.update("t", held[:batch], vectors)

    writer = threading.Thread(target=write)
    writer.start()
    beside = [timed(lambda: look_up(request)) for request in requests]  # noqa: B023
    done.set()
    writer.join()
    print(
        f"look-up of 4096 keys, dim {dim}: {1e6 * np.median(alone):.0f} us alone,"
        f" {1e6 * np.median(beside):.0f} us while a thread updates without pause"
    )


def main() -> None:
    """Run all comparisons."""
    parser = argparse.ArgumentParser(description="The CPU embedding cache compared with mapped tables and LRU.")
    parser.add_argument("--trace", type=Path, help="xz file of big-endian int64 keys; default: generated keys")
    arguments = parser.parse_args()
    for sizes in COMPARED:
        compare_with_files(*sizes)
    show_writers(NUM_ROWS_WRITTEN, 128)
    show_hit_rates(generated_trace(NUM_TRACED_KEYS) if arguments.trace is None else read_trace(arguments.trace))


if __name__ == "__main__":
    main()
