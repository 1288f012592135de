"""One model on all GPUs of a host, compared with a bare peer gather and with one GPU: goals M1 to M3.

    python benchmarks/several_gpus.py [M1] [M2] [M3] [--rows 2000000] [--triton grpc|http]

M1: rows of dim 128 divided among the GPUs, 1,048,576 keys a call, on all GPUs at once, after each GPU has copied the
others' hot rows: by keys of the same distribution, drawn anew for each call, not by those that are timed. The peer is
the fastest of several plain kernels that copy rows, divided in the same way, by row number; it has no copies. M2: a
table that does not fit on one GPU (by `cache_bytes`), compared with copies of it on each. M3: copies on all GPUs
compared with one GPU. M2 and M3 compute whole requests (26 keys x dim 128, MLP 512-256-1) in this process, or with
`--triton` through a real Triton, beside `zeros`, a Python model with a process for each GPU that reads the inputs and
answers zeros: what Triton and the clients allow. Answers are compared with the CPU's before they are timed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import cupy
import numpy as np
import onnx
from client_load import Protocol, measure_load
from gpu_cache import NUM_KEYS, draw, lookup_of, random_keys, rows_of
from gpu_triton import CONFIG, DIM, PEER, TENSORS, model_spec, network, request_of
from serving import add_settings

from inference_session import InferenceSession
from inference_session.device.cuda import CudaDevice
from inference_session.kernels.records import Lookup, key_segments
from inference_session.model_spec import DENSE_FILE, TABLES_FOLDER, TableSpec
from inference_session.tables.cuda.placed_tables import open_cuda_tables
from inference_session.tables.cuda.tables import CudaTables
from inference_session.tables.table_file import TableFile, write_table
from inference_session.version_directory import manifest
from triton_backend.launcher.server import ServerOptions, TritonServer
from triton_backend.repository.config_writer import write_model_config
from triton_backend.repository.model_config import ModelConfig

NUM_GPUS = cupy.cuda.runtime.getDeviceCount()
_CALLS, _ROUNDS = 5, 9
_MOST_COPYING_ROUNDS, _COPYING_CALLS = 20, 400
_CLIENTS_PER_GPU = 12
_NUM_CHECKED = 1 << 16
"""How many of a call's copied rows are compared."""
_GATHERS = r"""
struct Shards { const float4* rows[8]; };
template <int IN_FLIGHT>
__device__ void gather(const Shards& shards, const long long* numbers, float4* out, int n) {
  const int per_block = blockDim.x / 32, member = threadIdx.x % 32;
  const long long first = (long long)blockIdx.x * per_block * IN_FLIGHT + threadIdx.x / 32;
  float4 values[IN_FLIGHT];
#pragma unroll
  for (int i = 0; i < IN_FLIGHT; ++i) {
    if (first + i * per_block >= n) break;
    const unsigned long long row = numbers[first + i * per_block];
    values[i] = shards.rows[row % NUM_SHARDS][row / NUM_SHARDS * 32 + member];
  }
#pragma unroll
  for (int i = 0; i < IN_FLIGHT; ++i)
    if (first + i * per_block < n) __stcs(out + (first + i * per_block) * 32 + member, values[i]);
}
#define GATHER(name, in_flight) extern "C" __global__ void name( \
    const Shards shards, const long long* numbers, float4* out, int n) { gather<in_flight>(shards, numbers, out, n); }
GATHER(one, 1) GATHER(two, 2) GATHER(four, 4) GATHER(eight, 8)
"""
_VARIANTS = {"one": 1, "two": 2, "four": 4, "eight": 8}


def main() -> None:
    """Run the selected measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("goals", nargs="*", default=["M1", "M2", "M3"], help="M1, M2, M3")
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--triton", choices=get_args(Protocol), help="M2 and M3 through Triton, by this protocol")
    arguments = parser.parse_args()
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    print(f"{NUM_GPUS} x {name}, {os.cpu_count()} cores, CuPy {cupy.__version__}, {time.strftime('%Y-%m-%d')}")
    with tempfile.TemporaryDirectory() as folder:
        if "M1" in arguments.goals:
            compare_look_ups(Path(folder), arguments.rows)
        if {"M2", "M3"} & set(arguments.goals):
            versions = write_models(Path(folder) / "models", arguments.rows)
            if arguments.triton:
                compare_served(versions, arguments.goals, arguments.triton)
            else:
                compare_sessions(versions, arguments.goals)


def compare_look_ups(folder: Path, num_rows: int) -> None:
    """M1: keys that are row numbers, and keys that are stored."""
    keys = random_keys(num_rows).get()
    devices = [CudaDevice(number) for number in range(NUM_GPUS)]
    vectors = rows_of(cupy.asarray(keys), DIM).get()
    shards = divided(vectors, devices)
    for kind in ("row_number", "stored"):
        known = keys if kind == "stored" else None
        write_table(folder / kind, [vectors], keys=None if known is None else [known])
        file = TableFile.open(folder / kind, TableSpec(kind, kind, num_rows, DIM, keys=kind))
        tables = open_cuda_tables([file], devices, shard="rows")
        for zipf in (False, True):
            numbers = [draw(num_rows, NUM_KEYS, zipf).get() for _ in devices]
            asked = numbers if known is None else [known[n] for n in numbers]
            bare = {name: at_once(devices, gathers_of(devices, shards, numbers, name, keys)) for name in _VARIANTS}
            works = look_ups_of(tables, asked, [keys[n] for n in numbers])
            num_copied = copy_hot_rows(devices, tables, other_look_ups(devices, tables, num_rows, known, zipf))
            ours = at_once(devices, works)
            best = min(bare, key=lambda name: bare[name])
            print(
                f"M1 {kind:10} {'zipf' if zipf else 'uniform':7}: bare peer gather {bare[best]:.0f} us ({best}), ours "
                f"{ours:.0f} us, {bare[best] / ours:.2f} of it (goal 0.8), {NUM_KEYS / ours / 1e3:.2f} G keys/s a GPU; "
                f"{num_copied} copies of hot rows made",
                flush=True,
            )
        for each in tables:
            each.close()


def divided(rows: Any, devices: Sequence[CudaDevice]) -> list[Any]:
    """A part of the rows on each GPU, as tables are divided."""
    shards = []
    for number, device in enumerate(devices):
        with cupy.cuda.Device(device.device_id):
            shards.append(cupy.asarray(rows[number :: len(devices)]))
    return shards


def gathers_of(
    devices: Sequence[CudaDevice], shards: Sequence[Any], numbers: Sequence[Any], variant: str, keys: Any
) -> list[Callable[[], None]]:
    """A bare gather on each GPU, checked."""
    works: list[Callable[[], None]] = []
    for device, rows in zip(devices, numbers, strict=True):
        with device.request():
            addresses = np.zeros(8, np.uint64)
            addresses[: len(shards)] = [shard.data.ptr for shard in shards]
            on_device, out = cupy.asarray(rows), cupy.zeros((len(rows), DIM), np.float32)
            options = ("-std=c++17", f"-DNUM_SHARDS={len(shards)}")
            kernel = cupy.RawModule(code=_GATHERS, options=options).get_function(variant)
            kernel.compile()
            grid = (-(-len(rows) // (8 * _VARIANTS[variant])),)
            arguments = addresses.view(np.dtype((np.void, 64)))[0], on_device, out, np.int32(len(rows))

            def work(kernel: Any = kernel, grid: Any = grid, arguments: Any = arguments) -> None:
                kernel(grid, (256,), arguments)

            work()
            device.wait()
            check(out, keys[rows])
        works.append(work)
    return works


def check(out: Any, keys: Any) -> None:
    """Check that the copied rows are those of these keys."""
    assert np.array_equal(out[:_NUM_CHECKED].get(), rows_of(cupy.asarray(keys[:_NUM_CHECKED]), DIM).get())
    assert not bool(cupy.isnan(out).any())


def look_ups_of(tables: Sequence[CudaTables], keys: Sequence[Any], rows: Sequence[Any]) -> list[Callable[[], None]]:
    """A look-up on each GPU, checked: of `keys`, whose rows are those of the keys `rows`."""
    works: list[Callable[[], None]] = []
    for each, asked, row_keys in zip(tables, keys, rows, strict=True):
        with each.device.request():
            staged, out = cupy.asarray(asked), cupy.empty((len(asked), DIM), np.float32)
            out.fill(np.nan)
            segments, counts = key_segments([staged], [out]), np.array([len(asked)])
            lookup = Lookup(segments, counts, each.device.counts(1), each.prepare(segments))
            lookup.copied_keys = (staged, out)  # type: ignore[assignment]  # kept alive together with it
            each.look_up(lookup)
            each.device.wait()
            check(out, row_keys)
        works.append(lambda each=each, lookup=lookup: each.look_up(lookup))
    return works


def other_look_ups(
    devices: Sequence[CudaDevice], tables: Sequence[CudaTables], num_rows: int, keys: Any, zipf: bool
) -> list[Callable[[], None]]:
    """On each GPU, look-ups of keys that are drawn for each call. `keys`: of the rows; None: keys are row numbers."""
    works: list[Callable[[], None]] = []
    for device, each in zip(devices, tables, strict=True):
        with device.request():
            staged, out = cupy.empty(NUM_KEYS, np.int64), cupy.empty((NUM_KEYS, DIM), np.float32)
            known = None if keys is None else cupy.asarray(keys)
            lookup = lookup_of(each, device, [staged], [out])

        def work(each: CudaTables = each, lookup: Lookup = lookup, staged: Any = staged, known: Any = known) -> None:
            numbers = draw(num_rows, NUM_KEYS, zipf)
            staged[...] = numbers if known is None else known[numbers]
            each.look_up(lookup)

        lookup.copied_keys = (staged, out)  # type: ignore[assignment]  # kept alive together with it
        works.append(work)
    return works


def copy_hot_rows(
    devices: Sequence[CudaDevice], tables: Sequence[CudaTables], works: Sequence[Callable[[], None]]
) -> int:
    """Let each GPU copy the rows of the others that are hot in these look-ups; returns how many were copied in all.

    A thread does so once a second anyway; this is the same without waiting.
    """
    copied: list[int] = []
    # A round may find nothing because the thread was there just before.
    while len(copied) < _MOST_COPYING_ROUNDS and (len(copied) < 3 or any(copied[-3:])):
        span_of(devices, works, _COPYING_CALLS)
        copied.append(sum(each.copy_hot_rows() for each in tables))
    return sum(copied)


def at_once(devices: Sequence[CudaDevice], works: Sequence[Callable[[], None]]) -> float:
    """Microseconds per call of consecutive calls, on all GPUs at the same time; that of the slowest GPU."""
    return 1e6 * statistics.median(span_of(devices, works, _CALLS) / _CALLS for _ in range(_ROUNDS))


def span_of(devices: Sequence[CudaDevice], works: Sequence[Callable[[], None]], num_calls: int) -> float:
    """Seconds that so many consecutive calls take, on all GPUs at the same time; of the slowest GPU."""
    barrier = threading.Barrier(len(works))
    spans: list[float] = []

    def go(device: CudaDevice, work: Callable[[], None]) -> None:
        with cupy.cuda.Device(device.device_id), device.stream:
            barrier.wait()
            begin = time.perf_counter()
            for _ in range(num_calls):
                work()
            device.stream.synchronize()
            spans.append(time.perf_counter() - begin)

    threads = [threading.Thread(target=go, args=pair) for pair in zip(devices, works, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(spans)


def write_models(repository: Path, num_rows: int) -> dict[str, Path]:
    """The same model three times: on one GPU, copied to all, divided among all because it does not fit."""
    first = repository / "one" / "1"
    keys, spec = random_keys(num_rows).get(), model_spec(num_rows)
    write_table(first / TABLES_FOLDER / "item", [rows_of(cupy.asarray(keys), DIM).get()], keys=[keys])
    onnx.save(network(np.random.default_rng(0)), first / DENSE_FILE)
    manifest.describe_version(spec, first)
    fits = int(4 * DIM * num_rows / 1.5) + 40 * num_rows
    settings = {
        "one": {"device": "cuda:0"},
        "copied": {"device": "cuda:all", "shard": "none"},
        "sharded": {"device": "cuda:all", "cache_bytes": str(fits)},
    }
    for name, own in settings.items():
        if name != "one":
            shutil.copytree(first, repository / name / "1", copy_function=os.link)
        add_settings(write_model_config(repository / name / "1", spec, name), own)
    return {name: repository / name / "1" for name in settings}


def settings_of(version: Path) -> dict[str, Any]:
    """The settings in config.pbtxt."""
    return dict(ModelConfig.read(version.parent / "config.pbtxt").parameters)


def keys_of(version: Path) -> Any:
    """The key of each row."""
    return np.fromfile(version / TABLES_FOLDER / "item" / "key", np.int64)


def compare_sessions(versions: dict[str, Path], goals: Sequence[str]) -> None:
    """M2 and M3 in this process: p50 of one request at a time, and samples a second of several threads."""
    keys, rng = keys_of(versions["one"]), np.random.default_rng(1)
    requests = [request_of("hotrow", "native", keys, 1024, rng) for _ in range(32)]
    small, large = ([request_of("hotrow", "native", keys, size, rng) for _ in range(8)] for size in (64, 16384))
    with InferenceSession.open(versions["one"], device="cpu") as session:
        expected = session.predict(requests[0])
    p50, rates = {}, {}
    for name, version in versions.items():
        with InferenceSession.open(version, warm_up_s=20, **settings_of(version)) as session:
            assert bool(session.stats()["gpu"]["sharded"]) == (name == "sharded")
            for _ in range(2 * NUM_GPUS):
                np.testing.assert_allclose(session.predict(requests[0]), expected, atol=1e-5)
            p50[name] = p50_of(session, requests)
            rates[name] = [most_samples(session, each) for each in (small, requests, large)]
            shown = ", ".join(f"{rate:.0f}" for rate in rates[name])
            print(f"{name}: p50 {p50[name]:.0f} us, {shown} samples/s", flush=True)
    report(goals, "in process", p50, {"64": 0, "1,024": 1, "16,384": 2}, rates)


def report(goals: Sequence[str], where: str, p50: dict[str, float], sizes: dict[str, int], rates: Any) -> None:
    """A line for each goal."""
    if "M2" in goals:
        print(
            f"M2 {where}, 1,024 samples: p50 copied {p50['copied']:.0f} us, sharded {p50['sharded']:.0f} us, ratio "
            f"{p50['sharded'] / p50['copied']:.2f} (goal 1.3); one GPU {p50['one']:.0f} us",
            flush=True,
        )
    for size, place in sizes.items() if "M3" in goals else ():
        one = rates["one"][place]
        others = [f"{name} {each[place] / 1e6:.2f} M ({each[place] / one:.2f})" for name, each in rates.items()]
        print(
            f"M3 {where}, {size} samples a request: one GPU {one / 1e6:.2f} M samples/s, {NUM_GPUS} GPUs "
            + ", ".join(others[1:]),
            flush=True,
        )


def p50_of(session: InferenceSession, requests: Sequence[Any]) -> float:
    """Microseconds, one request at a time."""
    times = []
    for request in [*requests] * 6:
        begin = time.perf_counter()
        session.predict(request)
        times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times[len(requests) :])


def most_samples(session: InferenceSession, requests: Sequence[Any]) -> float:
    """Samples a second of one, two or eight threads for each GPU, the highest of them."""
    return max(samples_per_second(session, requests, count * session.num_devices) for count in (1, 2, 8))


def samples_per_second(
    session: InferenceSession, requests: Sequence[Any], num_threads: int, seconds: float = 0.7
) -> float:
    """Samples a second of this many threads."""
    if num_threads == 1:  # this one, which has recorded CUDA graphs
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            count += sum(len(session.predict(request)) for request in requests)
        return count / (time.perf_counter() - begin)
    counts, end = [0] * num_threads, time.perf_counter() + seconds

    def ask(number: int) -> None:
        i = number
        while time.perf_counter() < end:
            counts[number] += len(session.predict(requests[i % len(requests)]))
            i += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(num_threads)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - begin)


def compare_served(versions: dict[str, Path], goals: Sequence[str], protocol: Protocol) -> None:
    """M2 and M3 through Triton: p50 of one client, samples a second of several for each GPU."""
    repository, keys = versions["one"].parents[1], keys_of(versions["one"])
    write_processes(repository, "processes", "one", {})
    fits = settings_of(versions["sharded"])["cache_bytes"]
    write_processes(repository, "processes_sharded", "sharded", {"cache_bytes": fits})
    write_zeros(repository)
    requests = [request_of("hotrow", "native", keys, 1024, np.random.default_rng(seed)) for seed in range(8)]
    p50, rates = {}, {}
    with TritonServer.start(ServerOptions(repository, http_port=0, grpc_port=0, metrics_port=0)) as server:
        url = server.endpoints["gRPC" if protocol == "grpc" else "HTTP"].removeprefix("http://")
        for name in (*versions, "processes", "processes_sharded", "zeros"):
            alone, loaded = (
                measure_load(name, url, requests, num_clients=count, seconds=2.0, protocol=protocol)
                for count in (1, _CLIENTS_PER_GPU * NUM_GPUS)
            )
            p50[name], rates[name] = alone["p50"], (1024 * loaded["requests/s"],)
            print(f"{name}: p50 {p50[name]:.0f} us, {rates[name][0] / 1e6:.2f} M samples/s", flush=True)
    report(goals, f"through Triton, {protocol}", p50, {"1,024": 0}, rates)


def write_processes(repository: Path, name: str, like: str, settings: Mapping[str, str]) -> None:
    """A model once more, with a process on each GPU."""
    shutil.copytree(repository / like, repository / name, copy_function=os.link)
    config = repository / name / "config.pbtxt"
    text = config.read_text(encoding="utf-8")
    config.unlink()  # the link to that of the other model
    begin = text.index("instance_group")
    end, own = text.index("]", begin) + 1, text.index('parameters { key: "device"')
    gpus = ", ".join(map(str, range(NUM_GPUS)))
    groups = f"instance_group [ {{ count: 1 kind: KIND_GPU gpus: [ {gpus} ] }} ]"
    text = text[:begin] + groups + text[end:own]
    config.write_text(text.replace(f'name: "{like}"', f'name: "{name}"'), encoding="utf-8")
    add_settings(config, settings)


def write_zeros(repository: Path) -> None:
    """A Python model that answers zeros, with as many processes as there are GPUs."""
    folder = repository / "zeros" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(f'KIND, LAYOUT = "null", "native"\n{PEER}', encoding="utf-8")
    config = CONFIG.replace("count: 1", f"count: {NUM_GPUS}") + TENSORS["native"]
    (folder.parent / "config.pbtxt").write_text(config, encoding="utf-8")


if __name__ == "__main__":
    main()
