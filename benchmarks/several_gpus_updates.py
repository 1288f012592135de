"""Updates and swaps under load on all GPUs of a host: goal M5.

    python benchmarks/several_gpus_updates.py [--swaps 20] [--rate 20000] [--device cuda:all] [--seconds 140]
    python benchmarks/several_gpus_updates.py --files   the same without a store: files' rows are divided among the GPUs
    python benchmarks/several_gpus_updates.py --files --triton   the same, served by a real Triton

One model over a real Redis and a real broker, with a cache on each GPU. A process of its own publishes rows at a steady
rate, while threads send requests and new versions take over. The rows of a new version include what had been published
before it was made; the later updates come from the stream. A row is `[version, key, number, number, …]`: 0 for the
version where it has been published, and the number of the update. So each answer shows whether all of it, network
included, is of one version, and whether a row is whole. At the end each GPU is asked for every row; of a Triton, eight
clients at once ask for all rows eight times, so that batches go to all GPUs.

The swaps are spread over `--seconds`. If that is too short, fewer take place, and the last line says how many.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import onnx
import tritonclient.grpc
from networks import network_of
from numpy.typing import NDArray
from serving import add_settings, serve, tensors
from tritonclient.utils import InferenceServerException

from hotrow.metrics.page import MetricsPage
from inference_session import InferenceSession
from inference_session.errors import HotrowError, UnavailableError
from inference_session.model_spec import DENSE_FILE, TABLES_FOLDER, LookupSpec, ModelSpec, TableSpec, TensorSpec
from inference_session.tables.table_file import write_table
from inference_session.update_stream import Publisher
from inference_session.version_directory import manifest
from inference_session.version_directory.session_file import read_spec
from inference_session.versions.model_version import ModelVersion
from triton_backend.repository.config_writer import write_model_config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.testing.broker import Broker
from tests.testing.servers import RedisServer

MODEL, TABLE = "m5", "item"
DIM, FEATURES, SAMPLES, NUM_THREADS = 16, 8, 64, 4
_MOST_SAMPLES = 1024
"""Samples of a request to Triton, at most."""
_PUBLISH_S = 0.05
_CONFIRM_S = 20.0
"""The longest wait for the broker before rows are published again."""
_CATCH_UP_S = 20.0
"""The longest wait for the last updates to be served."""


class Snapshot(NamedTuple):
    """Rows that were published and confirmed."""

    numbers: NDArray[np.int64]
    """The number of each row's last update."""
    at: datetime
    num_rows: int
    """Rows so far."""
    num_repeated: int
    """Times that rows were published again, because the broker had not confirmed them in time."""


class Trainer:
    """Publishes rows at a steady rate, in a process of its own: it must not take the interpreter from requests."""

    def __init__(self, url: str, num_rows: int, rate: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_publish, args=(other, url, num_rows, rate), daemon=True)
        self._process.start()
        other.close()

    def snapshot(self) -> Snapshot:
        """Rows that were published so far."""
        return self._ask("snapshot")

    def close(self) -> Snapshot:
        """Stop publishing; what has been published in all."""
        last = self._ask("close")
        self._process.join()
        return last

    def _ask(self, what: str) -> Snapshot:
        self._pipe.send(what)
        return cast("Snapshot", self._pipe.recv())


def _publish(pipe: Connection, url: str, num_rows: int, rate: int) -> None:
    """The trainer's process. No more than one batch of rows waits for the broker."""
    numbers, count, num_repeated = np.zeros(num_rows, np.int64), 0, 0
    rng, due, number = np.random.default_rng(0), time.monotonic(), 0
    num_keys = max(int(rate * _PUBLISH_S), 1)
    publisher = Publisher(url, MODEL, encoding="batch", timeout_s=_CONFIRM_S)
    while True:
        if pipe.poll(max(0.0, due - time.monotonic())):
            what = pipe.recv()
            pipe.send(Snapshot(numbers, datetime.now(timezone.utc), count, num_repeated))
            if what == "close":
                return
            continue
        due += _PUBLISH_S
        number += 1
        keys = rng.choice(num_rows, num_keys, replace=False)
        while not _is_confirmed(publisher, keys, rows_of(0, keys, np.full(num_keys, number))):
            num_repeated += 1
        numbers[keys] = number
        count += num_keys


def _is_confirmed(publisher: Publisher, keys: NDArray[np.int64], rows: NDArray[np.float32]) -> bool:
    """Publish rows; returns whether the broker has confirmed them in time."""
    try:
        publisher.publish(TABLE, keys, rows)
        publisher.flush()
    except UnavailableError as error:
        print(f"the trainer publishes {len(keys)} rows again: {error}", flush=True)
        return False
    return True


def rows_of(version: int, keys: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.float32]:
    """The vectors of these rows after these updates."""
    rows = np.repeat(numbers[:, None], DIM, axis=1).astype(np.float32)
    rows[:, 0], rows[:, 1] = version, keys
    return rows


def write_version(folder: Path, version: int, numbers: NDArray[np.int64], since: datetime | None) -> Path:
    """A version whose rows have learned of all updates before `since`."""
    directory, keys = folder / MODEL / str(version), np.arange(len(numbers))
    spec = ModelSpec(
        inputs=(TensorSpec("keys", "int64", (-1, FEATURES)),),
        outputs=(TensorSpec("rows", "float32", (-1, FEATURES * DIM)), TensorSpec("version", "float32", (-1, 1))),
        tables=(TableSpec(TABLE, TABLE, len(keys), DIM, keys="stored"),),
        lookups=(LookupSpec(TABLE, "keys", "vectors", joined=True),),
        labels=("version",),
        label_outputs=("version",),
        settings={} if since is None else {"update_since": since.isoformat()},
    )
    write_table(directory / TABLES_FOLDER / TABLE, [rows_of(version, keys, numbers)], keys=[keys])
    onnx.save(_network(version), directory / DENSE_FILE)
    manifest.describe_version(spec, directory)
    return directory


def _network(version: int) -> onnx.ModelProto:
    width = FEATURES * DIM
    constants = {"zeros": np.zeros((width, 1), np.float32), "number": np.full(1, version, np.float32)}
    return network_of(
        f"dense (float[n, {width}] vectors) => (float[n, {width}] rows, float[n, 1] version) "
        "{ rows = Identity(vectors) version = Gemm(vectors, zeros, number) }",
        constants,
    )


class Sessions:
    """The version that serves in this process."""

    where = "in process"

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._active = ModelVersion(InferenceSession.open(directory, **settings))

    def answer(self, keys: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        """`rows` and `version` of a request."""
        while not (version := self._active).take_lease():
            pass
        with version as session:
            return session.run({"keys": keys}, ["rows", "version"])

    def replace(self, directory: Path) -> str:
        """Let another version serve; the old one ends when its requests have ended. Returns what there is to say."""
        session = InferenceSession.open(directory, **self._settings)
        lag = session.stats()["updates"]["lag_messages"]
        old, self._active = self._active, ModelVersion(session)
        old.retire()
        old.drain()
        old.session.close()
        return f"{lag} messages were to come when it was open"

    def rows_of_each_gpu(self, num_rows: int) -> Iterator[NDArray[np.float32]]:
        """All rows, by every GPU."""
        session = self._active.session
        for _ in range(session.num_devices):  # `lookup` takes the GPUs in turn
            yield session.lookup(TABLE, np.arange(num_rows))

    def describe(self) -> str:
        """The GPUs, and what they hold."""
        session = self._active.session
        stats = session.stats()
        held = f"{stats.get('updated', {}).get(TABLE, {}).get('rows')} changed rows on each"
        if cache := stats["cache"]:
            held = f"{cache['rows']} of {cache['capacity']} rows cached, {cache['updates']} updated in caches"
        return f"{session.num_devices} devices, {held}"

    def close(self) -> None:
        """Free all."""
        self._active.session.close()


class Triton:
    """A real Triton that serves the newest version."""

    where = "through Triton"

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        path = write_model_config(directory, read_spec(directory), MODEL)
        add_settings(path, settings)
        self._server = serve(directory.parents[1])
        self._of_thread = threading.local()

    @property
    def _client(self) -> Any:
        """Each thread's own: a client is not made for several."""
        if not hasattr(self._of_thread, "client"):
            self._of_thread.client = tritonclient.grpc.InferenceServerClient(self._server.endpoints["gRPC"])
        return self._of_thread.client

    def answer(self, keys: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        """`rows` and `version` of a request."""
        outputs = [tritonclient.grpc.InferRequestedOutput(name) for name in ("rows", "version")]
        try:
            result = self._client.infer(MODEL, tensors(tritonclient.grpc, {"keys": keys}), outputs=outputs)
        except InferenceServerException as error:
            raise UnavailableError(str(error)) from error
        return {name: result.as_numpy(name) for name in ("rows", "version")}

    def replace(self, directory: Path) -> str:
        """Let another version serve, by Triton's Load API. Returns what there is to say."""
        self._client.load_model(MODEL)
        return f"loaded by Triton as version {directory.name}"

    def rows_of_each_gpu(self, num_rows: int) -> Iterator[NDArray[np.float32]]:
        """All rows, several times."""
        keys = np.resize(np.arange(num_rows), (-(-num_rows // FEATURES), FEATURES))
        parts = np.split(keys, range(_MOST_SAMPLES, len(keys), _MOST_SAMPLES))
        with ThreadPoolExecutor(8) as pool:
            for _ in range(8):
                answers = [answer["rows"] for answer in pool.map(self.answer, parts)]
                yield np.concatenate(answers).reshape(-1, DIM)[:num_rows]

    def describe(self) -> str:
        """The updates that the newest version has taken from the stream."""
        counts = MetricsPage.fetch(self._server.endpoints["metrics"]).values("hotrow_update_rows_total")
        version, num_rows = max((int(labels["version"]), value) for labels, value in counts)
        return f"{num_rows:.0f} updated rows counted by version {version}"

    def close(self) -> None:
        """End the server."""
        self._server.stop()


class Load:
    """Threads that ask, and what the answers were."""

    def __init__(self, server: Sessions | Triton, num_rows: int) -> None:
        self.num_answers, self.num_mixed = 0, 0
        self.failures: list[str] = []
        self._server, self._num_rows = server, num_rows
        self._closing, self._counting = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(seed,)) for seed in range(NUM_THREADS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop asking."""
        self._closing.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not self._closing.is_set():
            keys = rng.zipf(1.1, (SAMPLES, FEATURES)) % self._num_rows
            try:
                answer = self._server.answer(keys)
            except HotrowError as error:
                with self._counting:
                    self.failures.append(str(error))
                continue
            with self._counting:
                self.num_answers += 1
                self.num_mixed += not is_whole(keys, answer)


def is_whole(keys: NDArray[np.int64], answer: Any) -> bool:
    """Whether all of an answer is of one version, and each row is one update of the key that was asked for."""
    rows, versions = answer["rows"].reshape(-1, DIM), answer["version"]
    own = (rows[:, 0] == versions[0, 0]) | ((rows[:, 0] == 0) & (rows[:, 2] > 0))
    return bool(
        own.all()
        and (versions == versions[0, 0]).all()
        and (rows[:, 1] == keys.reshape(-1)).all()
        and (rows[:, 2:] == rows[:, 2:3]).all()
    )


def num_wrong(server: Sessions | Triton, newest: NDArray[np.int64]) -> int:
    """Rows that any GPU answers otherwise than last published."""
    wrong = np.zeros(len(newest), np.bool_)
    for rows in server.rows_of_each_gpu(len(newest)):
        wrong |= (rows[:, 1] != np.arange(len(newest))) | (rows[:, 2:] != newest[:, None]).any(axis=1)
    return int(wrong.sum())


@contextlib.contextmanager
def settings_of(device: str, *, files: bool) -> Iterator[dict[str, Any]]:
    """Settings with a real broker, and a real Redis unless rows come from files."""
    with Broker() as broker:
        settings = {"device": device, "update_stream": broker.url, "warm_up_s": 0.2}
        if files:
            yield {**settings, "shard": "none" if device == "cpu" else "rows"}
        else:
            with RedisServer() as store:
                yield {**settings, "volatile_store": store.url, "cache_fraction": 0.3}


def main() -> None:
    """Publish, ask, swap, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--rate", type=int, default=20_000, help="rows published a second")
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--seconds", type=float, default=140.0, help="of swaps; the rest takes up to half a minute")
    parser.add_argument("--device", default="cuda:all")
    parser.add_argument("--files", action="store_true", help="without a store")
    parser.add_argument("--triton", action="store_true", help="served by a real Triton")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = stack.enter_context(settings_of(options.device, files=options.files))
        directory = write_version(folder, 1, np.zeros(options.rows, np.int64), None)
        # Kernels are compiled before the trainer begins.
        server = (Triton if options.triton else Sessions)(directory, settings)
        stack.callback(server.close)
        load, trainer = Load(server, options.rows), Trainer(settings["update_stream"], options.rows, options.rate)
        before = trainer.snapshot()
        begin = time.monotonic()
        num_swaps = swap(folder, server, load, trainer, options)
        seconds, last = time.monotonic() - begin, trainer.close()
        load.stop()
        report(server, load, num_swaps, (last.num_rows - before.num_rows) / seconds, last)


def swap(folder: Path, server: Sessions | Triton, load: Load, trainer: Trainer, options: argparse.Namespace) -> int:
    """Let one version after the other take over, spread over the time; returns how many did."""
    begin = time.monotonic()
    for number in range(options.swaps):
        time.sleep(max(0.0, begin + number * options.seconds / options.swaps - time.monotonic()))
        if time.monotonic() - begin > options.seconds:
            return number
        started, snapshot = time.monotonic(), trainer.snapshot()
        directory = write_version(folder, number + 2, snapshot.numbers, snapshot.at)
        written = time.monotonic()
        said = server.replace(directory)
        print(
            f"{time.monotonic() - begin:.1f} s: version {number + 2} serves; written in {written - started:.1f} s,"
            f" taken over in {time.monotonic() - written:.1f} s; {said}; {snapshot.num_rows} rows published,"
            f" {load.num_answers} answers",
            flush=True,
        )
    return int(options.swaps)


def report(server: Sessions | Triton, load: Load, num_swaps: int, rate: float, last: Snapshot) -> None:
    """The figures of the goal."""
    begin = time.monotonic()
    while (wrong := num_wrong(server, last.numbers)) and time.monotonic() < begin + _CATCH_UP_S:
        time.sleep(0.1)
    print(
        f"M5 {server.where}, {num_swaps} swaps, {rate:.0f} rows/s, {load.num_answers} answers (goal 0, 0, 0): "
        f"{len(load.failures)} failed, {load.num_mixed} mixed, {wrong} of {len(last.numbers)} rows wrong "
        f"{time.monotonic() - begin:.1f} s after the last update; {server.describe()}; rows published again "
        f"{last.num_repeated} times {load.failures[:1] or ''}",
        flush=True,
    )


if __name__ == "__main__":
    main()
