"""The queue that joins requests, with a stand-in for Triton's module: a server lets nobody make its memory run out."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.testing.servers import wait_until


class _TritonError(Exception):
    UNAVAILABLE = 1


@dataclass(frozen=True)
class _Response:
    error: Any = None


@dataclass
class _Request:
    """Keeps what it is answered with; the first answers may fail to be sent."""

    failures: int = 0
    answers: list[Any] = field(default_factory=list)

    def get_response_sender(self) -> _Request:
        return self

    def send(self, response: Any, *, flags: int) -> None:
        assert flags == 1
        if self.failures:
            self.failures -= 1
            raise MemoryError
        self.answers.append(response)


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, in which Triton's log fails as well."""
    logger = Mock(log_error=Mock(side_effect=MemoryError))
    triton = SimpleNamespace(
        InferenceResponse=_Response, TritonError=_TritonError, TRITONSERVER_RESPONSE_COMPLETE_FINAL=1, Logger=logger
    )
    for name in ("joining_queue", "request_handler"):
        monkeypatch.delitem(sys.modules, f"triton_backend.backend.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton)
    monkeypatch.setitem(sys.modules, "triton_backend.backend.request_handler", Mock())
    import triton_backend.backend.joining_queue as module

    yield module
    del sys.modules["triton_backend.backend.joining_queue"]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_requests_are_answered_though_memory_runs_out(joining: Any, num_threads: int) -> None:
    """Errors in the handling of errors fail the requests concerned; the threads go on and answer the next ones."""
    answers: list[Any] = [MemoryError(), MemoryError(), ["right"]]

    def answer(requests: Sequence[Any]) -> Sequence[Any]:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found * len(requests)

    queue = joining.JoiningQueue(answer, lambda _: 1, max_samples=8, name="test", num_threads=num_threads)
    requests = [_Request(), _Request(), _Request(failures=1)]
    for request in requests:
        queue.put([request])
        wait_until(lambda given=request: bool(given.answers), "an answer")
    queue.close()

    assert [len(request.answers) for request in requests] == [1, 1, 1]
    assert all(isinstance(request.answers[0].error, _TritonError) for request in requests)
    assert not answers
