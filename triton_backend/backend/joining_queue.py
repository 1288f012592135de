"""Joins the requests of models that Triton's dynamic batcher cannot join: those with `max_batch_size: 0`.

`execute` gets such requests one at a time. It queues them here and returns at once; a thread takes all that wait
and answers them together, through their response senders. A model on several GPUs has a thread for each of them, and
all its requests come here, even those that Triton could join. The queue is bounded: while it is full, `execute` waits,
and further requests wait in Triton's own queue, where the model's queue policy applies.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence

import triton_python_backend_utils as pb_utils

from triton_backend.backend.request_handler import TritonRequest, TritonResponse

_REFUSED = "the request could not be answered, probably because the server lacks memory; its log says more"
MAX_WAITING = 256
"""Maximum number of requests that wait to be joined."""


class JoiningQueue:
    """A bounded queue and the threads that answer what waits in it.

    Args:
        answer: gives one response for each request, in order. It handles errors itself; it may still raise where
            memory is short.
        num_samples: how much of `max_samples` a request takes up.
        max_samples: samples that are joined, at most; a single request may have more.
        num_threads: how many times requests are joined and answered at once.
    """

    def __init__(
        self,
        answer: Callable[[Sequence[TritonRequest]], Sequence[TritonResponse]],
        num_samples: Callable[[TritonRequest], int],
        *,
        max_samples: int,
        name: str,
        num_threads: int,
    ) -> None:
        self._answer = answer
        self._num_samples = num_samples
        self._max_samples = max_samples
        self._waiting: deque[tuple[TritonRequest, int]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        # Made now: there may be no memory for it when it is needed.
        error = pb_utils.TritonError(_REFUSED, pb_utils.TritonError.UNAVAILABLE)
        self._refusal = pb_utils.InferenceResponse(error=error)
        self._threads = [
            threading.Thread(target=self._work, name=f"hotrow-join-{name}", daemon=True) for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, requests: Sequence[TritonRequest]) -> None:
        """Queue requests; each will be answered. Blocks while the queue is full."""
        for request in requests:
            size = self._num_samples(request)
            with self._changed:
                self._changed.wait_for(lambda: len(self._waiting) < MAX_WAITING)
                self._waiting.append((request, size))
                self._changed.notify_all()

    def close(self) -> None:
        """Answer what waits, then end the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while requests := self._take():
            for request, response in zip(requests, self._responses(requests), strict=True):
                if not _send(request, response):
                    _send(request, self._refusal)

    def _responses(self, requests: Sequence[TritonRequest]) -> Sequence[TritonResponse]:
        """The responses to requests; any error becomes a response, because the thread must go on to serve others."""
        try:
            return self._answer(requests)
        except Exception as error:  # noqa: BLE001  for example a MemoryError while another error was handled
            _log(f"{len(requests)} requests could not be answered: {error!r}")
            return [self._refusal] * len(requests)

    def _take(self) -> list[TritonRequest]:
        """Wait for requests and take as many as are joined; none when closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            taken: list[TritonRequest] = []
            num_samples = 0
            while self._waiting and (not taken or num_samples + self._waiting[0][1] <= self._max_samples):
                request, size = self._waiting.popleft()
                taken.append(request)
                num_samples += size
            self._changed.notify_all()
        return taken


def _send(request: TritonRequest, response: TritonResponse) -> bool:
    """Send the one response to a request; False: the client went away, or there is no memory for it."""
    try:
        request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    except Exception as error:  # noqa: BLE001  it must not end the thread, which serves the other requests
        _log(f"a response could not be sent: {error}")
        return False
    return True


def _log(message: str) -> None:
    with contextlib.suppress(Exception):  # where memory is short, answers come before the log
        pb_utils.Logger.log_error(message)
