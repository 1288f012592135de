"""Values of a store that cannot be rows of their table: counted, and named in the log without filling it."""

from __future__ import annotations

import logging
import threading
import time

LOG_INTERVAL_S = 60.0
"""Time between two lines of the log about one table of one store."""

_log = logging.getLogger(__name__)


class MalformedValues:
    """Malformed values that one store holds in place of rows. Thread-safe."""

    def __init__(self) -> None:
        self.count = 0
        """Keys requested and counted as missing, because their value is malformed."""
        self._next_line_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, store: object, table: str, what: str, num_keys: int = 1) -> None:
        """Count keys that the store treats as missing. `what` says which key has which value."""
        now = time.monotonic()
        with self._lock:
            self.count += num_keys
            count, is_due = self.count, now >= self._next_line_at.get(table, 0.0)
            if is_due:
                self._next_line_at[table] = now + LOG_INTERVAL_S
        if is_due:
            _log.warning(
                "table %r in %r: %s; this counts as missing there (%d such keys read from this store so far)",
                *(table, store, what, count),
            )

    def add_row(self, store: object, table: str, key: int, found_bytes: int, expected_bytes: int) -> None:
        """Count a key whose row has another width than its table's."""
        expected = f"expected {expected_bytes} ({expected_bytes // 4} float32)"
        self.add(store, table, f"key {key} has a row of {found_bytes} bytes, {expected}")
