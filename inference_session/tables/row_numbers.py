"""Keys that are row numbers: negative ones count from the end, so that each row has two keys.

Where each key is kept by itself, the two keys of a row cannot be changed in one step. A client could then see a new row
by one of them, and after that an older one by the other. So where rows change, each is kept under the number that
counts from the start, and look-ups convert the keys that they are asked for: here on a host, on a GPU in
kernels/cuda/sources.cuh.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inference_session.kernels.cpu.row_numbers import copy_from_start, count_copies
from inference_session.kernels.records import SEGMENT, Lookup
from inference_session.model_spec import TableSpec


def stored_keys(spec: TableSpec, keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """The keys that stores know, int64 [n]: row numbers that count from the end become those that count from the start.

    Those before the first row stay unchanged: converted once, they would look like numbers from the end again.
    """
    if spec.keys == "stored":
        return keys
    return np.where((keys < 0) & (keys >= -spec.num_rows), keys + spec.num_rows, keys)


class RowNumbers:
    """Which tables of a model have row numbers for keys, and how many rows."""

    def __init__(self, specs: Sequence[TableSpec]) -> None:
        """`specs`: the tables, in the order in which look-ups count them."""
        sizes = [spec.num_rows if spec.keys == "row_number" else 0 for spec in specs]
        self._num_rows = np.array(sizes, np.int64)
        self._any = any(sizes)
        nothing = np.zeros(0, np.int64)
        count_copies(np.zeros(0, SEGMENT), self._num_rows, nothing)  # compiles
        copy_from_start(np.zeros(0, SEGMENT), self._num_rows, nothing, nothing)

    def count_from_start(self, lookup: Lookup) -> None:
        """Make a look-up on the host read copies of its keys where any of them counts from the end."""
        if not self._any:
            return
        num_copies = np.empty(len(lookup.segments), np.int64)
        num_keys = count_copies(lookup.segments, self._num_rows, num_copies)
        if num_keys:
            lookup.segments = lookup.segments.copy()  # those of the plan point to other requests' keys as well
            lookup.copied_keys = np.empty(num_keys, np.int64)
            copy_from_start(lookup.segments, self._num_rows, num_copies, lookup.copied_keys)
