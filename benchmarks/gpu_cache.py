"""The GPU embedding cache beside its ceilings, on the machine it runs on.

    python benchmarks/gpu_cache.py [--quick]

The ceiling is the fastest of several plain kernels that copy the same rows by known row number ("bare gather"), or the
copy from pinned memory, in the same run. Keys are fresh in each repetition, outputs are poisoned before and checked
after; figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np

from inference_session.embedding_cache import create_embedding_cache
from inference_session.embedding_cache.gpu_budget import bytes_to_hold
from inference_session.tables.device_rows import pinned_empty

NUM_KEYS = 1 << 20
_GATHERS = r"""
template <int IN_FLIGHT, bool STREAMED>
__device__ void gather(const float4* rows, const long long* numbers, float4* out, int n, int width) {
  const int per_block = blockDim.x / width, member = threadIdx.x % width;
  for (long long first = (long long)blockIdx.x * per_block * IN_FLIGHT + threadIdx.x / width; first < n;
       first += (long long)gridDim.x * per_block * IN_FLIGHT) {
    float4 values[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const long long k = first + i * per_block;
      if (k < n) values[i] = rows[numbers[k] * width + member];
    }
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const long long k = first + i * per_block;
      if (k < n && STREAMED) __stcs(out + k * width + member, values[i]);
      if (k < n && !STREAMED) out[k * width + member] = values[i];
    }
  }
}
#define GATHER(name, in_flight, streamed) extern "C" __global__ void name( \
    const float4* rows, const long long* numbers, float4* out, int n, int width) { \
  gather<in_flight, streamed>(rows, numbers, out, n, width); }
GATHER(one, 1, false) GATHER(four, 4, false) GATHER(four_streamed, 4, true) GATHER(eight_streamed, 8, true)
"""


class BareGather:
    """Copies rows [n, dim] by row number: whichever of several kernels is fastest here."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self._width = rows.shape[1] // 4
        self._module = cupy.RawModule(code=_GATHERS, options=("-std=c++17",))
        self.variants = {"one": 1, "four": 4, "four_streamed": 4, "eight_streamed": 8}

    def run(self, variant: str, numbers: Any, out: Any) -> None:
        """Launch one of the kernels."""
        rows_per_block = 256 // self._width * self.variants[variant]
        grid = (-(-len(numbers) // rows_per_block),)
        arguments = (self._rows, numbers, out, np.int32(len(numbers)), np.int32(self._width))
        self._module.get_function(variant)(grid, (256,), arguments)


def device_ms(work: Sequence[Callable[[], object]], repetitions: int = 5) -> float:
    """Milliseconds of device time of one piece of work: several are queued, so that the host is ahead of the device."""
    times = []
    for _ in range(repetitions):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        cupy.cuda.Device().synchronize()
        begin.record()
        for each in work:
            each()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) / len(work))
    return statistics.median(times)


def call_us(work: Callable[[int], object], repetitions: int = 400) -> float:
    """Microseconds of a call and the wait for its end, seen from the host."""
    times = []
    stream = cupy.cuda.get_current_stream()
    for i in range(repetitions):
        stream.synchronize()
        begin = time.perf_counter()
        work(i)
        stream.synchronize()
        times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times)


def draw(num_rows: int, count: int, zipf: bool) -> Any:
    """Row numbers: uniform, or Zipf 1.05 over all rows in random order."""
    if not zipf:
        return cupy.random.randint(0, num_rows, count, dtype=np.int64)
    weights = np.arange(1, num_rows + 1) ** -1.05
    cumulated = cupy.asarray(np.cumsum(weights) / weights.sum())
    ranks = cupy.searchsorted(cumulated, cupy.random.random(count)).clip(0, num_rows - 1)
    return (ranks * 2654435761 % num_rows).astype(np.int64)


def random_keys(count: int) -> Any:
    """Distinct keys over the whole range of int64."""
    return cupy.asarray(np.unique(np.random.default_rng().integers(-(2**63), 2**63 - 1, count + 1000))[:count])


def rows_of(keys: Any, dim: int) -> Any:
    """A row that its key determines."""
    return (keys[:, None] * (cupy.arange(dim, dtype=np.int64) + 1) % 8191).astype(np.float32)


def filled_cache(dim: int, num_rows: int, table: str = "t") -> tuple[Any, Any, float]:
    """A cache with so many slots, as many random keys put in; the keys held, and the share of slots filled."""
    capacity_rows = int(num_rows * 0.7)
    cache = create_embedding_cache(
        {table: dim}, "cuda:0", cache_bytes=bytes_to_hold({table: dim}, {table: capacity_rows})
    )
    capacity = cache.stats()["capacity"]
    keys = cupy.random.permutation(random_keys(capacity))
    for begin in range(0, len(keys), NUM_KEYS):
        part = keys[begin : begin + NUM_KEYS]
        cache.insert(table, part, rows_of(part, dim))
    held = cache.dump(table)
    return cache, cupy.random.permutation(held), len(held) / capacity


def compare_hits(dim: int, num_rows: int) -> None:
    """G1: all keys held, 1,048,576 of them a call."""
    cache, held, fill = filled_cache(dim, num_rows)
    gather = BareGather(rows_of(held, dim))
    out = cupy.empty((NUM_KEYS, dim), np.float32)
    for zipf in (False, True):
        numbers = [draw(len(held), NUM_KEYS, zipf) for _ in range(6)]
        keys = [held[n] for n in numbers]
        out.fill(np.nan)
        missing = cache.lookup({"t": keys[0]}, {"t": out}).missing["t"]
        assert len(missing) == 0
        assert (out == rows_of(keys[0], dim)).all()
        bare = {v: device_ms([lambda n=n, v=v: gather.run(v, n, out) for n in numbers]) for v in gather.variants}
        ours = device_ms([lambda k=k: cache.lookup({"t": k}, {"t": out}) for k in keys])
        best = min(bare, key=lambda v: bare[v])
        moved = NUM_KEYS * (8 * dim + 8) / 1e9
        print(
            f"G1 dim {dim:3d} {'zipf   ' if zipf else 'uniform'} {len(held) / 1e6:4.1f} M rows, {fill:.3f} filled: "
            f"bare {bare[best]:.4f} ms ({best}, {moved / bare[best]:.2f} TB/s), ours {ours:.4f} ms "
            f"({NUM_KEYS / ours / 1e6:.2f} G keys/s), ratio {ours / bare[best]:.3f}",
            flush=True,
        )
    cache.close()


def compare_small_requests(num_tables: int = 26, samples: int = 64, dim: int = 128, num_rows: int = 100_000) -> None:
    """G2: many tables, few keys of each, one call."""
    dims = {f"t{i}": dim for i in range(num_tables)}
    cache = create_embedding_cache(dims, "cuda:0", cache_bytes=bytes_to_hold(dims, dict.fromkeys(dims, 2 * num_rows)))
    keys = random_keys(num_rows)
    for table in dims:
        cache.insert(table, keys, rows_of(keys, dim))
    gather = BareGather(rows_of(keys, dim))
    numbers = [draw(num_rows, num_tables * samples, zipf=True) for _ in range(16)]
    batches = [{t: keys[n[i * samples : (i + 1) * samples]] for i, t in enumerate(dims)} for n in numbers]
    all_out = cupy.empty((num_tables * samples, dim), np.float32)
    out = {t: all_out[i * samples : (i + 1) * samples] for i, t in enumerate(dims)}
    for batch in batches:
        all_out.fill(np.nan)
        cache.lookup(batch, out)
        assert all((out[t] == rows_of(k, dim)).all() for t, k in batch.items())
    bare = min(call_us(lambda i, v=v: gather.run(v, numbers[i % 16], all_out)) for v in gather.variants)
    ours = call_us(lambda i: cache.lookup(batches[i % 16], out))

    def fresh(i: int) -> dict[str, Any]:
        return {t: k.view() for t, k in batches[i % 16].items()}

    new = [fresh(i) for i in range(200)]
    first = call_us(lambda i: cache.lookup(new[i], out), 200)
    without_out = call_us(lambda i: cache.lookup(batches[i % 16]))
    single = call_us(lambda i: [cache.lookup({t: k}, {t: out[t]}) for t, k in batches[i % 16].items()], 50)
    stream = cupy.cuda.get_current_stream()

    def one_by_one(i: int) -> None:
        for t, k in batches[i % 16].items():
            cache.lookup({t: k}, {t: out[t]})
            stream.synchronize()

    waiting = call_us(one_by_one, 50)
    print(
        f"G2 {num_tables} tables x {samples}, dim {dim}: bare {bare:.1f} us, ours {ours:.1f} us, "
        f"ratio {ours / bare:.2f}; "
        f"arrays not seen before {first:.1f} us, without out {without_out:.1f} us; "
        f"{num_tables} calls {single:.0f} us ({single / ours:.1f} x), each waited for {waiting:.0f} us "
        f"({waiting / ours:.1f} x)",
        flush=True,
    )
    cache.close()


def compare_misses(num_rows: int, dim: int = 128, hit_rate: float = 0.9) -> None:
    """G3: misses served from pinned host memory."""
    keys = random_keys(num_rows)
    vectors = pinned_empty((num_rows, dim), np.float32)
    for begin in range(0, num_rows, NUM_KEYS):
        vectors[begin : begin + NUM_KEYS] = rows_of(keys[begin : begin + NUM_KEYS], dim).get()
    rates = []
    buffer = cupy.empty((NUM_KEYS // 2, dim), np.float32)
    for _ in range(5):
        copying = device_ms([lambda: buffer.set(vectors[: NUM_KEYS // 2])], 1)
        rates.append(buffer.nbytes / copying / 1e6)
    rate = statistics.median(rates)
    cached = bytes_to_hold({"t": dim}, {"t": num_rows // 2})
    cache = create_embedding_cache({"t": dim}, "cuda:0", cache_bytes=cached, backing={"t": (keys.get(), vectors)})
    for begin in range(0, num_rows // 2, NUM_KEYS):
        part = keys[begin : min(begin + NUM_KEYS, num_rows // 2)]
        cache.insert("t", part, rows_of(part, dim))
    held = cache.dump("t")
    others = cupy.asarray(np.setdiff1d(keys.get(), held.get()))
    out = cupy.empty((NUM_KEYS, dim), np.float32)
    num_missing = int(NUM_KEYS * (1 - hit_rate))
    works = []
    for _ in range(5):
        drawn = held[draw(len(held), NUM_KEYS - num_missing, zipf=False)]
        away = cupy.random.permutation(others)[:num_missing]
        works.append(cupy.random.permutation(cupy.concatenate([drawn, away])))
    out.fill(np.nan)
    assert len(cache.lookup({"t": works[0]}, {"t": out}).missing["t"]) == 0
    assert (out == rows_of(works[0], dim)).all()
    ours = device_ms([lambda k=k: cache.lookup({"t": k}, {"t": out}) for k in works])
    served = num_missing * dim * 4 / ours / 1e6
    print(
        f"G3 {hit_rate:.0%} hit, dim {dim}, {num_rows / 1e6:.1f} M rows in host memory: copy {rate:.1f} GB/s, "
        f"misses {served:.1f} GB/s in {ours:.3f} ms, ratio {served / rate:.3f}",
        flush=True,
    )
    cache.close()


def compare_writes(num_rows: int, dim: int = 64) -> None:
    """G4: inserts that evict, and look-ups beside them."""
    cache, held, fill = filled_cache(dim, num_rows)
    batches = [random_keys(NUM_KEYS) for _ in range(6)]
    vectors = rows_of(batches[0], dim)
    before = cache.stats()
    ms = device_ms([lambda k=k: cache.insert("t", k, vectors) for k in batches], 3)
    after = cache.stats()
    evictions, inserts = (after[name] - before[name] for name in ("evictions", "inserts"))
    print(
        f"G4 insert, dim {dim}, {fill:.3f} filled: {NUM_KEYS / ms / 1e6:.2f} G keys/s "
        f"({evictions / max(inserts, 1):.2f} of them evict)",
        flush=True,
    )
    for begin in range(0, len(held), NUM_KEYS):
        cache.insert("t", held[begin : begin + NUM_KEYS], rows_of(held[begin : begin + NUM_KEYS], dim))
    held = cupy.random.permutation(cache.dump("t"))
    keys = [held[draw(len(held), NUM_KEYS // 4, zipf=False)] for _ in range(8)]
    out = cupy.empty((NUM_KEYS // 4, dim), np.float32)
    replaced = len(held) // 10
    stop = threading.Event()

    def write() -> None:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            parts = [held[i * replaced // 10 : (i + 1) * replaced // 10] for i in range(10)]
            while not stop.is_set():
                for part in parts:
                    cache.insert("t", part, rows_of(part, dim))
                    stream.synchronize()
                    if stop.wait(0.1):
                        break

    def speed() -> float:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            begin, count = time.perf_counter(), 0
            while time.perf_counter() - begin < 1.0:
                for k in keys:
                    cache.lookup({"t": k}, {"t": out})
                stream.synchronize()
                count += len(keys)
            return count * len(keys[0]) / (time.perf_counter() - begin)

    idle = statistics.median(speed() for _ in range(3))
    writer = threading.Thread(target=write)
    writer.start()
    busy = statistics.median(speed() for _ in range(3))
    stop.set()
    writer.join()
    print(f"G4 look-ups beside 10 % of the rows replaced in a second: {busy / idle:.3f} of idle speed", flush=True)
    cache.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller tables")
    scale = 4 if parser.parse_args().quick else 1
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    print(f"{name}, CUDA {cupy.cuda.runtime.runtimeGetVersion()}, CuPy {cupy.__version__}, {time.strftime('%Y-%m-%d')}")
    compare_hits(128, 8_000_000 // scale)
    compare_hits(128, 2_000_000 // scale)
    compare_hits(32, 8_000_000 // scale)
    compare_small_requests()
    compare_misses(4_000_000 // scale)
    compare_writes(4_000_000 // scale)


if __name__ == "__main__":
    main()
