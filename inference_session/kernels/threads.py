"""Work that several threads share, on memory that its caller frees once it is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


def run_parts(run: Callable[[int], Result], num_parts: int, threads: ThreadPoolExecutor) -> list[Result]:
    """The result of each part, by its number. This thread runs parts too: all of them where no other thread is free.

    When it returns or raises, no part is running and none will run: not after the error of a part, nor after Ctrl-C.
    """
    parts = _Parts(run, num_parts)
    try:
        parts.call_helpers(threads)
        parts.run_all()
    finally:
        parts.end()
    return parts.results()


class _Parts(Generic[Result]):
    """Parts that wait, and how many of them run in helping threads.

    The caller's thread may be interrupted between any two instructions. So it never counts itself, and what it waits
    for is looked at again after each interruption.
    """

    def __init__(self, run: Callable[[int], Result], num_parts: int) -> None:
        self._run = run
        self._num_parts = num_parts
        self._waiting = deque(range(num_parts))
        self._num_running = 0
        """In helping threads."""
        self._lock = Lock()
        self._results: dict[int, Any] = {}
        self._errors: list[BaseException] = []
        self._gate = Lock()
        """Opened when the last part has ended that a helping thread runs."""
        self._gate.acquire()

    def call_helpers(self, threads: ThreadPoolExecutor) -> None:
        """Let other threads run parts, as far as there are some."""
        try:
            for _ in range(1, self._num_parts):
                threads.submit(self._help)
        except RuntimeError:  # no thread can be started, or the interpreter ends
            return

    def run_all(self) -> None:
        """Run parts until none is waiting."""
        while (part := self._take(helps=False)) is not None:
            self._results[part] = self._run(part)

    def end(self) -> None:
        """Return once no part runs; none that waits will run. What interrupts it is raised after that."""
        interruption = self._ended()
        while self._waiting or self._num_running:  # in this order: a part that is taken is counted first
            interruption = self._ended() or interruption
        if interruption is not None:
            raise interruption

    def results(self) -> list[Result]:
        """Of all parts; the error of one that failed is raised."""
        if self._errors:
            raise self._errors.pop()
        return [self._results[part] for part in range(self._num_parts)]

    def _ended(self) -> BaseException | None:
        """Wait until no part runs; returns what has interrupted this."""
        try:
            with self._lock:
                self._waiting.clear()
            while self._num_running:
                self._gate.acquire()
        except BaseException as error:  # noqa: BLE001  the caller raises it
            return error
        return None

    def _help(self) -> None:
        while (part := self._take(helps=True)) is not None:
            try:
                self._results[part] = self._run(part)
            except BaseException as error:  # noqa: BLE001  it is the caller's
                self._errors.append(error)
            with self._lock:
                self._num_running -= 1
                if not self._num_running and self._gate.locked():
                    self._gate.release()

    def _take(self, *, helps: bool) -> int | None:
        with self._lock:
            if not self._waiting:
                return None
            self._num_running += helps
            return self._waiting.popleft()
