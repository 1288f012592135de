"""Keys that are row numbers: negative ones count from the end, so that each row has two keys."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inference_session.model_spec import TableSpec


def aliases_of(spec: TableSpec, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All keys that may mean these rows, also row numbers counted from the end; and each one's position in `keys`."""
    every = np.arange(len(keys))
    if spec.keys == "stored":
        return keys, every
    inside = np.flatnonzero((keys >= 0) & (keys < spec.num_rows))
    if not len(inside):
        return keys, every
    return np.concatenate([keys, keys[inside] - spec.num_rows]), np.concatenate([every, inside])


def stored_keys(spec: TableSpec, keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """The keys that stores know: row numbers that count from the end become those that count from the start.

    Those from before the first row stay as they are: counted once, they would look like numbers from the end again.
    """
    if spec.keys == "stored":
        return keys
    return np.where((keys < 0) & (keys >= -spec.num_rows), keys + spec.num_rows, keys)
