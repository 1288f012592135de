"""Updates and swaps under load on all GPUs of a host: goal M5.

    python benchmarks/several_gpus_updates.py [--swaps 20] [--rate 20000] [--device cuda:all]

One model over a real Redis and a real broker, with a cache on each GPU. Rows are published at a steady rate while
threads send requests and new versions take over. The rows of a new version include what had been published before it
was made; the later updates come from the stream. A row is `[version, key, number, number, …]`: 0 for the version where
it has been published, and the number of the update. So each answer shows whether all of it, network included, is of one
version, and whether a row is whole. At the end each GPU is asked for every row.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from inference_session import InferenceSession
from inference_session.errors import HotrowError
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
_CATCH_UP_S = 20.0
"""The longest wait for the last updates to be served."""


class Numbers:
    """Publishes rows at a steady rate from its own thread; `newest` is the number of each row's last update."""

    def __init__(self, url: str, num_rows: int, rate: int) -> None:
        self.newest = np.zeros(num_rows, np.int64)
        self.count = 0
        self._rate, self._closing = rate, threading.Event()
        self._publishing = threading.Lock()
        self._publisher = Publisher(url, MODEL, encoding="batch")
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def snapshot(self) -> tuple[NDArray[np.int64], datetime]:
        """The numbers of all rows, and when they were these."""
        with self._publishing:
            return self.newest.copy(), datetime.now(timezone.utc)

    def close(self) -> None:
        """Stop publishing."""
        self._closing.set()
        self._thread.join()
        self._publisher.close()

    def _work(self) -> None:
        rng, due, number = np.random.default_rng(0), time.monotonic(), 0
        while not self._closing.wait(max(0.0, due - time.monotonic())):
            due += _PUBLISH_S
            number += 1
            keys = rng.choice(len(self.newest), int(self._rate * _PUBLISH_S), replace=False)
            with self._publishing:
                self._publisher.publish(TABLE, keys, rows_of(0, keys, np.full(len(keys), number)))
                self._publisher.flush()
                self.newest[keys] = number
                self.count += len(keys)


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
def settings_of(device: str) -> Iterator[dict[str, Any]]:
    """Settings with a real Redis and a real broker."""
    with Broker() as broker, RedisServer() as store:
        yield {
            "device": device,
            "volatile_store": store.url,
            "update_stream": broker.url,
            "cache_fraction": 0.3,
            "warm_up_s": 0.2,
        }


def main() -> None:
    """Publish, ask, swap, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--rate", type=int, default=20_000, help="rows published a second")
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--device", default="cuda:all")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, settings_of(options.device) as settings:
        folder, url = Path(name), settings["update_stream"]
        first = write_version(folder, 1, np.zeros(options.rows, np.int64), None)
        numbers = Numbers(url, options.rows, options.rate)
        served = Served(options.rows, InferenceSession.open(first, **settings))
        begin, before = time.monotonic(), numbers.count
        for version in range(2, options.swaps + 2):
            directory = write_version(folder, version, *numbers.snapshot())
            served.replace(InferenceSession.open(directory, **settings))
            print(
                f"{time.monotonic() - begin:.1f} s: version {version} serves, {served.num_answers} answers", flush=True
            )
        rate = (numbers.count - before) / (time.monotonic() - begin)
        served.end_load()
        numbers.close()
        report(served, options.swaps, rate, numbers.newest)
        served.active.session.close()


def report(served: Served, num_swaps: int, rate: float, newest: NDArray[np.int64]) -> None:
    """The figures of the goal."""
    session = served.active.session
    end = time.monotonic() + _CATCH_UP_S
    while (wrong := num_wrong(session, newest)) and time.monotonic() < end:
        time.sleep(0.1)
    cache = session.stats()["cache"]
    print(
        f"M5 {session.num_devices} devices, {num_swaps} swaps, {rate:.0f} rows/s, {served.num_answers} answers"
        f" (goal 0, 0, 0): {len(served.failures)} failed, {served.num_mixed} mixed, {wrong} of {len(newest)} rows wrong"
        f" at the end; {cache['rows']} of {cache['capacity']} rows cached, {cache['updates']} updated in caches"
        f" {served.failures[:1] or ''}"
    )


if __name__ == "__main__":
    main()
