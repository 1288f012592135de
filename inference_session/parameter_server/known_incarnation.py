"""Which incarnation of a volatile store has all rows that were written, kept in the persistent store.

The volatile store may come back older than it was, or refuse rows that the persistent store takes. The process that
wrote them knows; this note tells those that are opened later, when that process may be gone. Without the note a Redis
that came back from an old snapshot, or missed writes, would answer older rows than the RocksDB below it.
"""

from __future__ import annotations

import contextlib
import threading

from inference_session.errors import HotrowError
from inference_session.parameter_server.base import EmbeddingStore

NOTE_TABLE = "~volatile"
"""The persistent store keeps the note under a table of this name, which has no rows."""
_MISSES_WRITES = "misses writes"


class KnownIncarnation:
    """The note. Write it only while no other thread writes to the stores; another thread may read it meanwhile."""

    def __init__(self, durable: EmbeddingStore | None = None) -> None:
        """`durable`: where the note is; None: there is none, and nothing is known of earlier writes."""
        self._durable = durable
        self._lock = threading.Lock()  # held until `_text` says what the note says
        self._text: str | None = None
        """What it says, as far as this process knows; None: nothing was ever written."""
        self._unread: str | None = None
        """What others have noted and no caller has read yet."""

    def read(self) -> str | None:
        """What others have noted since this was last called; None also if the note cannot be read."""
        with self._lock:
            self._look()
            unread, self._unread = self._unread, None
            return unread

    def save(self, incarnation: str) -> bool:
        """Note that this incarnation has all rows that were written; False, and nothing is noted, if others have noted
        what no caller has read yet: it may lack their rows.

        Raises:
            StoreError, UnavailableError: the persistent store does not take the note.
        """
        with self._lock:
            if self._durable is not None and incarnation != self._text:
                self._look()
                if self._unread is None:
                    self._write(self._durable, incarnation)
            return self._unread is None

    def _write(self, durable: EmbeddingStore, text: str) -> None:
        """Must be called while holding `_lock`."""
        if text != self._text:
            durable.set_note(NOTE_TABLE, text)
            self._text = text

    def _look(self) -> None:
        """Take up what others have noted. Must be called while holding `_lock`."""
        if self._durable is not None:
            with contextlib.suppress(HotrowError):
                text = self._durable.note(NOTE_TABLE)
                if text is not None and text != self._text:
                    self._text = self._unread = text

    def save_that_writes_are_missing(self) -> None:
        """Note that no incarnation has all rows. Errors as of `save`."""
        if self._durable is None or self._text == _MISSES_WRITES:
            return
        with self._lock:
            self._look()  # a caller must still learn of the note that this overwrites
            self._write(self._durable, _MISSES_WRITES)

    @property
    def misses_writes(self) -> bool:
        """Whether the note says so, whichever process wrote it."""
        return self._text == _MISSES_WRITES
