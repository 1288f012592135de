"""Look-ups on a GPU as requests make them, compared with their ceilings, on the machine it runs on.

    python benchmarks/gpu_cache.py [--quick] [--only G1,G2,G3,G4,G13]

The ceiling is the fastest of several plain kernels that copy the same rows by known row number ("bare gather"), or the
copy from pinned memory, in the same run; of bags, a plain kernel that adds up rows by known row number. Each call is
waited for. G1 and G13 take any keys, then keys near each other. Keys differ in each repetition, outputs are poisoned
before and checked after; figures are medians. Keys and rows are drawn on the GPU.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
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
from inference_session.kernels.records import Lookup, PoolingCode, key_segments
from inference_session.model_spec import TableSpec
from inference_session.tables.cuda.placed_tables import open_cuda_tables
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
extern "C" __global__ void add_bags(const float4* rows, const long long* numbers, float4* out, int n, int width) {
  const int bag = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (bag >= n) return;
  const long long* mine = numbers + (long long)bag * width;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int first = 0; first < width; first += 8) {
    float4 values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool there = first + i < width;
      values[i] = there ? rows[mine[first + i] * 32 + lane] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum.x += values[i].x; sum.y += values[i].y; sum.z += values[i].z; sum.w += values[i].w;
    }
  }
  __stcs(out + (long long)bag * 32 + lane, sum);
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

    def add_bags(self, numbers: Any, out: Any) -> None:
        """Sum rows of 128 elements by bag; numbers: int64 [bags, keys of a bag]."""
        num_bags, keys_per_bag = numbers.shape
        arguments = (self._rows, numbers, out, np.int32(num_bags), np.int32(keys_per_bag))
        self._module.get_function("add_bags")((-(-num_bags // 4),), (128,), arguments)


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
    """Row numbers on the device: uniform, or Zipf 1.05 over all rows in random order."""
    if not zipf:
        return cupy.random.randint(0, num_rows, count, dtype=np.int64)
    weights = cupy.arange(1, num_rows + 1, dtype=np.float64) ** -1.05
    drawn = cupy.random.random_sample(count) * weights.sum()
    ranks = cupy.searchsorted(cupy.cumsum(weights), drawn).clip(0, num_rows - 1)
    return ranks * 2654435761 % num_rows


def random_keys(count: int) -> Any:
    """Distinct keys over the whole range of int64, on the device: numbers from a random one on, mixed one to one."""
    first = np.random.default_rng().integers(2**63, dtype=np.uint64)
    mixed = cupy.arange(count, dtype=np.uint64) + first
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed.view(np.int64)


def rows_of(keys: Any, dim: int) -> Any:
    """Rows computed from their keys, which are on the device: float32 [n, dim]."""
    rows = cupy.empty((len(keys), dim), np.float32)
    for begin in range(0, len(keys), NUM_KEYS):
        part = keys[begin : begin + NUM_KEYS, None]
        rows[begin : begin + NUM_KEYS] = part * (cupy.arange(dim, dtype=np.int64) + 1) % 8191
    return rows


def lookup_of(
    looked_up: Any,
    device: CudaDevice,
    keys: Sequence[Any],
    outputs: Sequence[Any],
    tables: Sequence[int] | None = None,
    *,
    pooling: PoolingCode = PoolingCode.NONE,
) -> Lookup:
    """A look-up in a cache or in tables; the others are arguments of `key_segments`, arrays on the device."""
    segments = key_segments(keys, outputs, tables, pooling)
    num_keys = np.array([each.size for each in keys])
    return Lookup(segments, num_keys, device.counts(len(keys)), looked_up.prepare(segments))


def near_keys(count: int) -> Any:
    """The numbers from 1,000 on, in random order, on the device."""
    return cupy.random.permutation(cupy.arange(1000, 1000 + count, dtype=np.int64))


def filled_cache(
    device: CudaDevice, dim: int, num_rows: int, *, near: bool = False
) -> tuple[GpuEmbeddingCache, Any, float]:
    """A cache with this many slots and as many inserted keys; the keys held, and the share of filled slots.

    `near`: the keys are near each other, not any.
    """
    cache = GpuEmbeddingCache({"t": dim}, bytes_to_hold({"t": dim}, {"t": int(num_rows * 0.7)}), device)
    capacity = cache.stats().capacity
    keys = near_keys(capacity) if near else random_keys(capacity)
    for begin in range(0, len(keys), NUM_KEYS):
        part = keys[begin : begin + NUM_KEYS]
        cache.insert("t", part, rows_of(part, dim))
    held = cupy.random.permutation(cupy.asarray(cache.dump("t")))
    return cache, held, len(held) / capacity


def named(dim: int, *, near: bool, zipf: bool) -> str:
    """What is looked up."""
    return f"{'near' if near else 'any'} keys, dim {dim:3d}, {'zipf' if zipf else 'uniform':7s}"


def compare_hits(device: CudaDevice, dim: int, num_rows: int, goal: float, *, near: bool) -> None:
    """G1: all keys held, 1,048,576 of them a call."""
    cache, held, fill = filled_cache(device, dim, num_rows, near=near)
    with device.request():
        gather = BareGather(rows_of(held, dim))
        out = cupy.empty((NUM_KEYS, dim), np.float32)
        for zipf in (False, True):
            numbers = [draw(len(held), NUM_KEYS, zipf) for _ in range(6)]
            keys = [held[n] for n in numbers]
            lookups = [lookup_of(cache, device, [k], [out]) for k in keys]
            out.fill(np.nan)
            assert cache.look_up(lookups[0]) == 0
            assert bool((out == rows_of(keys[0], dim)).all())
            bare = {
                v: call_us(device, [lambda n=n, v=v: gather.run(v, n, out) for n in numbers]) for v in gather.variants
            }
            ours = call_us(device, [lambda each=each: cache.look_up(each) for each in lookups])
            best = min(bare, key=lambda v: bare[v])
            moved = NUM_KEYS * (8 * dim + 8) / 1e6
            print(
                f"G1 {named(dim, near=near, zipf=zipf)}, {len(held) / 1e6:4.1f} M rows, {fill:.3f} filled: "
                f"bare {bare[best]:.0f} us ({best}, {moved / bare[best]:.2f} TB/s), ours {ours:.0f} us "
                f"({NUM_KEYS / ours / 1e3:.2f} G keys/s), ratio {ours / bare[best]:.3f}, goal <= {goal}",
                flush=True,
            )
    cache.close()


def compare_small_requests(
    device: CudaDevice, num_tables: int = 26, samples: int = 64, dim: int = 128, num_rows: int = 100_000
) -> None:
    """G2: many tables, few keys of each, one call; keys of a table side by side, or columns of one matrix."""
    dims = {f"t{i}": dim for i in range(num_tables)}
    cache = GpuEmbeddingCache(dims, bytes_to_hold(dims, dict.fromkeys(dims, 2 * num_rows)), device)
    keys = random_keys(num_rows)
    for table in dims:
        cache.insert(table, keys, rows_of(keys, dim))
    with device.request():
        gather = BareGather(rows_of(keys, dim))
        numbers = [draw(num_rows, num_tables * samples, zipf=True) for _ in range(16)]
        out = cupy.empty((num_tables, samples, dim), np.float32)
        bare = min(
            call_us(device, [lambda n=n, v=v: gather.run(v, n, out) for n in numbers], 25) for v in gather.variants
        )
        for strided in (False, True):
            batches = [_columns(keys[n].reshape(num_tables, samples), strided) for n in numbers]
            lookups = [lookup_of(cache, device, batch, [*out]) for batch in batches]
            out.fill(np.nan)
            assert cache.look_up(lookups[0]) == 0
            assert bool((out == rows_of(keys[numbers[0]], dim).reshape(out.shape)).all())
            ours = call_us(device, [lambda each=each: cache.look_up(each) for each in lookups], 25)
            fresh = call_us(device, [lambda b=b: cache.look_up(lookup_of(cache, device, b, [*out])) for b in batches])
            print(
                f"G2 {num_tables} tables x {samples}, dim {dim}, {'strided' if strided else 'compact'}: "
                f"bare {bare:.1f} us, ours {ours:.1f} us, ratio {ours / bare:.2f}, goal <= 1.5; "
                f"a shape that comes for the first time {fresh:.1f} us",
                flush=True,
            )
    cache.close()


def _columns(keys: Any, strided: bool) -> list[Any]:
    """The keys of each table [samples], from [tables, samples]: `strided`, those of a sample are side by side."""
    return [*cupy.ascontiguousarray(keys.T).T] if strided else [*keys]


def compare_host_rows(device: CudaDevice, num_rows: int, goal: float, dim: int = 128) -> None:
    """G3: 1,048,576 keys a call, nine tenths of a table on the device, the others of one in pinned host memory."""
    num_cold, num_hot_rows = NUM_KEYS // 10, min(1_000_000, num_rows // 2)  # the larger table does not fit
    buffer, pinned = cupy.empty((NUM_KEYS // 2, dim), np.float32), pinned_empty((NUM_KEYS // 2, dim), np.float32)
    copying = call_us(device, [lambda: buffer.set(pinned, stream=device.stream)], 5)
    rate = buffer.nbytes / copying / 1e3
    with tempfile.TemporaryDirectory(dir=_folder_for(num_rows * dim * 4)) as folder:
        sizes = {"hot": num_hot_rows, "cold": num_rows}
        files = [_write_numbered(Path(folder) / name, size, dim) for name, size in sizes.items()]
        (tables,) = open_cuda_tables(files, [device], cache_bytes=num_hot_rows * dim * 4)
        assert tables.placement.on_host == ["cold"]
        with device.request():
            out = cupy.empty((NUM_KEYS, dim), np.float32)
            outs = [out[num_cold:], out[:num_cold]]
            batches = [[draw(n, len(o), False) for n, o in zip(sizes.values(), outs, strict=True)] for _ in range(5)]
            for name, used in (("alone", slice(1, 2)), ("90 % hit", slice(0, 2))):
                lookups = [lookup_of(tables, device, b[used], outs[used], range(2)[used]) for b in batches]
                out.fill(np.nan)
                tables.look_up(lookups[0])
                device.wait()
                for keys, each in zip(batches[0][used], outs[used], strict=True):
                    assert bool((each == rows_of(keys, dim)).all())
                ours = call_us(device, [lambda each=each: tables.look_up(each) for each in lookups])
                served = outs[1].nbytes / ours / 1e3
                print(
                    f"G3 dim {dim}, {num_rows / 1e6:.1f} M rows in host memory, {name}: copy {rate:.1f} GB/s, rows "
                    f"from there {served:.1f} GB/s in {ours:.0f} us, ratio {served / rate:.3f}, goal >= {goal}",
                    flush=True,
                )
        tables.close()
        for file in files:
            file.close()


def _folder_for(num_bytes: int) -> str | None:
    """A folder in memory, if so much fits there; else the usual one for temporary files."""
    memory = Path("/dev/shm")  # noqa: S108
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > 2 * num_bytes else None


def _write_numbered(folder: Path, num_rows: int, dim: int) -> TableFile:
    """A table whose keys are row numbers."""
    begins = range(0, num_rows, NUM_KEYS)
    blocks = (rows_of(cupy.arange(b, min(b + NUM_KEYS, num_rows)), dim).get() for b in begins)
    write_table(folder, blocks)
    return TableFile.open(folder, TableSpec(folder.name, folder.name, num_rows, dim, keys="row_number"))


def compare_bags(device: CudaDevice, num_rows: int, num_bags: int = 65_536, dim: int = 128, *, near: bool) -> None:
    """G13: bags of one table, summed; the ceiling adds up rows by known row number."""
    cache, held, fill = filled_cache(device, dim, num_rows, near=near)
    with device.request():
        gather = BareGather(rows_of(held, dim))
        out = cupy.empty((num_bags, dim), np.float32)
        for keys_per_bag, zipf in itertools.product((8, 64), (False, True)):
            numbers = [draw(len(held), num_bags * keys_per_bag, zipf).reshape(num_bags, -1) for _ in range(3)]
            keys = [held[n] for n in numbers]
            lookups = [lookup_of(cache, device, [k], [out], pooling=PoolingCode.SUM) for k in keys]
            out.fill(np.nan)
            assert cache.look_up(lookups[0]) == 0
            expected = cupy.empty_like(out)
            gather.add_bags(numbers[0], expected)
            assert bool(cupy.allclose(out, expected, rtol=1e-5))
            bare = call_us(device, [lambda n=n: gather.add_bags(n, out) for n in numbers])
            ours = call_us(device, [lambda each=each: cache.look_up(each) for each in lookups])
            print(
                f"G13 {num_bags} bags of {keys_per_bag:2d} {named(dim, near=near, zipf=zipf)}, "
                f"{len(held) / 1e6:.1f} M rows, {fill:.3f} filled: gather by row number {bare:.0f} us, ours {ours:.0f} "
                f"us, ratio {ours / bare:.2f}, goal <= 1.25",
                flush=True,
            )
    cache.close()


def compare_inserts(device: CudaDevice, cache: GpuEmbeddingCache, fill: float, place: str) -> None:
    """G4: inserts of rows that are already on the device, in pinned host memory, or in pageable memory."""
    dim = cache.dims["t"]
    batches = [random_keys(NUM_KEYS) for _ in range(6)]
    vectors = rows_of(batches[0], dim)
    if place != "device":
        batches, vectors = [keys.get() for keys in batches], vectors.get()
    if place == "pinned":
        batches, vectors = [pinned_copy(keys) for keys in batches], pinned_copy(vectors)
    before = cache.stats()
    us = call_us(device, [lambda k=k: cache.insert("t", k, vectors) for k in batches], 3)
    after = cache.stats()
    evicting = (after.evictions - before.evictions) / max(after.inserts - before.inserts, 1)
    num_bytes = NUM_KEYS * (8 + 4 * dim)
    print(
        f"G4 insert, dim {dim}, {fill:.3f} filled, rows from {place + ' memory':13s}: {NUM_KEYS / us:.1f} M keys/s, "
        f"{num_bytes / us / 1e3:.1f} GB/s ({evicting:.2f} of them evict)"
        + (", goal >= 1,200 M" if place == "device" else ""),
        flush=True,
    )


def compare_writes(device: CudaDevice, num_rows: int, dim: int = 64) -> None:
    """G4: inserts that evict, and look-ups during such inserts."""
    cache, held, fill = filled_cache(device, dim, num_rows)
    for place in ("device", "pinned", "host"):
        compare_inserts(device, cache, fill, place)
    held = cache.dump("t")
    on_device = cupy.asarray(held)
    out = cupy.empty((NUM_KEYS // 4, dim), np.float32)
    keys = [on_device[draw(len(held), len(out), zipf=False)] for _ in range(8)]
    parts = [(part, rows_of(cupy.asarray(part), dim).get()) for part in np.array_split(held[: len(held) // 10], 10)]
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for part, vectors in parts:
                cache.insert("t", part, vectors)
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
    print(
        f"G4 look-ups while 10 % of the rows are replaced in a second: {busy / idle:.3f} of idle speed, goal >= 0.85",
        flush=True,
    )
    cache.close()


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller tables")
    parser.add_argument("--only", default="G1,G2,G3,G4,G13", type=lambda text: text.split(","), help="these goals")
    options = parser.parse_args()
    device = CudaDevice(0)
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    print(f"{name}, CUDA {cupy.cuda.runtime.runtimeGetVersion()}, CuPy {cupy.__version__}, {time.strftime('%Y-%m-%d')}")
    with device.stream:
        for goal in options.only:
            measure(goal, device, scale=4 if options.quick else 1)


def measure(goal: str, device: CudaDevice, scale: int) -> None:
    """One goal; rows are divided by `scale`."""
    if goal == "G1":
        for near in (False, True):
            compare_hits(device, 128, 16_000_000 // scale, 1.10, near=near)
            compare_hits(device, 128, 2_000_000 // scale, 1.10, near=near)
            compare_hits(device, 32, 16_000_000 // scale, 1.45, near=near)
    elif goal == "G2":
        compare_small_requests(device)
    elif goal == "G3":
        compare_host_rows(device, 4_000_000 // scale, 0.80)
        compare_host_rows(device, 16_000_000 // scale, 0.65)
    elif goal == "G4":
        compare_writes(device, 4_000_000 // scale)
    elif goal == "G13":
        for near in (False, True):
            compare_bags(device, 16_000_000 // scale, near=near)
    else:
        raise SystemExit(f"--only: {goal} is none of G1, G2, G3, G4, G13")


if __name__ == "__main__":
    main()
