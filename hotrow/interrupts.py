"""Ctrl-C, SIGTERM and SIGHUP: at any moment they end a command without a traceback, and with nothing half done left."""

from __future__ import annotations

import signal
from types import FrameType

_RETRY_S = 0.05


def end_at_once() -> None:
    """Until `raise_after_imports` is called, Ctrl-C ends the process: nothing needs to be cleaned up yet."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a parent may have chosen to ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_after_imports() -> None:
    """Let Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt, but not in an import.

    A package whose import is broken off raises errors of its own, and compiled ones may crash.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in {signal.default_int_handler, signal.SIG_DFL}:  # else it is ignored: nohup
            signal.signal(number, _interrupt)


def _interrupt(_: int, frame: FrameType | None) -> None:
    if _is_importing(frame):
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, _RETRY_S)
    else:
        # A second one, as of a closed terminal, does not interrupt what cleans up. Who presses Ctrl-C twice means it.
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
