"""What tables have in common: batches of rows, and the contracts of what answers look-ups on a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from inference_session.device.base import Device
from inference_session.errors import InvalidRequestError
from inference_session.kernels.cpu.lookup import BoundLookups
from inference_session.kernels.records import Lookup

RowBatch: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Keys [n], and their vectors [n, embedding_dim]."""
HotKeys: TypeAlias = Mapping[str, NDArray[np.int64]]
"""By table folder, the hottest first."""
SCAN_BYTES = 4 << 20
"""Vectors in one batch of a scan, about."""


def check_fetch(keys: NDArray[np.int64], out: NDArray[np.float32], embedding_dim: int) -> None:
    """Raise InvalidRequestError unless `fetch` takes them: keys int64 [n], out float32 [n, embedding_dim]."""
    shape = (len(keys), embedding_dim)
    adjacent = out.size == 0 or out.strides[-1] == out.itemsize
    if keys.dtype != np.int64 or keys.ndim != 1 or out.shape != shape or out.dtype != np.float32 or not adjacent:
        raise InvalidRequestError(
            f"fetch takes keys int64 [n] and out float32 {list(shape)} with adjacent elements,"
            f" found {keys.dtype} {list(keys.shape)} and {out.dtype} {list(out.shape)}"
        )


class Placement(NamedTuple):
    """The places of the tables that a GPU looks up, and their size."""

    device: str
    bytes: int
    """Bytes on the device, or on each of several."""
    on_host: Sequence[str]
    """Tables, by folder, that are read from host memory."""
    sharded: Sequence[str]
    """Tables, by folder, whose rows are divided among several devices."""


class UpdatedRows(NamedTuple):
    """Rows of one table that are newer than its files."""

    keys: NDArray[np.int64]
    """[n]; row numbers are counted from the start."""
    vectors: NDArray[np.float32]
    """[n, embedding_dim]; of deleted rows the default vector."""
    deleted: NDArray[np.bool_]
    """[n]"""

    def where(self, these: slice | NDArray[np.bool_]) -> UpdatedRows:
        """Some of them, contiguous; these: a slice of rows, or bool [n]."""
        keys, vectors, deleted = self.keys[these], self.vectors[these], self.deleted[these]
        return UpdatedRows(np.ascontiguousarray(keys), np.ascontiguousarray(vectors), deleted)


class RowReader(ABC):
    """Answers look-ups in all tables of a model on one device. Records number the tables in the order of its spec."""

    device: Device
    """Where look-ups run."""
    is_launched = False
    """Whether a look-up is one launch on the device, which needs no work on the host after it and may be repeated."""

    def prepare(self, segments: NDArray[np.void]) -> object | None:  # noqa: ARG002
        """What `look_up` needs for SEGMENT records of these shapes, made once (Lookup.prepared)."""
        return None

    def repeated(self, lookup: Lookup) -> Callable[[], None]:
        """A function that launches this look-up each time, over what is in its memory by then; where `is_launched`."""
        raise NotImplementedError(f"{self!r} launches nothing")

    def bound_lookups(self) -> BoundLookups | None:
        """An object that binds look-ups to their records, for one thread at a time; None: `look_up` must be called."""
        return None

    @abstractmethod
    def look_up(self, lookup: Lookup) -> None:
        """Answer all keys within a request of the device; its counts are valid after `Device.wait`.

        Raises:
            UnavailableError: a store is down that may have one of the keys, and the settings allow no default vector.
        """

    def warm_up(self, hot_keys: HotKeys, deadline: float) -> None:  # noqa: B027  some have nothing to load
        """Load rows before a request needs them: into a cache, if there is one, the rows of `hot_keys`.

        Ends at `deadline`, a value of time.monotonic(), at the latest.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back the memory. May be called more than once."""


class DeviceTables(RowReader):
    """The rows of table files, and those updated since, where one device reads them."""

    def put(self, table: int, updated: UpdatedRows, all_updated: Callable[[], UpdatedRows]) -> None:
        """Answer these rows from now on, each wholly, and of equal keys the last. One thread changes rows at a time.

        Args:
            table: its number.
            updated: keys that are all different, or all of whose rows are deleted or are not.
            all_updated: returns all rows of the table that were ever updated, these included.

        Raises:
            UnavailableError: the device has failed, or has too little memory; any of the rows may be answered already.
            SessionClosedError: after `close`.
        """
        raise NotImplementedError(f"the rows of {self!r} never change")

    @property
    def placement(self) -> Placement | None:
        """Where the tables are, if on a GPU."""
        return None


def contains(ordered: NDArray[np.int64], keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each key, int64 [n], is in a sorted array, int64 [any]: bool [n]."""
    if not len(ordered):
        return np.zeros(keys.shape, np.bool_)
    positions = np.minimum(np.searchsorted(ordered, keys), len(ordered) - 1)
    found: NDArray[np.bool_] = ordered[positions] == keys
    return found
