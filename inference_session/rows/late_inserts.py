"""A thread that caches rows after the request that missed them was answered, and its bounded queue."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from inference_session.embedding_cache.missing_rows import MissingRows
from inference_session.errors import HotrowError
from inference_session.platform.log_records import log_error

MAX_WAITING = 256
"""Requests whose missing rows may wait. The rows of further requests are dropped and counted; the next request that
misses them fetches them again."""
_MOST_AT_ONCE = 64
"""Requests whose rows are inserted in one call: the caches of GPUs then wait less often for their device."""

_log = logging.getLogger(__name__)


class LateInserts:
    """Passes queued rows to `insert`, in order, from its own thread; in each call those of some requests."""

    def __init__(self, insert: Callable[[Sequence[MissingRows]], None]) -> None:
        self._insert = insert
        self._waiting: deque[MissingRows] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._closed = False
        self.num_dropped = 0
        """Requests that found the queue full."""
        self._thread = threading.Thread(target=self._work, name="hotrow-late-inserts", daemon=True)
        self._thread.start()

    def put(self, missing: MissingRows) -> None:
        """Queue the missing rows of a request, or count them as dropped."""
        with self._changed:
            if len(self._waiting) < MAX_WAITING:
                self._waiting.append(missing)
                self._changed.notify_all()
            else:
                self.num_dropped += 1

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing waits and nothing is under way; returns whether that happened in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout_s)

    def close(self) -> None:
        """Drop waiting rows, and end when inserts under way have ended. May be called more than once."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                missing = [self._waiting.popleft() for _ in range(min(_MOST_AT_ONCE, len(self._waiting)))]
                self._busy = True
            self._try(missing)

    def _try(self, missing: Sequence[MissingRows]) -> None:
        """Insert; an error must not end later inserts. A tier that is down is logged elsewhere."""
        try:
            self._insert(missing)
        except HotrowError as error:
            _log.debug("fetched rows could not be cached: %s", error)
        except Exception:  # noqa: BLE001 - any error is logged; the next rows do not depend on it
            log_error(_log, "fetched rows could not be cached")
