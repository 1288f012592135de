"""MLPerf's LoadGen as the driver of a run; without it, a loop of our own for the Offline scenario."""

from __future__ import annotations

import queue
import re
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mlperf_samples import Samples
from numpy.typing import NDArray

try:
    import mlperf_loadgen as loadgen
except ImportError:
    loadgen = None

HAS_LOADGEN = loadgen is not None
SERVER_P99_MS = 60
_EXPECTED_MARGIN = 1.1
_NUM_WORKERS = 2

Run = Callable[[list[int]], NDArray[np.float32]]
"""Answers samples: their numbers → the answers of all their pairs, concatenated."""


class Result(NamedTuple):
    """The figures of one run."""

    samples_per_s: float
    p99_ms: float
    """Server: from the moment a sample is issued to its answer. Offline: of a batch."""
    violated: str
    """LoadGen's rules that the run broke, according to LoadGen; empty: none."""


def offline_loop(run: Run, samples: Samples, batch_pairs: int, seconds: float) -> Result:
    """Run all samples in batches, repeatedly, for this long."""
    batches = samples.batches(np.arange(len(samples)), batch_pairs)
    times: list[float] = []
    num_samples = 0
    begin = time.perf_counter()
    while not times or time.perf_counter() - begin < seconds:
        batch = batches[len(times) % len(batches)]
        started = time.perf_counter()
        run(batch.tolist())
        times.append(time.perf_counter() - started)
        num_samples += len(batch)
    return Result(num_samples / (time.perf_counter() - begin), 1e3 * float(np.quantile(times, 0.99)), "")


def measure(run: Run, samples: Samples, *, batch_pairs: int, seconds: float, server_qps: float | None) -> Result:
    """One run of LoadGen: Offline, or with `server_qps` Server at that many samples a second."""
    if server_qps is None:
        expected = offline_loop(run, samples, batch_pairs, min(1.0, seconds)).samples_per_s
    else:
        expected = server_qps
    tested = _SystemUnderTest(run, samples, batch_pairs)
    with tempfile.TemporaryDirectory() as folder:
        tested.start(_settings(seconds, expected, is_server=server_qps is not None), Path(folder))
        summary = (Path(folder) / "mlperf_log_summary.txt").read_text(encoding="utf-8")
    return _result(summary, tested.batch_times, is_server=server_qps is not None)


class _IssuedSamples(NamedTuple):
    """Samples that LoadGen has issued: what it calls each of them, and their numbers."""

    responses: list[int]
    indices: list[int]


class _SystemUnderTest:
    """Takes samples as LoadGen issues them; threads answer them in batches of what is waiting.

    Two threads: one gathers the samples of a batch while another waits for the answers of the batch before.
    """

    def __init__(self, run: Run, samples: Samples, batch_pairs: int) -> None:
        self._run, self._samples, self._batch_pairs = run, samples, batch_pairs
        self._waiting: queue.SimpleQueue[_IssuedSamples | None] = queue.SimpleQueue()
        self._free = threading.Semaphore(_NUM_WORKERS)
        self._failure: BaseException | None = None
        self.batch_times: list[float] = []

    def start(self, settings: Any, folder: Path) -> None:
        """Run LoadGen to its end; raises the error of a failed batch."""
        logs = loadgen.LogSettings()
        logs.log_output.outdir = str(folder)
        logs.log_output.copy_summary_to_stdout = False
        taker = threading.Thread(target=self._take_all)
        taker.start()
        tested = loadgen.ConstructFastSUT(self._issue, _nothing)
        library = loadgen.ConstructQSL(len(self._samples), len(self._samples), _nothing, _nothing)
        try:
            loadgen.StartTestWithLogSettings(tested, library, settings, logs)
        finally:
            loadgen.DestroyQSL(library)
            loadgen.DestroyFastSUT(tested)
            self._waiting.put(None)
            taker.join()
        if self._failure is not None:
            raise self._failure

    def _issue(self, responses: list[int], indices: list[int]) -> None:
        self._waiting.put(_IssuedSamples(responses, indices))

    def _take_all(self) -> None:
        with ThreadPoolExecutor(_NUM_WORKERS) as workers:
            while (issued := self._waiting.get()) is not None:
                self._free.acquire()
                self._add_waiting(issued)
                self._free.release()
                responses, begin = np.array(issued.responses, np.uint64), 0
                for batch in self._samples.batches(np.array(issued.indices), self._batch_pairs):
                    self._free.acquire()
                    workers.submit(self._answer, responses[begin : begin + len(batch)], batch)
                    begin += len(batch)

    def _add_waiting(self, taken: _IssuedSamples) -> None:
        """Add samples issued meanwhile that fit into the same batch."""
        most = self._batch_pairs / self._samples.counts.mean()
        while not self._waiting.empty() and len(taken.indices) < most:
            issued = self._waiting.get()
            if issued is None:
                self._waiting.put(None)
                break
            taken.responses.extend(issued.responses)
            taken.indices.extend(issued.indices)

    def _answer(self, responses: NDArray[np.uint64], batch: NDArray[np.int64]) -> None:
        started = time.perf_counter()
        try:
            answers = self._run(batch.tolist()) if self._failure is None else None
        except Exception as error:  # noqa: BLE001  LoadGen waits for an answer to each sample, whatever happens
            self._failure, answers = error, None
        self.batch_times.append(time.perf_counter() - started)
        self._free.release()
        _complete(responses, self._samples.counts[batch], answers)


def _complete(responses: NDArray[np.uint64], counts: NDArray[np.int64], answers: NDArray[np.float32] | None) -> None:
    """Give LoadGen the answers of these samples, of `counts` pairs each; without answers, empty ones."""
    sizes = counts * (0 if answers is None else answers.itemsize)
    begins = np.cumsum(sizes) - sizes + (0 if answers is None else answers.ctypes.data)
    parts = map(np.ndarray.tolist, (responses, begins, sizes))
    # One call of the constructor per sample is most of what a batch costs the driver.
    loadgen.QuerySamplesComplete([*map(loadgen.QuerySampleResponse, *parts)])


def _settings(seconds: float, expected: float, *, is_server: bool) -> Any:
    settings = loadgen.TestSettings()
    settings.mode = loadgen.TestMode.PerformanceOnly
    settings.min_duration_ms = int(1000 * seconds)
    settings.min_query_count = 1
    if is_server:
        settings.scenario = loadgen.TestScenario.Server
        settings.server_target_qps = expected
        settings.server_target_latency_ns = SERVER_P99_MS * 1_000_000
        settings.server_target_latency_percentile = 0.99
    else:
        settings.scenario = loadgen.TestScenario.Offline
        settings.offline_expected_qps = _EXPECTED_MARGIN * expected
    return settings


def _result(summary: str, batch_times: list[float], *, is_server: bool) -> Result:
    """The figures in LoadGen's own summary."""
    rate = "Completed samples per second" if is_server else "Samples per second"
    p99_ms = _number(summary, r"99\.00 percentile latency \(ns\)") / 1e6
    if not is_server:
        p99_ms = 1e3 * float(np.quantile(batch_times, 0.99))
    broken = re.findall(r"^\s*(.+?) satisfied\s*:\s*NO", summary, re.MULTILINE)
    return Result(_number(summary, rate), p99_ms, ", ".join(broken).lower())


def _number(summary: str, name: str) -> float:
    found = re.search(rf"^\s*{name}\s*:\s*([0-9.eE+-]+)", summary, re.MULTILINE)
    if found is None:
        raise ValueError(f"LoadGen's summary has no {name!r}:\n{summary}")
    return float(found[1])


def _nothing(*_: Any) -> None:
    """All samples are always in memory, and nothing is buffered for a flush."""
