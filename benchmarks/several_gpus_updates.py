"""Updates and swaps under load on all GPUs of a host: goal M5.

    python benchmarks/several_gpus_updates.py [--swaps 20] [--rate 20000] [--device cuda:all] [--seconds 140]
    python benchmarks/several_gpus_updates.py --files   the same without a store: files' rows are divided among the GPUs

One model over a real Redis and a real broker, with a cache on each GPU. A process of its own publishes rows at a steady
rate, while threads send requests and new versions take over. The rows of a new version include what had been published
before it was made; the later updates come from the stream. A row is `[version, key, number, number, …]`: 0 for the
version where it has been published, and the number of the update. So each answer shows whether all of it, network
included, is of one version, and whether a row is whole. At the end each GPU is asked for every row.

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
from collections.abc import Iterator
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from inference_session import InferenceSession
from inference_session.errors import HotrowError, UnavailableError
from inference_session.model_spec import DENSE_FILE, TABLES_FOLDER, LookupSpec, ModelSpec, TableSpec, TensorSpec
from inference_session.tables.table_file import write_table
from inference_session.update_stream import Publisher
from inference_session.version_directory import manifest
from inference_session.versions.model_version import ModelVersion

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.testing.broker import Broker
from tests.testing.servers import RedisServer

MODEL, TABLE = "m5", "item"
DIM, FEATURES, SAMPLES, NUM_THREADS = 16, 8, 64, 4
_PUBLISH_S = 0.05
_CONFIRM_S = 20.0
"""The longest wait for the broker before rows are published again."""
_CATCH_UP_S = 20.0
"""The longest wait for the last updates to be served."""


class Snapshot(NamedTuple):
    """What has been published and confirmed."""

    numbers: NDArray[np.int64]
    """Of each row's last update."""
    at: datetime
    count: int
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
        """What has been published so far."""
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
    """What these rows hold after these updates."""
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
    spec.write(directory)
    manifest.write_manifest(directory)
    return directory


def _network(version: int) -> onnx.ModelProto:
    def tensor(name: str, width: int) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width])

    constants = [
        numpy_helper.from_array(np.zeros((FEATURES * DIM, 1), np.float32), "zeros"),
        numpy_helper.from_array(np.full(1, version, np.float32), "number"),
    ]
    nodes = [
        helper.make_node("Identity", ["vectors"], ["rows"]),
        helper.make_node("Gemm", ["vectors", "zeros", "number"], ["version"]),
    ]
    inputs, outputs = [tensor("vectors", FEATURES * DIM)], [tensor("rows", FEATURES * DIM), tensor("version", 1)]
    graph = helper.make_graph(nodes, "dense", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


class Served:
    """The version that serves, the load on it, and what its answers were."""

    def __init__(self, num_rows: int, first: InferenceSession) -> None:
        self.active = ModelVersion(first)
        self.num_answers, self.num_mixed = 0, 0
        self.failures: list[str] = []
        self._num_rows = num_rows
        self._closing, self._counting = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(seed,)) for seed in range(NUM_THREADS)]
        for thread in self._threads:
            thread.start()

    def lease(self) -> ModelVersion:
        """The version that serves, to be used by `with`."""
        while not (version := self.active).take_lease():
            pass
        return version

    def replace(self, session: InferenceSession) -> None:
        """Let another version serve; the old one ends when its requests have ended."""
        old, self.active = self.active, ModelVersion(session)
        old.retire()
        old.drain()
        old.session.close()

    def end_load(self) -> None:
        """Stop asking."""
        self._closing.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not self._closing.is_set():
            keys = rng.zipf(1.1, (SAMPLES, FEATURES)) % self._num_rows
            try:
                with self.lease() as session:
                    answer = session.run({"keys": keys}, ["rows", "version"])
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


def num_wrong(session: InferenceSession, newest: NDArray[np.int64]) -> int:
    """Rows that any GPU answers otherwise than last published."""
    keys, wrong = np.arange(len(newest)), np.zeros(len(newest), np.bool_)
    for _ in range(session.num_devices):  # `lookup` takes the GPUs in turn
        rows = session.lookup(TABLE, keys)
        wrong |= (rows[:, 1] != keys) | (rows[:, 2:] != newest[:, None]).any(axis=1)
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
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, settings_of(options.device, files=options.files) as settings:
        folder = Path(name)
        directory = write_version(folder, 1, np.zeros(options.rows, np.int64), None)
        # Kernels are compiled before the trainer begins.
        served = Served(options.rows, InferenceSession.open(directory, **settings))
        trainer = Trainer(settings["update_stream"], options.rows, options.rate)
        before = trainer.snapshot()
        begin = time.monotonic()
        num_swaps = swap(folder, settings, served, trainer, options)
        seconds, last = time.monotonic() - begin, trainer.close()
        served.end_load()
        report(served, num_swaps, (last.count - before.count) / seconds, last)
        served.active.session.close()


def swap(folder: Path, settings: dict[str, Any], served: Served, trainer: Trainer, options: argparse.Namespace) -> int:
    """Let one version after the other take over, spread over the time; returns how many did."""
    begin = time.monotonic()
    for number in range(options.swaps):
        time.sleep(max(0.0, begin + number * options.seconds / options.swaps - time.monotonic()))
        if time.monotonic() - begin > options.seconds:
            return number
        started, snapshot = time.monotonic(), trainer.snapshot()
        directory = write_version(folder, number + 2, snapshot.numbers, snapshot.at)
        written = time.monotonic()
        session = InferenceSession.open(directory, **settings)
        opened = time.monotonic()
        lag = session.stats()["updates"]["lag_messages"]
        served.replace(session)
        print(
            f"{time.monotonic() - begin:.1f} s: version {number + 2} serves; written in {written - started:.1f} s,"
            f" opened in {opened - written:.1f} s with {lag} messages to come, the old one closed in"
            f" {time.monotonic() - opened:.1f} s; {snapshot.count} rows published, {served.num_answers} answers",
            flush=True,
        )
    return options.swaps


def report(served: Served, num_swaps: int, rate: float, last: Snapshot) -> None:
    """The figures of the goal."""
    session = served.active.session
    begin = time.monotonic()
    while (wrong := num_wrong(session, last.numbers)) and time.monotonic() < begin + _CATCH_UP_S:
        time.sleep(0.1)
    stats = session.stats()
    cache = stats["cache"]
    held = f"{stats.get('updated', {}).get(TABLE, {}).get('rows')} changed rows on each GPU"
    if cache:
        held = f"{cache['rows']} of {cache['capacity']} rows cached, {cache['updates']} updated in caches"
    print(
        f"M5 {session.num_devices} devices, {num_swaps} swaps, {rate:.0f} rows/s, {served.num_answers} answers"
        f" (goal 0, 0, 0): {len(served.failures)} failed, {served.num_mixed} mixed, {wrong} of {len(last.numbers)} rows"
        f" wrong {time.monotonic() - begin:.1f} s after the last update; {held}; rows published again"
        f" {last.num_repeated} times"
        f" {served.failures[:1] or ''}",
        flush=True,
    )


if __name__ == "__main__":
    main()
