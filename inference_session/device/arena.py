"""Memory for requests, at addresses that repeat. Nothing here needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ALIGNMENT = 256


class Arena:
    """Memory that is allocated piece by piece and freed all at once.

    The pieces of a request lie where those of a similar one did before: its recorded graphs rely on that. It grows by
    further blocks, and keeps them.
    """

    def __init__(self, allocate: Callable[[int], Any], first_bytes: int) -> None:
        """`allocate(n)`: a block of n bytes, whatever that is; it has a length."""
        self._allocate = allocate
        self._blocks = [allocate(first_bytes)]
        self._current = self._used = 0

    def take(self, num_bytes: int) -> tuple[Any, int]:
        """A block, and the offset in it of this many bytes for the caller."""
        while self._used + num_bytes > len(self._blocks[self._current]):
            if self._current + 1 == len(self._blocks):
                self._blocks.append(self._allocate(max(num_bytes, 2 * len(self._blocks[-1]))))
            self._current, self._used = self._current + 1, 0
        begin = self._used
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._blocks[self._current], begin

    def position(self) -> tuple[int, int]:
        """Up to where memory has been taken, for `reset`."""
        return self._current, self._used

    def reset(self, position: tuple[int, int] = (0, 0)) -> None:
        """Free what was taken behind this position."""
        self._current, self._used = position
