"""Who is reading memory that a writer wants to use again."""

from __future__ import annotations

from threading import Event, get_ident
from typing import TypeAlias

Reader: TypeAlias = "tuple[int, object]"


class Readers:
    """Look-ups announce themselves for as long as they run, without a lock; one writer at a time may wait for them."""

    def __init__(self) -> None:
        self._readers: set[Reader] = set()
        self._left = Event()
        self.writer_waits = False
        """Whether a writer waits for look-ups to end."""

    def enter(self) -> Reader:
        """A look-up begins: what it reads from here on stays unchanged until it leaves."""
        reader = get_ident(), object()
        self._readers.add(reader)
        return reader

    def leave(self, reader: Reader) -> None:
        """A look-up has ended."""
        self._readers.discard(reader)
        if self.writer_waits:
            self._left.set()

    @property
    def includes_this_thread(self) -> bool:
        """Whether waiting would never end."""
        return any(thread == get_ident() for thread, _ in self._readers.copy())

    def wait_for_those_under_way(self) -> None:
        """Wait until the look-ups under way have ended; later ones see what was written before."""
        under_way = self._readers.copy()
        self.writer_waits = True
        while not under_way.isdisjoint(self._readers):
            self._left.wait()
            self._left.clear()
        self.writer_waits = False
