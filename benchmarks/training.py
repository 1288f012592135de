"""From training to serving: exact exports, fast answers, fresh rows, what publishing costs, and kills.

    python benchmarks/training.py                    all of it; half an hour on two cores
    python benchmarks/training.py T2 T5
    python benchmarks/training.py T8 --device cuda   on a GPU; torch built for CUDA, and CuPy
    python benchmarks/training.py T8 --device cuda --gpus 2

Wants torch, TorchRec, a tritonserver and the tests' packages in one environment:
    pip install torch==2.13.0 && pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0
    pip install -e ".[server,client,torch,torchrec,test]"

T1  differences between served answers and the live model's, and tables that differ; from 1, 2 and 4 ranks
T2  a TorchRec DLRM: its own ONNX export, imported unchanged, against `training.export`; 512 samples, 3 tables
T3  20,000 touched rows a second: from the end of a step to the row being served by a real Triton
T4  steps a second with and without an UpdatePublisher of about 100,000 rows a second, next to broker and server
    on a GPU, 100,000 rows a second, the server on the processor
T5  export of a table of 5 M x 64 float32, beyond the same network's export with a small one, in memory and on disk
T6  the trainer killed 20 times: restored, is anything lost, and what do the servers end with
T7  AUC of the online-learning demo, three seeds
T8  keys a second of one core through a HashEmbedding, against torch's sparse embeddings of known size; on a GPU,
    milliseconds of a step of 1 M keys
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

# Not the benchmarks' folder: torch would import its triton.py as the package `triton`.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from hotrow import training
from inference_session import InferenceSession
from inference_session.importers.onnx import import_onnx
from tests.testing import trainer
from tests.testing import training_jobs as jobs
from tests.testing import training_models as models
from tests.testing.broker import Broker
from tests.testing.model_settings import add_settings

warnings.simplefilter("ignore")


# T1


def _sharded_model(num_tables: int) -> nn.Module:
    from torchrec import EmbeddingBagCollection

    torch.manual_seed(0)
    return models.Clicks(EmbeddingBagCollection(models.bag_configs(num_tables, dim=16, rows=1000, means=())), 64)


def _batch(seed: int, num_samples: int, num_tables: int = 4) -> tuple[Any, dict[str, list[list[int]]]]:
    random = np.random.default_rng(seed)
    lists = {f"f{i}": models.random_lists(random, num_samples, 1000) for i in range(num_tables)}
    return torch.from_numpy(random.random((num_samples, 3)).astype(np.float32)), lists


def _export_rank(rank: int, folder: Path) -> None:
    ways = ["row_wise", "table_wise", "column_wise", "data_parallel"]
    model: Any = jobs.distributed(_sharded_model(4), {"bags": {f"t{i}": way for i, way in enumerate(ways)}})
    for step in range(3):
        dense, lists = _batch(step, 64)
        model(dense, models.features(lists)).sum().backward()
    dense, lists = _batch(99, 64)
    training.export(
        model,
        example=(dense, models.features(lists)),
        inputs=training.padded(max_len=5),
        outputs=["click"],
        repository=folder,
        name="ctr",
    )
    answers = models.live(model, dense, models.features(lists))
    rows = {f"t{i}": jobs.gathered(model, f"bags.embedding_bags.t{i}.weight") for i in range(4)}
    if rank == 0:
        np.savez(folder / "live.npz", click=answers, **rows)


def t1() -> None:
    """Exactness."""
    for num_ranks in (1, 2, 4):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            jobs.run_ranks(_export_rank, folder, num_ranks=num_ranks)
            live = np.load(folder / "live.npz")
            dense, lists = _batch(99, 64)
            sent = {"dense": dense.numpy(), **{f: models.padded_matrix(ids) for f, ids in lists.items()}}
            (found,) = models.answers(folder / "ctr" / "1", sent)
            with InferenceSession.open(folder / "ctr" / "1", device="cpu") as session:
                differing = sum(
                    not np.array_equal(session.lookup(t.name, np.arange(t.num_rows)), live[t.name])
                    for t in session.spec.tables
                )
            worst = float(np.abs(found - live["click"]).max())
            print(
                f"T1  {num_ranks} ranks: answers differ by {worst:.1e} at most (goal 1e-6), tables by bits: {differing}"
            )


# T2


class _Flat(nn.Module):
    """A DLRM that builds its KeyedJaggedTensor itself, as an export by torch.onnx requires."""

    def __init__(self, model: nn.Module, keys: list[str]) -> None:
        super().__init__()
        self.model, self.keys = model, keys

    def forward(self, dense: Any, values: Any, lengths: Any) -> Any:
        from torchrec import KeyedJaggedTensor

        return self.model(dense, KeyedJaggedTensor(keys=self.keys, values=values, lengths=lengths))


def t2() -> None:
    """Answers a second."""
    from torchrec import EmbeddingBagCollection
    from torchrec.models.dlrm import DLRM

    torch.manual_seed(0)
    names, size, length = ["f0", "f1", "f2"], 512, 4
    bags = EmbeddingBagCollection(models.bag_configs(3, dim=16, rows=100_000, means=()))
    model = DLRM(bags, 13, [64, 16], [64, 1]).eval()
    random = np.random.default_rng(0)
    lists = {name: random.integers(0, 100_000, (size, length)).tolist() for name in names}
    dense = torch.from_numpy(random.random((size, 13)).astype(np.float32))
    features = models.features(lists)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = _own_onnx(_Flat(model, names).eval(), (dense, features.values(), features.lengths().long()), folder)
        options: dict[str, Any] = {"example": (dense, features), "inputs": training.padded(max_len=length)}
        directory = models.export(model, folder, **options)
        sent = {
            "dense": dense.numpy(),
            "values": features.values().numpy(),
            "lengths": features.lengths().long().numpy(),
        }
        matrix = {"dense_features": dense.numpy(), **{f: np.array(ids) for f, ids in lists.items()}}
        as_it_is = _median_ms(own, sent)
        cut = _median_ms(directory, matrix)
    ratio = as_it_is / cut
    print(f"T2  {size} samples: own ONNX {as_it_is:.2f} ms, training.export {cut:.3f} ms: {ratio:.0f} x (goal 40)")


def _own_onnx(model: nn.Module, example: tuple[Any, ...], folder: Path) -> Path:
    path = folder / "own.onnx"
    shapes = (None, {0: torch.export.Dim("total")}, None)
    torch.onnx.export(
        model,
        example,
        str(path),
        dynamo=True,
        dynamic_shapes=shapes,
        external_data=False,
        verbose=False,
        input_names=["dense", "values", "lengths"],
        output_names=["click"],
    )
    return import_onnx(path, folder, "own").version_dir


def _median_ms(directory: Path, inputs: dict[str, Any]) -> float:
    with InferenceSession.open(directory, device="cpu") as session:
        times = []
        for _ in range(60):
            begin = time.perf_counter()
            session.run(inputs, ["click"])
            times.append(time.perf_counter() - begin)
    return 1000 * statistics.median(times[10:])


# T3, T4


class _Lookups(nn.Module):
    """One large table and a small network."""

    def __init__(self, rows: int = 1_000_000, dim: int = 16, width: int = 64) -> None:
        super().__init__()
        self.items = nn.Embedding(rows, dim, sparse=True)
        self.layers = nn.Sequential(
            nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, item: Any) -> Any:
        return self.layers(self.items(item).sum(1))


def _steps(model: Any, ids: Any, updates: Any = None) -> Iterator[Any]:
    groups = [{"params": model.items.parameters(), "lr": 0.1}, {"params": model.layers.parameters(), "lr": 1e-5}]
    optimizer = torch.optim.SGD(groups)
    for number in range(10**9):
        torch.sigmoid(model(ids[number % len(ids)])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if updates is not None:
            updates.step()
        yield number


@contextmanager
def _served(model: nn.Module, broker: str) -> Iterator[str]:
    """A Triton that serves the model and follows its updates; yields where gRPC is."""
    from triton_backend.launcher.command import ServerOptions
    from triton_backend.launcher.server import TritonServer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        training.export(
            model, example=torch.zeros(2, 2, dtype=torch.int64), outputs=["score"], repository=folder, name="lookups"
        )
        add_settings(folder / "lookups" / "config.pbtxt", {"update_stream": broker, "device": "cpu"})
        with TritonServer.start(ServerOptions(folder, http_port=0, grpc_port=0, metrics_port=0)) as server:
            yield server.endpoints["gRPC"]


def _ask(client: Any, ids: Any) -> Any:
    import tritonclient.grpc as grpc_client

    tensor = grpc_client.InferInput("item", list(ids.shape), "INT64")
    tensor.set_data_from_numpy(ids.numpy())
    return client.infer("lookups", [tensor]).as_numpy("score")


def t3(rows_a_second: int = 20_000, seconds: float = 20.0) -> None:
    """Delay from a step to its rows being served."""
    torch.set_num_threads(1)  # the broker and the server use the other core; two threads would spin-wait
    import tritonclient.grpc as grpc_client

    model, steps_a_second = _Lookups(), 5
    count = rows_a_second // steps_a_second
    ids = torch.randint(0, 1_000_000, (50, count // 2, 2))
    delays: list[float] = []
    with Broker() as broker, _served(model, broker.url) as url:
        client = grpc_client.InferenceServerClient(url)
        dense = copy.deepcopy(model.layers)
        updates = training.UpdatePublisher(model, broker.url, "lookups")
        steps = _steps(model, ids, updates)
        begin = time.perf_counter()
        for number in range(int(seconds * steps_a_second)):
            next(steps)
            done = time.perf_counter()
            probe = ids[number % len(ids)][-4:]
            expected = _with_dense(model, dense, probe)
            while not np.allclose(_ask(client, probe), expected, atol=1e-5):
                assert time.perf_counter() < done + 60, "a row has not been served within a minute"
                time.sleep(0.001)
            delays.append(1000 * (time.perf_counter() - done))
            time.sleep(max(0.0, begin + (number + 1) / steps_a_second - time.perf_counter()))
        seconds = time.perf_counter() - begin
        updates.close()
    p50, p99 = np.percentile(delays, [50, 99])
    rate = updates.stats.num_rows / seconds
    print(f"T3  {rate:,.0f} rows/s: end of step to served p50 {p50:.0f} ms, p99 {p99:.0f} ms (goals 100, 1000)")


def _with_dense(model: Any, dense: nn.Module, ids: Any) -> Any:
    """The served state: the newest rows, and the dense weights of the version."""
    with torch.no_grad():
        return dense(model.items(ids).sum(1)).numpy()


def t4() -> None:
    """The cost of publishing on the processor; broker and server share its cores."""
    torch.set_num_threads(1)
    _compare_publishing(_Lookups(width=256), "cpu", f"{os.cpu_count()} cores shared", seconds=15.0, goal=0.85)


def t4_on_gpu() -> None:
    """As `t4`, with a network that keeps a GPU busy for some 20 ms a step."""
    _compare_publishing(_Lookups(width=11_008), "cuda", torch.cuda.get_device_name(), seconds=2.0, goal=0.95)


def _compare_publishing(model: Any, device: str, title: str, *, seconds: float, goal: float) -> None:
    """Rounds with and without an UpdatePublisher, in turns. Every row that a step reads is published."""
    plain, publishing, published = [], [], []
    # The server follows the rows; a small network lets a version of it be written within seconds.
    with Broker() as broker, _served(_Lookups(), broker.url):
        model.to(device)
        ids = torch.randint(0, 1_000_000, (50, 1100, 2), device=device)
        _rate(_steps(model, ids), 1.0)  # the first steps take longer
        for _ in range(3):
            plain.append(_rate(_steps(model, ids), seconds))
            with training.UpdatePublisher(model, broker.url, "lookups", every_steps=10) as updates:
                begin = time.perf_counter()
                publishing.append(_rate(_steps(model, ids, updates), seconds))
                published.append(updates.stats.num_rows / (time.perf_counter() - begin))
    alone, beside = statistics.median(plain), statistics.median(publishing)
    print(
        f"T4  {title}: {alone:.0f} steps/s alone, {beside:.0f} publishing "
        f"{statistics.median(published):,.0f} rows/s: {beside / alone:.3f} (goal {goal})"
    )


def _rate(steps: Any, seconds: float) -> float:
    begin, count = time.perf_counter(), 0
    while time.perf_counter() < begin + seconds:
        next(steps)
        count += 1
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return count / (time.perf_counter() - begin)


# T5


def t5(rounds: int = 3) -> None:
    """Speed and memory of writing tables, compared with the limits of file system and checksum alone."""
    for place in ("/dev/shm", tempfile.gettempdir()):  # noqa: S108  the memory of this machine, and its disk
        large, small = _Lookups(5_000_000, 64), _Lookups(1000, 64)
        content = large.items.weight.detach().numpy()
        _export_s(small, place)  # the first import takes long
        found: dict[str, list[float]] = {"beyond": [], "write": [], "hash": [], "processor": []}
        peak = 0
        for _ in range(rounds):
            seconds, processor, peak = _export_s(large, place)
            seconds_small, processor_small, _ = _export_s(small, place)
            found["beyond"].append(seconds - seconds_small)
            found["processor"].append(processor - processor_small)
            found["write"].append(_seconds(partial(_write, content, place)))
            found["hash"].append(_seconds(partial(hashlib.sha256, content.data)))
        rates = {name: (1.28 / min(times), 1.28 / statistics.median(times)) for name, times in found.items()}
        print(
            f"T5  {place}: 1.28 GB beyond the network's own: {_both(rates['beyond'])} GB/s best/median (goal 1); "
            f"by processor time, on two threads, {_both(rates['processor'])}; "
            f"writing alone {_both(rates['write'])}, SHA-256 alone {_both(rates['hash'])}; "
            f"{peak / 2**20:.0f} MiB of memory beyond the model (goal 256)",
            flush=True,
        )


def _both(rates: tuple[float, float]) -> str:
    return " / ".join(f"{rate:.2f}" for rate in rates)


def _export_s(model: nn.Module, place: str) -> tuple[float, float, int]:
    """Wall-clock and processor seconds of an export, and bytes of memory that it took."""
    import psutil

    example = torch.zeros(2, 2, dtype=torch.int64)
    with tempfile.TemporaryDirectory(dir=place) as name, _peak_rss(psutil.Process()) as measured:
        options: dict[str, Any] = {"example": example, "outputs": ["score"], "repository": name, "name": "lookups"}
        processor = time.process_time()
        seconds = _seconds(lambda: training.export(model, **options))
        return seconds, time.process_time() - processor, measured()


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _write(content: Any, place: str) -> None:
    """Write the same number of bytes to a file as NumPy does, and sync them to the disk."""
    with tempfile.NamedTemporaryFile(dir=place) as file:
        content.tofile(file)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _peak_rss(process: Any) -> Iterator[Callable[[], int]]:
    """Anonymous memory above what there was; mapped files are the system's."""

    def anonymous() -> int:
        memory = process.memory_info()
        return int(memory.rss - memory.shared)

    base, highest, stopped = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not stopped.wait(0.02):
            highest[0] = max(highest[0], anonymous() - base)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: highest[0]
    finally:
        stopped.set()
        thread.join()


# T6


def t6(kills: int = 20) -> None:
    """Kills at random moments."""
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name, Broker() as broker:
        folder = Path(name)
        model, _ = trainer.job("SGD")
        directory = models.exported(model, folder, "killed")
        place, lost, reached = str(folder / "checkpoints"), [], 0
        with InferenceSession.open(directory, device="cpu", update_stream=broker.url) as session:
            for _ in range(kills):
                with trainer.trainer(place, broker.url, 10**6) as process:
                    start = int(process.stdout.readline().split()[1])  # type: ignore[union-attr]
                    lost.append(reached - start)
                    reached = start
                    for _ in range(int(random.integers(1, 12))):
                        reached = int(process.stdout.readline().split()[1]) + 1  # type: ignore[union-attr]
                    time.sleep(float(random.random() / 50))
                    process.send_signal(signal.SIGKILL)
            last = reached + 5
            with trainer.trainer(place, broker.url, last) as process:
                assert process.wait(300) == 0
            model.load_state_dict(torch.load(place + ".final", weights_only=True))
            same = _becomes(lambda: models.serves(session, models.table_rows(model)))
    print(
        f"T6  {kills} kills: steps repeated at most {max(lost)} (a checkpoint every 5), servers end "
        f"{'bit-equal' if same else 'OTHERWISE'}"
    )


def _becomes(condition: Callable[[], bool], patience_s: float = 60.0) -> bool:
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return False


# T7


def t7() -> None:
    """The value of freshness."""
    for seed in range(3):
        with tempfile.TemporaryDirectory() as folder:
            arguments = ["-m", "demo.online_learning", "--seed", str(seed), "--plot", f"{folder}/plot.png"]
            done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)
        found = {way: line.split("│")[2].strip() for line in done.stdout.splitlines() for way in _WAYS if way in line}
        print(f"T7  seed {seed}: " + ", ".join(f"{way} {value}" for way, value in found.items()), flush=True)


_WAYS = ("frozen", "reloaded", "streamed")


# T8


def t8(rounds: int = 16, num_keys: int = 1_000_000) -> None:
    """Keys a second of one core: hash embeddings against torch's over a vocabulary, in turns; processor time."""
    torch.set_num_threads(1)
    known = torch.from_numpy((np.arange(num_keys, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64))
    batches = _skewed_batches(rounds, num_keys)
    distinct = statistics.mean(len(torch.unique(numbers)) for numbers in batches)
    print(f"T8  {num_keys:,} rows, batches of 4096 bags of 16 keys, of which {distinct:,.0f} distinct; M keys/s a core")
    for dim in (16, 64, 128):
        options: dict[str, Any] = {"optimizer": training.SGD(0.01), "initializer": nn.init.zeros_}
        bags, single = training.HashEmbeddingBag(dim, mode="sum", **options), training.HashEmbedding(dim, **options)
        for keys in known.split(100_000):
            for table in (bags, single):
                table.put(training.Rows(keys, torch.zeros(len(keys), dim)))
        ways: dict[str, tuple[Any, Any]] = {
            "nn.EmbeddingBag(sparse=True)": (nn.EmbeddingBag(num_keys, dim, mode="sum", sparse=True), lambda ids: ids),
            "nn.Embedding(sparse=True)": (nn.Embedding(num_keys, dim, sparse=True), lambda ids: ids.reshape(-1)),
            "HashEmbeddingBag": (bags, lambda ids: known[ids]),
            "HashEmbedding": (single, lambda ids: known[ids].reshape(-1)),
        }
        for name, times in _in_turns(ways, batches).items():
            rates = [f"{batches[0].numel() / 1e6 / value:5.1f}" for value in times]
            print(
                f"T8  dim {dim:3} {name:29} forward {' / '.join(rates[:2])}, all of a step {' / '.join(rates[2:])}",
                flush=True,
            )


def _in_turns(ways: dict[str, tuple[Any, Any]], batches: list[Any]) -> dict[str, tuple[float, ...]]:
    """Best and median seconds of forward, and of forward, backward and SGD."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    optimizer = torch.optim.SGD([weight for module, _ in ways.values() for weight in module.parameters()], 0.01)
    for number, batch in enumerate([batches[0], *batches]):
        for name, (module, keys_of) in ways.items():
            times = _forward_backward(module, keys_of(batch), optimizer)
            if number:  # the first one warms up
                found[name].append(times)
    columns = {name: list(zip(*times, strict=True)) for name, times in found.items()}
    return {
        name: tuple(value for column in both for value in (min(column), statistics.median(column)))
        for name, both in columns.items()
    }


def _skewed_batches(num_batches: int, num_keys: int) -> list[Any]:
    """int64 [4096, 16] of numbers of keys, Zipf 1.05."""
    random = np.random.default_rng(0)
    weights = np.arange(1, num_keys + 1, dtype=np.float64) ** -1.05
    cumulated = np.cumsum(weights / weights.sum())
    order = random.permutation(num_keys)
    chosen = [np.searchsorted(cumulated, random.random((4096, 16))) for _ in range(num_batches)]
    return [torch.from_numpy(order[np.minimum(ids, num_keys - 1)]) for ids in chosen]


def _forward_backward(module: Any, keys: Any, optimizer: Any) -> tuple[float, float]:
    begin = time.process_time()
    vectors = module(keys)
    forward = time.process_time() - begin
    vectors.backward(torch.ones_like(vectors))
    optimizer.step()
    optimizer.zero_grad()
    return forward, time.process_time() - begin


def t8_on_gpu(num_rows: int = 10_000_000, dim: int = 128, rounds: int = 12) -> None:
    """Milliseconds of a step of 1 M keys, by the clock, in turns; best and median."""
    torch.set_default_device("cuda")
    batches = _skewed_batches_on_gpu(rounds, num_rows)
    distinct = statistics.mean(len(torch.unique(numbers)) for numbers in batches)
    print(
        f"T8  {torch.cuda.get_device_name()}, dim {dim}, {num_rows:,} rows, a step of 65,536 bags of 16 keys, of which "
        f"{distinct:,.0f} distinct: ms, forward / all of it, best and median",
        flush=True,
    )
    for plain, ours in ((torch.optim.SGD, training.SGD), (torch.optim.Adagrad, training.Adagrad)):
        times = _steps_on_gpu(num_rows, dim, batches, plain, ours)
        (_, base), *_ = times.values()
        for name, (forward, whole) in times.items():
            print(
                f"T8  {ours.__name__:7} {name:29} {_ms(forward)} / {_ms(whole)}; median / plain "
                f"{statistics.median(whole) / statistics.median(base):.2f} (goal 2)",
                flush=True,
            )


def _steps_on_gpu(num_rows: int, dim: int, batches: list[Any], plain: Any, ours: Any) -> dict[str, Any]:
    """Seconds of forward and of the whole step, by name."""
    known = torch.arange(num_rows) * -0x61C8864680B583EB  # wraps around: keys of any value
    options: dict[str, Any] = {"optimizer": ours(0.01), "initializer": nn.init.zeros_}
    bags, single = training.HashEmbeddingBag(dim, mode="sum", **options), training.HashEmbedding(dim, **options)
    for keys in known.split(1_000_000):
        for table in (bags, single):
            table.put(training.Rows(keys, torch.zeros(len(keys), dim)))
    vocabulary = nn.EmbeddingBag(num_rows, dim, mode="sum", sparse=True)
    optimizer = plain(vocabulary.parameters(), 0.01)
    ways = {
        "nn.EmbeddingBag(sparse=True)": (vocabulary, batches),
        "HashEmbeddingBag": (bags, [known[batch] for batch in batches]),
        "HashEmbedding": (single, [known[batch].reshape(-1) for batch in batches]),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in [0, 0, *range(len(batches))]:
        for name, (module, keys_of) in ways.items():
            found[name].append(_step_on_gpu(module, keys_of[number], optimizer))
    return {name: list(zip(*times[2:], strict=True)) for name, times in found.items()}


def _step_on_gpu(module: Any, keys: Any, optimizer: Any) -> tuple[float, float]:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    vectors = module(keys)
    torch.cuda.synchronize()
    forward = time.perf_counter() - begin
    gradients = torch.ones_like(vectors)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    vectors.backward(gradients)
    if isinstance(module, nn.EmbeddingBag):
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return forward, forward + time.perf_counter() - begin


def _skewed_batches_on_gpu(num_batches: int, num_keys: int, seed: int = 0) -> list[Any]:
    """int64 [65,536, 16] of numbers of keys, Zipf 1.05, the same keys often for any seed."""
    torch.manual_seed(0)
    cumulated = (torch.arange(1, num_keys + 1, dtype=torch.float64) ** -1.05).cumsum(0)
    order = torch.randperm(num_keys)
    torch.manual_seed(seed)
    drawn = (torch.rand((65_536, 16), dtype=torch.float64) * cumulated[-1] for _ in range(num_batches))
    return [order[torch.searchsorted(cumulated, numbers).clamp(max=num_keys - 1)] for numbers in drawn]


def t8_on_gpus(num_gpus: int) -> None:
    """Keys a second of several GPUs, a step of 1 M keys on each, against one of them."""
    with tempfile.TemporaryDirectory() as name:
        for count in (1, num_gpus):
            jobs.run_ranks(_rank_steps, Path(name) / str(count), num_ranks=count, on_gpus=True)
        alone, together = (
            [float(word) for word in (Path(name) / str(count)).read_text().split()] for count in (1, num_gpus)
        )
    ways = ("one by one", "one behind the other")
    for way, one, several in zip(ways, alone, together, strict=True):
        print(
            f"T8  {num_gpus} GPUs, SGD, dim 128, steps {way}: {num_gpus / several / 1e3:.2f} M keys/ms, one GPU "
            f"{1 / one / 1e3:.2f} ({1000 * several:.2f} and {1000 * one:.2f} ms a step): "
            f"{num_gpus * one / several:.2f} times one"
        )


def _rank_steps(rank: int, result: Path, num_rows: int = 10_000_000, rounds: int = 12) -> None:
    """Write the seconds of a step: the median where the host waits for each, and the mean where it waits at the end."""
    torch.set_default_device("cuda")
    known = torch.arange(num_rows) * -0x61C8864680B583EB
    bags = training.HashEmbeddingBag(128, training.SGD(0.01), nn.init.zeros_, mode="sum")
    for keys in known.split(1_000_000):
        bags.put(training.Rows(keys, torch.zeros(len(keys), 128)))
    batches = [known[batch] for batch in _skewed_batches_on_gpu(rounds, num_rows, seed=rank)]
    times = [_step_on_gpu(bags, keys, None)[1] for keys in [*batches[:3], *batches]]
    begin = time.perf_counter()
    for keys in [*batches, *batches]:
        vectors = bags(keys)
        vectors.backward(torch.ones_like(vectors))
    torch.cuda.synchronize()
    mean = (time.perf_counter() - begin) / (2 * rounds)
    if rank == 0:
        result.write_text(f"{statistics.median(times[3:])} {mean}")


def _ms(seconds: list[float]) -> str:
    return f"{1000 * min(seconds):.2f}, {1000 * statistics.median(seconds):.2f}"


GOALS: dict[str, Callable[[], None]] = {name.__name__.upper(): name for name in (t1, t2, t3, t4, t5, t6, t7, t8)}
GPU_GOALS: dict[str, Callable[[], None]] = {"T4": t4_on_gpu, "T8": t8_on_gpu}


def main() -> None:
    parser = argparse.ArgumentParser(description="From training to serving.")
    parser.add_argument("goals", nargs="*", metavar="GOAL", help="T1 to T8; all of them if none is named")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the models train")
    parser.add_argument("--gpus", type=int, default=1, help="with --device cuda, T8: processes, each with a GPU")
    arguments = parser.parse_args()
    if arguments.gpus > 1:
        t8_on_gpus(arguments.gpus)
        return
    goals = GOALS if arguments.device == "cpu" else GPU_GOALS
    for name in arguments.goals or goals:
        goals[name]()


if __name__ == "__main__":
    main()
