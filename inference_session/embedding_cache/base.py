"""The contract of an embedding cache: the hottest rows of all tables of a model, within one budget of bytes.

How a request uses one that stands over a parameter server (rows/stored.py):

    num_missing = cache.look_up(lookup)          # vectors go straight into the dense network's inputs
    for misses in cache.misses(lookup):          # what the cache lacks, each key once per table
        …                                        # the caller fetches the rows into misses.rows
        misses.complete()                        # their vectors are written to the outputs
    cache.insert_missing([misses.rows])          # now, or later from another thread
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inference_session.device.base import Device
from inference_session.embedding_cache.missing_rows import MissingRows
from inference_session.embedding_cache.stats import CacheStats, RowCounts, TableStats
from inference_session.errors import ConfigurationError, InvalidRequestError, SessionClosedError, TableNotFoundError
from inference_session.kernels.records import Lookup

Cache = TypeVar("Cache", bound="EmbeddingCache")


class Misses(ABC):
    """Keys that a look-up did not find, and whose outputs have yet to be written."""

    rows: MissingRows
    """To be filled in by the caller, before `complete`."""

    def paused(self) -> AbstractContextManager[None]:
        """Let other requests use the device while the rows are fetched."""
        return nullcontext()

    @abstractmethod
    def complete(self) -> Misses | None:
        """Write the rows to the outputs, and the keys that were not found to `Lookup.num_unknown`.

        Returns what is still missing because the cache has dropped rows meanwhile; completing that is final.
        """


class EmbeddingCache(ABC):
    """Rows by table and int64 key, any value of which is allowed. All methods may be called from any thread.

    A name that is no table's is a TableNotFoundError, keys or vectors of a wrong type or shape an InvalidRequestError,
    and any use after `close` a SessionClosedError.
    """

    device: Device
    inserts_late = False
    """Whether missing rows are best inserted by another thread, after the look-up is answered."""

    def __init__(self, dims: Mapping[str, int]) -> None:
        """`dims`: the embedding_dim of each table by name."""
        for table, dim in dims.items():
            if not isinstance(dim, int) or dim < 1:
                raise ConfigurationError(
                    f"table {table!r}: embedding_dim must be a whole number of at least 1, found {dim!r}"
                )
        self.dims = dict(dims)
        self.cache_bytes = 0
        self._dims = np.array(list(dims.values()), np.int64)
        self._closed = False
        self._positions = {table: i for i, table in enumerate(dims)}
        self._count_lock = Lock()
        self._num_keys = np.zeros(len(dims), np.int64)

    def prepare(self, segments: NDArray[np.void]) -> object | None:  # noqa: ARG002
        """What `look_up` needs for SEGMENT records of these shapes, made once (Lookup.prepared)."""
        return None

    @abstractmethod
    def look_up(self, lookup: Lookup) -> int:
        """Answer the keys that are cached, within a request of the device; returns how many are missing.

        Outputs of missing keys stay as they are; pooled outputs that lack a key may hold anything.
        `Lookup.num_unknown` receives the number of missing keys per segment. Tables are numbered in the order of
        `dims`.
        """

    @abstractmethod
    def misses(self, lookup: Lookup) -> Iterator[Misses]:
        """What `look_up` found missing, in parts that are completed one after the other."""

    @abstractmethod
    def insert(self, table: str, keys: ArrayLike, vectors: ArrayLike) -> None:
        """Cache rows, replacing those whose keys are cached, evicting others where space is short.

        keys int64 [n], vectors floats [n, embedding_dim]; of equal keys in one call the last wins.
        """

    def insert_missing(self, missing: Sequence[MissingRows]) -> None:
        """Insert all rows that look-ups missed, one look-up's after the other, as `insert` does for each table."""
        tables = list(self.dims)
        for rows in missing:
            for t, part in rows.by_table.items():
                self.insert(tables[t], part.keys, part.vectors)

    @abstractmethod
    def update(self, table: str, keys: ArrayLike, vectors: ArrayLike) -> None:
        """As `insert`, keys [n] and vectors [n, embedding_dim], for those keys only that are cached."""

    @abstractmethod
    def erase(self, table: str, keys: ArrayLike) -> None:
        """Drop the rows of these keys [n], as far as they are cached."""

    @abstractmethod
    def dump(self, table: str) -> NDArray[np.int64]:
        """The keys that are cached, int64 [n], in no particular order."""

    def hottest(self, table: str) -> NDArray[np.int64]:
        """The keys that are cached, int64 [n], the most requested first, as far as the cache knows."""
        return self.dump(table)

    def clear(self, table: str) -> None:
        """Drop all rows of a table."""
        self.erase(table, self.dump(table))

    @abstractmethod
    def close(self) -> None:
        """Give the memory back, once the look-ups under way have ended. May be called more than once."""

    def stats(self) -> CacheStats:
        """Exact counts since the cache was created."""
        rows = [self._row_counts(table) for table in self.dims]
        num_keys, num_missing = self._lookup_counts()
        tables = {
            table: TableStats(hits=asked - missing, misses=missing, **counts._asdict())
            for table, counts, asked, missing in zip(
                self.dims, rows, num_keys.tolist(), num_missing.tolist(), strict=True
            )
        }
        return CacheStats.of(self.cache_bytes, tables)

    def __enter__(self: Cache) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._closed:
            return f"<{type(self).__name__} closed>"
        stats = self.stats()
        return f"<{type(self).__name__} [{len(self.dims)} tables, {stats.rows} of {stats.capacity} rows]>"

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosedError("the embedding cache has been closed")

    def _check(self, table: str) -> int:
        """The embedding_dim of a table, while the cache is open."""
        self._check_open()
        if table not in self.dims:
            known = ", ".join(map(repr, self.dims)) or "none"
            raise TableNotFoundError(f"the embedding cache has no table {table!r}; its tables: {known}")
        return self.dims[table]

    def _as_array(self, values: ArrayLike) -> NDArray[Any]:
        """The caller's values, as an array in memory that the cache can read."""
        return np.asarray(values)

    def _checked_keys(self, table: str, keys: ArrayLike) -> NDArray[np.int64]:
        """Keys as int64 [n], at any distance; those on a device as they are."""
        self._check(table)
        array = self._as_array(keys)
        if array.ndim != 1 or (array.size and not np.can_cast(array.dtype, np.int64, "safe")):
            raise InvalidRequestError(
                f"table {table!r}: keys are {array.dtype} {list(array.shape)}, expected int64 or narrower integers [n]"
            )
        return array.astype(np.int64, copy=False) if isinstance(array, np.ndarray) else array

    def _checked_rows(
        self, table: str, keys: ArrayLike, vectors: ArrayLike
    ) -> tuple[NDArray[np.int64], NDArray[np.floating[Any]]]:
        """Keys as int64 [n] and vectors as floats [n, embedding_dim]."""
        checked = self._checked_keys(table, keys)
        array = self._as_array(vectors)
        shape = len(checked), self.dims[table]
        if array.shape != shape or not np.issubdtype(array.dtype, np.floating):
            raise InvalidRequestError(
                f"table {table!r}: vectors are {array.dtype} {list(array.shape)},"
                f" expected floats {list(shape)} for {shape[0]} keys"
            )
        return checked, array

    def _count_keys(self, lookup: Lookup) -> None:
        """Count the keys that a look-up asks for."""
        counts = self._by_table(lookup.segments, lookup.num_keys)
        with self._count_lock:
            self._num_keys += counts

    def _by_table(self, segments: NDArray[np.void], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Counts per segment, added up per table."""
        return np.bincount(segments["table"], counts, len(self.dims)).astype(np.int64)

    @abstractmethod
    def _lookup_counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Keys looked up so far, and how many of them were missing, by table."""

    @abstractmethod
    def _row_counts(self, table: str) -> RowCounts:
        """The rows of a table at one moment."""
