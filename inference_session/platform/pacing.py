"""How background work yields to requests: small pieces with rests between, at low priority, without collections."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

REST_PER_WORK = 4.0
"""Rest after a piece of work, as a multiple of its processor time: the work takes at most a fifth of one core. A store
that answers such work takes about as much again."""
PATIENT_REST_PER_WORK = 20.0
"""The same for long rounds of work, such as refreshes, which would otherwise delay many requests."""
MAX_REST_S = 0.2
"""The longest of these rests."""
_REST_S = 50e-6
"""Long enough for a thread that waits for the interpreter to wake up and take it."""
_MAX_RESTS_SHARE = 0.25
"""The largest share of the time: on a machine that is busy with other things every rest may take many milliseconds."""
_NICENESS = 5
"""A third of the weight of others: where the processor is saturated, loading at 10 has been seen to take a minute."""

Piece = TypeVar("Piece")


def rest_after(worked_s: float, rest_per_work: float = REST_PER_WORK) -> float:
    """Seconds to rest after work that took this many seconds of the thread's processor time."""
    return min(rest_per_work * worked_s, MAX_REST_S)


def paced(pieces: Sequence[Piece], ending: threading.Event, *, over_s: float = 0.0) -> Iterator[Piece]:
    """Hand out pieces of work, each of which the receiver does immediately, with a rest after each.

    They are spread over `over_s` seconds if that is longer than they take otherwise. Ends early once `ending` is set.
    """
    begin = time.monotonic()
    for number, piece in enumerate(pieces, start=1):
        started_s = time.thread_time()
        yield piece
        rest_s = rest_after(time.thread_time() - started_s, PATIENT_REST_PER_WORK)
        turn = begin + over_s * number / len(pieces)
        if ending.wait(max(rest_s, turn - time.monotonic())):
            return


class Rests:
    """Short pauses within a piece of work, in which the interpreter runs the threads that answer requests."""

    def __init__(self) -> None:
        self._next_at = 0.0

    def rest(self) -> None:
        """Pause, unless pauses have taken their share of the time."""
        begin = time.monotonic()
        if begin >= self._next_at:
            time.sleep(_REST_S)
            end = time.monotonic()
            self._next_at = end + (end - begin) * (1 / _MAX_RESTS_SHARE - 1)


def yield_to_others() -> None:
    """Lower the priority of the calling thread permanently: on Linux each has its own, and may not raise it again."""
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < _NICENESS:
        os.setpriority(os.PRIO_PROCESS, thread, _NICENESS)


@contextmanager
def without_collections() -> Iterator[None]:
    """Pause the garbage collector: code is hardly ever garbage, and to scan the heap takes a fifth of loading it, and a
    fourteenth of compiling it.

    Later collections do not scan it either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
