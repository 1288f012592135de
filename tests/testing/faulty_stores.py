"""Stores that are slow, or fail when a test demands it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from inference_session.parameter_server.base import EmbeddingStore
from tests.testing.wrapper_store import WrapperStore

Result = TypeVar("Result")


class LatencyStore(WrapperStore):
    """Delays every call."""

    def __init__(self, store: EmbeddingStore, delay_ms: float) -> None:
        super().__init__(store)
        self.delay_ms = delay_ms

    def around(self, verb: str, call: Callable[[], Result]) -> Result:
        """Wait, then call."""
        time.sleep(self.delay_ms / 1000)
        return call()


class FaultStore(WrapperStore):
    """Calls fail when a test demands it."""

    def __init__(self, store: EmbeddingStore, fault: Callable[[str], Exception | None]) -> None:
        """`fault` gets the verb before each call, and returns an exception to raise in its place, or None."""
        super().__init__(store)
        self.fault = fault

    def around(self, verb: str, call: Callable[[], Result]) -> Result:
        """Raise, or call."""
        error = self.fault(verb)
        if error is not None:
            raise error
        return call()
