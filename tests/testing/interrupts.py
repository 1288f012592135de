"""Ctrl-C at every moment of a call."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from types import FrameType


def interrupted(call: Callable[[int], object], calls_apart: int = 1) -> Iterator[int]:
    """Make a call, given 1, 2 and so on, and interrupt it where Python raises what a signal handler does: as a function
    begins, and behind a call of code in C; each time later, until nothing is left. Yields the number after each, while
    the traceback is kept, as notebooks do.
    """
    for number in itertools.count(1):
        left = number * calls_apart

        def count(_: FrameType, event: str, __: object) -> None:
            nonlocal left
            left -= event in ("call", "c_return")
            if left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

        sys.setprofile(count)
        try:
            call(number)
        except KeyboardInterrupt:
            yield number
        finally:
            sys.setprofile(None)
        if left > 0:
            return
