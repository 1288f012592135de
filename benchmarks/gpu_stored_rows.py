"""Look-ups over a parameter server with the cache on a GPU, compared with the same with the cache in host memory.

    python benchmarks/gpu_stored_rows.py [--samples 1024] [--rows 100000]

26 tables x dim 128, stored keys, one key of each per sample, drawn afresh for every request. The server is one tier in
host memory, the fastest there is, and its bare fetch of the missing keys is measured too. Missing rows are cached,
so that some hot ones go. Vectors are pooled in a second case. Every first answer of a case is checked;
medians of requests one by one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.device.cuda import CudaDevice
from inference_session.embedding_cache import cpu_budget, gpu_budget
from inference_session.embedding_cache.cpu import CpuEmbeddingCache
from inference_session.embedding_cache.gpu import GpuEmbeddingCache
from inference_session.kernels.records import Lookup, PoolingCode, key_segments
from inference_session.model_spec import TableSpec
from inference_session.parameter_server.base import FetchRequest
from inference_session.parameter_server.server import ParameterServer
from inference_session.parameter_server.tier import Tier
from inference_session.rows.base import Rows
from inference_session.rows.stored import StoredRows

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.testing.memory_store import MemoryStore

NUM_TABLES, DIM, KEYS_PER_BAG = 26, 128, 8
MISSING = (0.0, 0.001, 0.01, 0.1)
ROUNDS, PATIENCE_S = 50, 300.0


class Tables:
    """Rows of all tables, the first half of each hot."""

    def __init__(self, num_rows: int) -> None:
        self.specs = [TableSpec(f"t{i}", f"t{i}", num_rows, DIM, keys="stored") for i in range(NUM_TABLES)]
        self.dims = {spec.folder: DIM for spec in self.specs}
        self.num_hot = dict.fromkeys(self.dims, num_rows // 2)
        self.rng = np.random.default_rng()
        self.keys = self.rng.integers(-(2**63), 2**63 - 1, num_rows)
        self.vectors = self.rng.standard_normal((num_rows, DIM), np.float32)
        self.store = MemoryStore(self.dims)
        for table in self.dims:
            self.store.insert(table, self.keys, self.vectors)

    def draw(self, shape: tuple[int, ...], missing: float) -> NDArray[np.int64]:
        """Row numbers, with this share of them not hot."""
        half = len(self.keys) // 2
        return self.rng.integers(0, half, shape) + half * (self.rng.random(shape) < missing)


class Answer(NamedTuple):
    """The answer to one request."""

    vectors: NDArray[np.float32]
    """[samples, tables * dim], in the memory of the rows."""
    seconds: float


def ask(rows: Rows, keys: NDArray[np.int64], pooling: PoolingCode) -> Answer:
    """Keys [samples, tables, keys of each]."""
    num_samples, num_tables, num_keys = keys.shape
    reader = rows.readers[0]
    device = reader.device
    begin = time.perf_counter()
    with device.request():
        staged, output = (
            device.stage(np.ascontiguousarray(keys.swapaxes(0, 1))),
            device.empty((num_samples, num_tables * DIM)),
        )
        by_table = output.reshape(num_samples, num_tables, DIM).swapaxes(0, 1)
        segments = key_segments([*staged], [*by_table], pooling=pooling)
        num_all = np.full(num_tables, num_samples * num_keys)
        lookup = Lookup(segments, num_all, device.counts(num_tables), reader.prepare(segments))
        reader.look_up(lookup)
        device.wait()
        assert not lookup.num_unknown.any()
        seconds = time.perf_counter() - begin
        return Answer(output if isinstance(output, np.ndarray) else output.get(), seconds)


def on_gpu(tables: Tables) -> StoredRows:
    """Rows on a GPU, with room in the cache for all hot ones."""
    cache_bytes = gpu_budget.bytes_to_hold(tables.dims, tables.num_hot)
    cache = GpuEmbeddingCache(tables.dims, cache_bytes, CudaDevice(0), num_rows=tables.num_hot)
    return StoredRows(tables.specs, [cache], ParameterServer([Tier("memory", tables.store)]))


def on_cpu(tables: Tables) -> StoredRows:
    """The same in host memory."""
    cache = CpuEmbeddingCache(tables.dims, cpu_budget.bytes_to_hold(tables.dims, tables.num_hot))
    return StoredRows(tables.specs, [cache], ParameterServer([Tier("memory", tables.store)]))


def heat(tables: Tables, rows: Rows) -> None:
    """Cache the hot rows."""
    hot = tables.keys[: len(tables.keys) // 2]
    rows.readers[0].warm_up(dict.fromkeys(tables.dims, hot), time.monotonic() + PATIENCE_S)


def fetch_s(tables: Tables, keys: NDArray[np.int64], wanted: NDArray[np.bool_]) -> float:
    """The server's bare fetch of some of the keys of one request."""
    server = ParameterServer([Tier("memory", tables.store)])
    requests = []
    for t, table in enumerate(tables.dims):
        unique = np.unique(keys[:, t][wanted[:, t]])
        if len(unique):
            requests.append(FetchRequest(table, unique, np.empty((len(unique), DIM), np.float32)))
    begin = time.perf_counter()
    server.fetch(requests)
    return time.perf_counter() - begin


def bench(tables: Tables, sources: dict[str, Rows], num_samples: int, pooling: PoolingCode) -> None:
    """Print the medians of all parts of missing keys."""
    num_keys = KEYS_PER_BAG if pooling else 1
    print(f"{num_samples} samples x {NUM_TABLES} tables, {num_keys} keys each, {pooling.name}: us per request")
    for missing in MISSING:
        times: dict[str, list[float]] = {name: [] for name in (*sources, "bare fetch")}
        for number in range(ROUNDS):
            for name, rows in sources.items():
                numbers = tables.draw((num_samples, NUM_TABLES, num_keys), missing)
                answer = ask(rows, tables.keys[numbers], pooling)
                times[name].append(answer.seconds)
                if number == 0:
                    expected = tables.vectors[numbers].sum(2).reshape(num_samples, -1)
                    np.testing.assert_allclose(answer.vectors, expected, rtol=1e-4, atol=1e-4)
            times["bare fetch"].append(fetch_s(tables, tables.keys[numbers], numbers >= len(tables.keys) // 2))
        medians = {name: float(np.median(each)) * 1e6 for name, each in times.items()}
        print(f"  {missing:>6.1%} missing: " + ", ".join(f"{name} {us:.0f}" for name, us in medians.items()))


def main() -> None:
    """Run both cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=100_000, help="of each table")
    options = parser.parse_args()
    tables = Tables(options.rows)
    create: dict[str, Callable[[Tables], Rows]] = {"GPU": on_gpu, "processor": on_cpu}
    sources = {name: open_rows(tables) for name, open_rows in create.items()}
    for rows in sources.values():
        heat(tables, rows)
    for pooling in (PoolingCode.NONE, PoolingCode.SUM):
        bench(tables, sources, options.samples, pooling)
    for rows in sources.values():
        rows.close()


if __name__ == "__main__":
    main()
