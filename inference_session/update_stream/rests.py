"""Moments in which a background thread leaves the interpreter to those that answer requests."""

from __future__ import annotations

import time

_REST_S = 50e-6
"""Long enough for a thread that waits for the interpreter to wake up and take it."""
_MAX_SHARE = 0.25
"""Of the time: on a machine that is busy with other things every rest may take many milliseconds."""


class Rests:
    """One thread's."""

    def __init__(self) -> None:
        self._next_at = 0.0

    def rest(self) -> None:
        """Pause, unless pauses have taken their share of the time."""
        begin = time.monotonic()
        if begin >= self._next_at:
            time.sleep(_REST_S)
            end = time.monotonic()
            self._next_at = end + (end - begin) * (1 / _MAX_SHARE - 1)
