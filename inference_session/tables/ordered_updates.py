"""Updates of one table that come in an order, with how far their sources are applied once they are written.

Several processes may write the same updates to one store, each at its own pace. A store that can (`orders_updates`)
keeps, next to the rows, how far they contain each source, so that no process writes an older row over a newer one.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class SourceProgress(NamedTuple):
    """How far a source, such as a partition of a topic, is applied before some of its updates, and after them."""

    source: str
    """Its name."""
    history: str
    """What positions count in, such as a topic by its id: one that was created again counts from 0 again."""
    epoch: int
    """Rises where a history was cut and its last positions were given to other updates; never falls."""
    begin: int
    """The writer has applied what comes before this position."""
    end: int
    """All updates before this position are in the rows afterwards."""


class OrderedUpdates(NamedTuple):
    """Rows of one table to be inserted or erased, each key once: of each key the newest before its source's `end`."""

    keys: NDArray[np.int64]
    """[n], rows to be inserted."""
    vectors: NDArray[np.float32]
    """[n, embedding_dim]"""
    deleted: NDArray[np.int64]
    """[m], rows to be erased."""
    sources: NDArray[np.intp]
    """[n]: which of `progress` each row to be inserted came from."""
    deleted_sources: NDArray[np.intp]
    """[m]: the same of rows to be erased."""
    progress: Sequence[SourceProgress]

    @property
    def all_keys(self) -> NDArray[np.int64]:
        """[n + m]"""
        return np.concatenate([self.keys, self.deleted]) if len(self.deleted) else self.keys


class Status(IntEnum):
    """What a store has done with a row."""

    OTHER = 0
    """It has not written it: it may have a newer one."""
    SAME = 1
    """It has not written it, because it had it."""
    WRITTEN = 2


class Outcome(NamedTuple):
    """What a store has done with updates."""

    inserted: NDArray[np.int8]
    """[n]: the status of each row to be inserted."""
    erased: NDArray[np.int8]
    """[m]: the same of rows to be erased."""
    lost: bool = False
    """The store lacks updates that it had taken, so that some of these were not written: all updates of the sources
    must be applied again, from their oldest.
    """
