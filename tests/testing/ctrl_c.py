"""Ctrl-C in a child process, from one of its threads."""

from __future__ import annotations

import os
import signal
import threading

_RETRY_S = 0.1


class CtrlC:
    """Presses Ctrl-C until the main thread hears it, which raises one KeyboardInterrupt.

    Once may not be enough. CPython looks for signals before the main thread waits for a lock, and after: one that comes
    between the two does not wake it.
    """

    def __init__(self) -> None:
        """In the main thread."""
        self._heard = threading.Event()
        signal.signal(signal.SIGINT, self._raise_once)

    def press(self) -> None:
        """In another thread. Returns when the main thread is interrupted."""
        while not self._heard.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            self._heard.wait(_RETRY_S)

    def _raise_once(self, *_: object) -> None:
        if not self._heard.is_set():
            self._heard.set()
            raise KeyboardInterrupt
