"""Threads that share work on memory are done with it when the work returns or fails."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from inference_session.kernels.cpu import lookup as cpu
from inference_session.kernels.cpu.lookup import NO_POSITIONS, PART_BYTES
from inference_session.kernels.records import TABLE, key_segments, table_record
from inference_session.kernels.threads import run_parts
from tests.testing.servers import PATIENCE_S


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def is_caller() -> bool:
    return threading.current_thread() is threading.main_thread()


def work() -> None:
    """For some time."""
    sum(range(2_000_000))


def test_each_part_has_its_result(threads: ThreadPoolExecutor) -> None:
    """In the order of the parts, in whichever thread each ran."""
    assert run_parts(lambda part: 10 * part, 50, threads) == [10 * part for part in range(50)]


def test_parts_run_at_once(threads: ThreadPoolExecutor) -> None:
    """In the caller's thread and in others."""
    all_run = threading.Barrier(3)

    def run(_part: int) -> bool:
        all_run.wait(PATIENCE_S)
        return is_caller()

    assert sorted(run_parts(run, 3, threads)) == [False, False, True]


class Parts:
    """Three, of which one fails once all are running; the others end some time after that."""

    def __init__(self, error: BaseException, fails: Callable[[], bool]) -> None:
        """`fails`: asked in the thread of each part, whether it is that one."""
        self.num_ended = 0
        self._error, self._fails = error, fails
        self._running, self._failed, self._lock = threading.Barrier(3), threading.Event(), threading.Lock()

    def __call__(self, part: int) -> int:
        self._running.wait(PATIENCE_S)
        with self._lock:
            if not self._failed.is_set() and self._fails():
                self._failed.set()
                raise self._error
        assert self._failed.wait(PATIENCE_S)
        work()
        with self._lock:
            self.num_ended += 1
        return part


@pytest.mark.parametrize("fails", [is_caller, lambda: not is_caller()])
@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt()])
def test_no_part_is_running_after_an_error(
    error: BaseException, fails: Callable[[], bool], threads: ThreadPoolExecutor
) -> None:
    """The caller frees the memory that parts write to."""
    parts = Parts(error, fails)

    with pytest.raises(type(error)):
        run_parts(parts, 3, threads)

    assert parts.num_ended == 2


def test_no_part_that_waits_runs_after_an_error() -> None:
    """A thread that was busy, and looks for work after the caller has freed its memory, finds none."""
    busy, ran = threading.Event(), []

    def run(part: int) -> None:
        ran.append(part)
        raise MemoryError

    with ThreadPoolExecutor(1) as threads:
        threads.submit(busy.wait, PATIENCE_S)
        with pytest.raises(MemoryError):
            run_parts(run, 3, threads)
        busy.set()

    assert ran == [0]


class NoThreads(ThreadPoolExecutor):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        super().submit(fn, *args, **kwargs)
        raise RuntimeError("can't start new thread")  # as when the limit of threads is reached: the work is queued


def test_the_caller_runs_what_no_thread_can() -> None:
    """Each part once."""
    ran: list[int] = []
    with NoThreads(1) as threads:
        run_parts(ran.append, 5, threads)

    assert sorted(ran) == list(range(5))


def test_a_signal_is_raised_after_the_parts(threads: ThreadPoolExecutor) -> None:
    """Ctrl-C while the caller waits for others."""
    all_run, ended = threading.Barrier(2), []

    def run(_part: int) -> None:
        all_run.wait(PATIENCE_S)
        if not is_caller():
            work()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            work()
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_parts(run, 2, threads)

    assert ended == [True]


def test_a_look_up_that_is_interrupted_writes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads of a large look-up are done with its arrays before these are freed."""
    num_keys = 8 * PART_BYTES // 256
    keys, output, vectors = np.zeros(num_keys, np.int64), np.zeros((num_keys, 64), np.float32), np.ones((4, 64), "f4")
    look_up_part, all_run, num_written = cpu._lookup_range, threading.Barrier(2), []

    def interrupted(*arguments: Any) -> int:
        all_run.wait(PATIENCE_S)
        if is_caller():
            raise KeyboardInterrupt
        work()
        look_up_part(*arguments)
        num_written.append(output.all(axis=1).sum())
        return 0

    monkeypatch.setattr(cpu, "_lookup_range", interrupted)
    table = np.array([table_record(vectors, 64)], TABLE)
    with pytest.raises(KeyboardInterrupt):
        cpu.look_up(table, key_segments([keys], [output]), np.zeros(1, np.int64), NO_POSITIONS, 2)

    assert num_written == [num_keys // 2]
