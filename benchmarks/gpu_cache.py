"""Look-ups on a GPU as requests make them, beside their ceilings, on the machine it runs on.

    python benchmarks/gpu_cache.py [--quick]

The ceiling is the fastest of several plain kernels that copy the same rows by known row number ("bare gather"), or the
copy from pinned memory, in the same run. Each call is waited for. Keys are fresh in each repetition, outputs are
poisoned before and checked after; figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from inference_session.device.cuda import CudaDevice
from inference_session.device.pinned import pinned_copy, pinned_empty
from inference_session.embedding_cache.gpu import GpuEmbeddingCache
from inference_session.embedding_cache.gpu_budget import bytes_to_hold
from inference_session.kernels.records import SEGMENT, Lookup
from inference_session.model_spec import TableSpec
from inference_session.tables.placed_tables import open_cuda_tables
from inference_session.tables.table_file import TableFile, write_table

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
    """Copies rows [n, dim] by row number, by the kernel of several that is fastest here."""

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


def call_us(device: CudaDevice, work: Sequence[Callable[[], object]], repetitions: int = 5) -> float:
    """Microseconds of a call and the wait for its end, measured on the host."""
    times = []
    for each in [*work] * repetitions:
        device.wait()
        begin = time.perf_counter()
        each()
        device.wait()
        times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times)


def draw(num_rows: int, count: int, zipf: bool) -> Any:
    """Row numbers: uniform, or Zipf 1.05 over all rows in random order."""
    rng = np.random.default_rng()
    if not zipf:
        return rng.integers(0, num_rows, count)
    weights = np.arange(1, num_rows + 1) ** -1.05
    ranks = np.searchsorted(np.cumsum(weights) / weights.sum(), rng.random(count)).clip(0, num_rows - 1)
    return ranks * 2654435761 % num_rows


def random_keys(count: int) -> Any:
    """Distinct keys over the whole range of int64, in random order."""
    rng = np.random.default_rng()
    return rng.permutation(np.unique(rng.integers(-(2**63), 2**63 - 1, count + 1000)))[:count]


def rows_of(keys: Any, dim: int) -> Any:
    """A row computed from its key."""
    return (keys[:, None] * (np.arange(dim, dtype=np.int64) + 1) % 8191).astype(np.float32)


def lookup_of(looked_up: Any, device: CudaDevice, keys: Sequence[Any], outputs: Sequence[Any]) -> Lookup:
    """A look-up of keys on the device, one array per table, in a cache or in tables."""
    num_keys = np.array([len(each) for each in keys])
    segments = np.zeros(len(keys), SEGMENT)
    segments["table"], segments["num_rows"], segments["keys_per_row"] = np.arange(len(keys)), num_keys, 1
    segments["key_bytes"] = segments["key_stride"] = segments["row_stride"] = 8
    segments["keys_address"] = [each.data.ptr for each in keys]
    segments["output_address"] = [each.data.ptr for each in outputs]
    segments["output_stride"] = outputs[0].strides[0]
    return Lookup(segments, num_keys, device.counts(len(keys)), looked_up.prepare(segments))


def filled_cache(device: CudaDevice, dim: int, num_rows: int) -> tuple[GpuEmbeddingCache, Any, float]:
    """A cache with this many slots and as many inserted keys; the keys held, and the share of filled slots."""
    cache = GpuEmbeddingCache({"t": dim}, bytes_to_hold({"t": dim}, {"t": int(num_rows * 0.7)}), device)
    capacity = cache.stats().capacity
    keys = random_keys(capacity)
    for begin in range(0, len(keys), NUM_KEYS):
        part = keys[begin : begin + NUM_KEYS]
        cache.insert("t", part, rows_of(part, dim))
    held = cache.dump("t")
    return cache, np.random.default_rng().permutation(held), len(held) / capacity


def compare_hits(device: CudaDevice, dim: int, num_rows: int) -> None:
    """G1: all keys held, 1,048,576 of them a call."""
    cache, held, fill = filled_cache(device, dim, num_rows)
    with device.request():
        gather = BareGather(cupy.asarray(rows_of(held, dim)))
        out = cupy.empty((NUM_KEYS, dim), np.float32)
        for zipf in (False, True):
            numbers = [draw(len(held), NUM_KEYS, zipf) for _ in range(6)]
            on_device = [cupy.asarray(n) for n in numbers]
            keys = [cupy.asarray(held[n]) for n in numbers]
            lookups = [lookup_of(cache, device, [k], [out]) for k in keys]
            out.fill(np.nan)
            assert cache.look_up(lookups[0]) == 0
            assert np.array_equal(out.get(), rows_of(held[numbers[0]], dim))
            bare = {
                v: call_us(device, [lambda n=n, v=v: gather.run(v, n, out) for n in on_device]) for v in gather.variants
            }
            ours = call_us(device, [lambda each=each: cache.look_up(each) for each in lookups])
            best = min(bare, key=lambda v: bare[v])
            moved = NUM_KEYS * (8 * dim + 8) / 1e6
            print(
                f"G1 dim {dim:3d} {'zipf   ' if zipf else 'uniform'} {len(held) / 1e6:4.1f} M rows, {fill:.3f} filled: "
                f"bare {bare[best]:.0f} us ({best}, {moved / bare[best]:.2f} TB/s), ours {ours:.0f} us "
                f"({NUM_KEYS / ours / 1e3:.2f} G keys/s), ratio {ours / bare[best]:.3f}",
                flush=True,
            )
    cache.close()


def compare_small_requests(
    device: CudaDevice, num_tables: int = 26, samples: int = 64, dim: int = 128, num_rows: int = 100_000
) -> None:
    """G2: many tables, few keys of each, one call."""
    dims = {f"t{i}": dim for i in range(num_tables)}
    cache = GpuEmbeddingCache(dims, bytes_to_hold(dims, dict.fromkeys(dims, 2 * num_rows)), device)
    keys = random_keys(num_rows)
    for table in dims:
        cache.insert(table, keys, rows_of(keys, dim))
    with device.request():
        gather = BareGather(cupy.asarray(rows_of(keys, dim)))
        numbers = [draw(num_rows, num_tables * samples, zipf=True) for _ in range(16)]
        on_device = [cupy.asarray(n) for n in numbers]
        out = cupy.empty((num_tables, samples, dim), np.float32)
        batches = [[cupy.asarray(keys[part]) for part in n.reshape(num_tables, samples)] for n in numbers]
        lookups = [lookup_of(cache, device, batch, [*out]) for batch in batches]
        out.fill(np.nan)
        assert cache.look_up(lookups[0]) == 0
        assert np.array_equal(out.get(), rows_of(keys[numbers[0]], dim).reshape(out.shape))
        bare = min(
            call_us(device, [lambda n=n, v=v: gather.run(v, n, out) for n in on_device], 25) for v in gather.variants
        )
        ours = call_us(device, [lambda each=each: cache.look_up(each) for each in lookups], 25)
        fresh = call_us(device, [lambda b=b: cache.look_up(lookup_of(cache, device, b, [*out])) for b in batches], 5)
    print(
        f"G2 {num_tables} tables x {samples}, dim {dim}: bare {bare:.1f} us, ours {ours:.1f} us, "
        f"ratio {ours / bare:.2f}; a shape that comes for the first time {fresh:.1f} us",
        flush=True,
    )
    cache.close()


def compare_host_rows(device: CudaDevice, num_rows: int, dim: int = 128) -> None:
    """G3: tables of row numbers that lie in pinned host memory."""
    vectors = rows_of(np.arange(num_rows), dim)
    buffer, pinned = cupy.empty((NUM_KEYS // 2, dim), np.float32), pinned_empty((NUM_KEYS // 2, dim), np.float32)
    with tempfile.TemporaryDirectory() as folder, device.request():
        copying = call_us(device, [lambda: buffer.set(pinned, stream=device.stream)], 5)
        write_table(Path(folder) / "t", [vectors])
        file = TableFile.open(Path(folder) / "t", TableSpec("t", "t", num_rows, dim, keys="row_number"))
        (tables,) = open_cuda_tables([file], [device], cache_bytes=0)
        out = cupy.empty((NUM_KEYS // 8, dim), np.float32)
        keys = [cupy.asarray(draw(num_rows, len(out), zipf=False)) for _ in range(5)]
        lookups = [lookup_of(tables, device, [k], [out]) for k in keys]
        out.fill(np.nan)
        tables.look_up(lookups[0])
        device.wait()
        assert np.array_equal(out.get(), vectors[keys[0].get()])
        ours = call_us(device, [lambda each=each: tables.look_up(each) for each in lookups])
    rate, served = buffer.nbytes / copying / 1e3, out.nbytes / ours / 1e3
    print(
        f"G3 dim {dim}, {num_rows / 1e6:.1f} M rows in host memory: copy {rate:.1f} GB/s, rows looked up "
        f"{served:.1f} GB/s in {ours:.0f} us, ratio {served / rate:.3f}",
        flush=True,
    )
    tables.close()


def compare_inserts(device: CudaDevice, cache: GpuEmbeddingCache, fill: float, place: str) -> None:
    """G4: inserts of rows that are already on the device, in pinned host memory, or in pageable memory."""
    dim = cache.dims["t"]
    batches = [random_keys(NUM_KEYS) for _ in range(6)]
    vectors = rows_of(batches[0], dim)
    if place == "device":
        with device.request():
            batches, vectors = [cupy.asarray(keys) for keys in batches], cupy.asarray(vectors)
    elif place == "pinned":
        batches, vectors = [pinned_copy(keys) for keys in batches], pinned_copy(vectors)
    before = cache.stats()
    us = call_us(device, [lambda k=k: cache.insert("t", k, vectors) for k in batches], 3)
    after = cache.stats()
    evicting = (after.evictions - before.evictions) / max(after.inserts - before.inserts, 1)
    num_bytes = NUM_KEYS * (8 + 4 * dim)
    print(
        f"G4 insert, dim {dim}, {fill:.3f} filled, rows from {place + ' memory':13s}: {NUM_KEYS / us:.1f} M keys/s, "
        f"{num_bytes / us / 1e3:.1f} GB/s ({evicting:.2f} of them evict)",
        flush=True,
    )


def compare_writes(device: CudaDevice, num_rows: int, dim: int = 64) -> None:
    """G4: inserts that evict, and look-ups during such inserts."""
    cache, held, fill = filled_cache(device, dim, num_rows)
    for place in ("device", "pinned", "host"):
        compare_inserts(device, cache, fill, place)
    held = cache.dump("t")
    with device.request():
        out = cupy.empty((NUM_KEYS // 4, dim), np.float32)
        keys = [cupy.asarray(held[draw(len(held), len(out), zipf=False)]) for _ in range(8)]
    stop = threading.Event()

    def write() -> None:
        parts = np.array_split(held[: len(held) // 10], 10)
        while not stop.is_set():
            for part in parts:
                cache.insert("t", part, rows_of(part, dim))
                if stop.wait(0.1):
                    break

    def speed() -> float:
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < 1.0:
            for k in keys:
                with device.request():
                    cache.look_up(lookup_of(cache, device, [k], [out]))
            count += len(keys)
        return count * len(out) / (time.perf_counter() - begin)

    idle = statistics.median(speed() for _ in range(3))
    writer = threading.Thread(target=write)
    writer.start()
    busy = statistics.median(speed() for _ in range(3))
    stop.set()
    writer.join()
    print(f"G4 look-ups while 10 % of the rows are replaced in a second: {busy / idle:.3f} of idle speed", flush=True)
    cache.close()


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller tables")
    scale = 4 if parser.parse_args().quick else 1
    device = CudaDevice(0)
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    print(f"{name}, CUDA {cupy.cuda.runtime.runtimeGetVersion()}, CuPy {cupy.__version__}, {time.strftime('%Y-%m-%d')}")
    compare_hits(device, 128, 8_000_000 // scale)
    compare_hits(device, 128, 2_000_000 // scale)
    compare_hits(device, 32, 8_000_000 // scale)
    compare_small_requests(device)
    compare_host_rows(device, 4_000_000 // scale)
    compare_writes(device, 4_000_000 // scale)


if __name__ == "__main__":
    main()
