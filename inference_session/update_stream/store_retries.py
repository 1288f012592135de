"""Calls of stores that an update stream makes again and again until they succeed: no update may be lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from inference_session.errors import StoreError, UnavailableError
from inference_session.update_stream.stream_stats import StreamStats

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0

Result = TypeVar("Result")


class StoreRetries:
    """Makes calls of the stores until they succeed, or until the stream is closed."""

    def __init__(self, stats: StreamStats, closing: threading.Event, while_waiting: Callable[[], None]) -> None:
        """Count failures in `stats`. `while_waiting` is called between the attempts; none is made after `closing`."""
        self._stats = stats
        self._closing = closing
        self._while_waiting = while_waiting

    def call(self, work: Callable[[], Result]) -> Result:
        """The result of the first call that succeeds.

        Raises:
            UnavailableError, StoreError: the stream is being closed, and the last call failed.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                result = work()
            except (UnavailableError, StoreError) as error:
                self._stats.fail(str(error))
                self._while_waiting()
                if self._closing.wait(pause_s):
                    raise
            else:
                self._stats.recover()
                return result
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
