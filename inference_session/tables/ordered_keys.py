"""Keys in ascending order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def contains(ordered: NDArray[np.int64], keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each key, int64 [n], is in a sorted array, int64 [any]: bool [n]."""
    if not len(ordered):
        return np.zeros(keys.shape, np.bool_)
    positions = np.minimum(np.searchsorted(ordered, keys), len(ordered) - 1)
    found: NDArray[np.bool_] = ordered[positions] == keys
    return found
