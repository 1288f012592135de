"""The operations of a campaign, in order, and its findings."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque

_NUM_SHOWN = 50


class Journal(logging.Handler):
    """All methods may be called from any thread. As a log handler, it keeps the lines that hotrow logs."""

    def __init__(self, *, verbose: bool = False) -> None:
        super().__init__(logging.WARNING)
        self.num_operations = 0
        self.num_faults = 0
        self.kinds: Counter[str] = Counter()
        """How often each operation, and each fault, happened."""
        self.findings: list[str] = []
        self._verbose = verbose
        self._lines: deque[str] = deque(maxlen=_NUM_SHOWN)
        self._own_lock = threading.Lock()
        self._began_s = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        reason = f" ({record.exc_info[1]!r})" if record.exc_info else ""
        self.note(f"log: {record.getMessage()}{reason}")

    def begin_episode(self, name: str) -> None:
        """Forget earlier operations, which do not concern the new episode."""
        self._lines.clear()
        self._began_s = time.monotonic()
        self.note(f"episode {name}")

    def operation(self, kind: str, detail: str = "") -> None:
        """An operation begins."""
        self.num_operations += 1
        self.kinds[kind] += 1
        self.note(f"{kind} {detail}".rstrip())

    def fault(self, kind: str) -> None:
        """A fault begins."""
        self.num_faults += 1
        self.kinds[kind] += 1
        self.note(f"fault: {kind}")

    def note(self, line: str) -> None:
        """Remember a line, and when it was."""
        with self._own_lock:
            if self._lines and self._lines[-1].endswith(f" {line}"):
                return  # a repeated line
            self._lines.append(f"{time.monotonic() - self._began_s:9.3f} {line}")
            if self._verbose:
                print(self._lines[-1], flush=True)

    def finding(self, where: str, text: str) -> None:
        """Print a finding with the operations before it."""
        with self._own_lock:
            self.findings.append(where)
            history = "\n".join(self._lines)
            at_s = time.monotonic() - self._began_s
            print(f"FINDING {where}, at {at_s:.3f} s\n{text}\nthe last operations and faults:\n{history}\n", flush=True)
