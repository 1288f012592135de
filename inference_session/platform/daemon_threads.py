"""Threads for calls that may wait long for others, such as a server that has stopped answering."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class DaemonThreads(Executor):
    """A number of threads. A context manager, which waits for the calls under way, unless an interrupt such as Ctrl-C
    ends it: neither it nor the end of the process waits for them then, as they do for ThreadPoolExecutor's.
    """

    def __init__(self, num_threads: int, initializer: Callable[[], object] | None = None) -> None:
        """Start the threads; each calls the initializer first."""
        self._initializer = initializer
        self._waiting: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name="hotrow-call", daemon=True) for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, call: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        future: Future[Result] = Future()
        self._waiting.put((future, partial(call, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See Executor. May be called more than once."""
        with suppress(Empty):
            while cancel_futures:
                if (item := self._waiting.get_nowait()) is not None:
                    item[0].cancel()
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_interrupted = kind is not None and not issubclass(kind, Exception)
        self.shutdown(wait=not is_interrupted, cancel_futures=is_interrupted)

    def _work(self) -> None:
        if self._initializer is not None:
            self._initializer()
        while (item := self._waiting.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001  it is the caller's
                    future.set_exception(error)
            del item, future, call  # so that what they refer to can be freed while the thread waits
