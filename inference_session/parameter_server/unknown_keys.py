"""Keys that no tier has, remembered for a moment so that a popular one does not go down all tiers every time."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_PLACE_BITS = 13
NUM_PLACES = 1 << _PLACE_BITS
MEMORY_S = 1.0

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(64 - _PLACE_BITS)


class UnknownKeys:
    """The unknown keys of one table. Bounded: a later key takes the place of an earlier one whose hash it shares.

    Needs no lock: a key is entered before its time, and whichever keys meet in a place are all unknown at that time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._keys = np.zeros(NUM_PLACES, np.int64)
        self._until = np.full(NUM_PLACES, -np.inf)
        self._any_until = -np.inf

    def add(self, keys: NDArray[np.int64], now: float) -> None:
        """Remember keys that no tier had; `now`: the clock's time before the tiers were asked."""
        if len(keys):
            places = _places(keys)
            self._keys[places] = keys
            self._until[places] = self._any_until = now + MEMORY_S

    def forget(self, keys: NDArray[np.int64]) -> None:
        """These keys are known from now on."""
        places = _places(keys)
        self._until[places[self._keys[places] == keys]] = -np.inf

    def holds(self, keys: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Which of the keys were unknown a moment ago; None: none of them."""
        now = self._clock()
        if now >= self._any_until:
            return None
        places = _places(keys)
        unknown: NDArray[np.bool_] = (self._keys[places] == keys) & (self._until[places] > now)
        return unknown


def _places(keys: NDArray[np.int64]) -> NDArray[np.uint64]:
    places: NDArray[np.uint64] = (keys.view(np.uint64) * _MULTIPLIER) >> _SHIFT
    return places
