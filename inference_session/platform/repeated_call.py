"""Work that is done again and again in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from inference_session.platform.log_records import log_error

_log = logging.getLogger(__name__)


class RepeatedCall:
    """Calls a function at intervals, in its own thread, until it is closed or the function returns False."""

    def __init__(
        self, name: str, call: Callable[[], object], interval_s: float, *, max_load: float = 1.0, failure: str
    ) -> None:
        """Start to wait for the first call.

        Args:
            name: the thread's.
            call: an error that it raises does not affect the next call; it is logged, the first of several in a row.
            interval_s: seconds before each call.
            max_load: the part of one core's time that calls may take; more seconds are waited after long ones.
            failure: what is logged where a call raises an error.
        """
        self._interval_s, self._max_load, self._failure = interval_s, max_load, failure
        self.closing = threading.Event()
        """Set once no more calls begin, for a call that takes long."""
        # Only the running thread holds the function, which often leads to the owner of this object: once it has ended,
        # both are gone without the garbage collector.
        self._thread = threading.Thread(target=self._work, args=(call,), name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:  # Ctrl-C, while this waits for the thread to begin: nobody could close it
            self.closing.set()
            raise

    def close(self, timeout_s: float | None = None) -> None:
        """Begin no more calls, and wait for one that is under way. May be called more than once."""
        self.closing.set()
        if threading.current_thread() is not self._thread:  # where garbage is collected, that may be this one
            self._thread.join(timeout_s)

    def _work(self, call: Callable[[], object]) -> None:
        pause_s, has_failed = self._interval_s, False
        while not self.closing.wait(pause_s):
            begin = time.thread_time()
            try:
                if call() is False:
                    return
                has_failed = False
            except Exception:  # noqa: BLE001 - whatever it was, the next call does not depend on it
                if not has_failed:
                    log_error(_log, self._failure)
                has_failed = True
            pause_s = max(self._interval_s, (time.thread_time() - begin) / self._max_load)
