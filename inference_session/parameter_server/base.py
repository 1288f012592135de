"""The contract of one tier of the parameter server."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import (
    InvalidRequestError,
    SessionClosedError,
    StoreError,
    TableNotFoundError,
    UnavailableError,
)
from inference_session.tables.base import RowBatch
from inference_session.tables.ordered_updates import OrderedUpdates, Outcome

Store = TypeVar("Store", bound="EmbeddingStore")

ERASED_SUFFIX = "~erased"
"""Suffix to a table's name, for the table of the keys that were erased from its files (file_store.py). A store that may
hold only a limited number of rows evicts none of these: the rows of the files would reappear.
"""

LOG_INTERVAL_S = 60.0
"""Time between two lines of the log about malformed values of one table of one store."""

_log = logging.getLogger(__name__)


class LateError(UnavailableError):
    """A store did not answer in time. The caller must find out whether it is down or was only overloaded."""


class FetchRequest(NamedTuple):
    """What `EmbeddingStore.fetch` takes, for one of several tables."""

    table: str
    keys: NDArray[np.int64]
    """[n]"""
    out: NDArray[np.float32]
    """[n, embedding_dim], with any stride between rows."""


class EmbeddingStore(ABC):
    """Named tables of vectors by int64 key, any of which may have no rows. All methods may be called from any thread.

    A table that the store does not hold is a TableNotFoundError, a store that cannot do what it is asked a StoreError,
    one that cannot be reached or does not answer in time an UnavailableError, one that has been closed a
    SessionClosedError. After an error, `out` may hold some of the rows, and an insert may have been done in part.
    """

    def __init__(self, embedding_dims: Mapping[str, int]) -> None:
        """`embedding_dims`: the number of elements of each table's vectors."""
        self._embedding_dims = dict(embedding_dims)
        self._malformed = MalformedValues()
        self._closed = False

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables held."""
        return tuple(self._embedding_dims)

    @property
    def keeps_rows(self) -> bool:
        """Whether rows that are inserted are held here, and not only in a store above."""
        return True

    @property
    def lags(self) -> bool:
        """Whether what other processes write is seen only after `refresh`."""
        return False

    @property
    def is_shared(self) -> bool:
        """Whether other processes may change rows: a row that was read may be outdated when it is inserted above."""
        return self.lags

    def embedding_dim(self, table: str) -> int:
        """Number of elements of the table's vectors."""
        if table not in self._embedding_dims:
            known = ", ".join(map(repr, self._embedding_dims)) or "none"
            raise TableNotFoundError(f"{self!r} has no table {table!r}; its tables: {known}")
        return self._embedding_dims[table]

    @abstractmethod
    def num_rows(self, table: str) -> int:
        """Number of rows the table holds. Not for the path of a request: a store may have to count them."""

    @abstractmethod
    def fetch(self, table: str, keys: NDArray[np.int64], out: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Write the vectors of keys, int64[n], to the rows of `out`, float32[n, embedding_dim]; returns found[n].

        Rows of keys that are not found stay unchanged. A key also counts as not found where the store holds a value
        that is not a row of the table's width: `num_malformed` counts it, and the log names it.
        """

    def fetch_many(self, requests: Sequence[FetchRequest]) -> list[NDArray[np.bool_]]:
        """`fetch` for several tables, all in one go where the store can: bool [n] for each."""
        return [self.fetch(*request) for request in requests]

    @abstractmethod
    def scan(self, table: str) -> Iterator[RowBatch]:
        """All rows of a table, in batches of some MiB and in no particular order.

        Gives a row that exists throughout at least once, and perhaps one that is written or erased meanwhile. Leaves
        out malformed values; see `fetch`.
        """

    def prepare_write(self) -> None:  # noqa: B027
        """Make sure that the store takes writes now, as far as can be told before one; errors as of `insert`."""

    @abstractmethod
    def insert(self, table: str, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Add rows, keys [n] and vectors [n, embedding_dim], replacing those held; of equal keys the last wins."""

    def insert_absent(self, table: str, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Add those rows, keys [n] and vectors [n, embedding_dim], that are not held; of equal keys the first wins.

        Another writer's row of the same moment may be replaced, unless the store says otherwise.
        """
        keys, first = np.unique(keys, return_index=True)
        found = self.fetch(table, keys, np.empty((len(keys), self.embedding_dim(table)), np.float32))
        self.insert(table, keys[~found], vectors[first][~found])

    @abstractmethod
    def erase(self, table: str, keys: NDArray[np.int64]) -> None:
        """Drop the rows of keys [n]. Keys without a row are ignored."""

    @property
    def orders_updates(self) -> bool:
        """Whether `apply` leaves out what the rows already contain."""
        return False

    def apply(self, table: str, updates: OrderedUpdates) -> Outcome:
        """Insert and erase rows, except where the store's rows contain these updates, and perhaps newer ones."""
        raise StoreError(f"{self!r} keeps no order among the updates of table {table!r} ({len(updates.keys)} rows)")

    def forget_applied(self, table: str) -> None:  # noqa: B027
        """Let all updates of a table be applied again: other rows have been written over them."""

    def clear(self, table: str) -> None:
        """Drop all rows of a table, and its note."""
        raise StoreError(f"{self!r} cannot clear table {table!r}: the store is read-only")

    def touch(self, table: str, keys: NDArray[np.int64]) -> None:  # noqa: B027
        """Count keys [n], which are held, as used now, where the store ranks its rows by use; else do nothing."""

    @property
    def num_malformed(self) -> int:
        """Keys requested and counted as missing, because the store holds a value there that is not a row."""
        return self._malformed.count

    def check(self) -> None:  # noqa: B027
        """Raise what a fetch would raise, if the store is down."""

    def incarnation(self) -> str:
        """Changes when the store may have lost accepted writes and show older rows again."""
        return ""

    def trust(self, incarnation: str) -> None:  # noqa: B027
        """Let this incarnation alone answer calls for rows from now on; any other is an UnavailableError, until it is
        trusted. Empty: any may.
        """

    def refresh(self) -> None:  # noqa: B027
        """See what other processes have written since, where that does not happen by itself."""

    def note(self, table: str) -> str | None:
        """The note of a table, None if there is none: how far a push has come."""
        raise StoreError(f"{self!r} keeps no notes on table {table!r}: the store is read-only")

    def set_note(self, table: str, text: str) -> None:
        """Store a table's note; whenever the note is found, so is what was inserted before it."""
        raise StoreError(f"{self!r} keeps no notes on table {table!r}: the store is read-only (note: {text!r})")

    def versions(self) -> set[str]:
        """The versions of this store's model that have tables here."""
        return set()

    def remove_versions(self, versions: Collection[str]) -> int:  # noqa: ARG002
        """Drop the tables of these versions of this store's model; returns how many tables went.

        Works in small steps, while requests are served.
        """
        return 0

    @abstractmethod
    def close(self) -> None:
        """Release what the store holds open. May be called more than once."""

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise SessionClosedError(f"{self!r} has been closed")

    def __enter__(self: Store) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MalformedValues:
    """Values of one store that cannot be rows of their table: counted, and logged at intervals. Thread-safe."""

    def __init__(self) -> None:
        self.count = 0
        """Keys requested and counted as missing, because their value is malformed."""
        self._next_line_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, store: object, table: str, what: str, num_keys: int = 1) -> None:
        """Count keys that the store treats as missing. `what` says which key has which value."""
        now = time.monotonic()
        with self._lock:
            self.count += num_keys
            count, is_due = self.count, now >= self._next_line_at.get(table, 0.0)
            if is_due:
                self._next_line_at[table] = now + LOG_INTERVAL_S
        if is_due:
            _log.warning(
                "table %r in %r: %s; this counts as missing there (%d such keys read from this store so far)",
                *(table, store, what, count),
            )

    def add_row(self, store: object, table: str, key: int, found_bytes: int, expected_bytes: int) -> None:
        """Count a key whose row has another width than its table's."""
        expected = f"expected {expected_bytes} ({expected_bytes // 4} float32)"
        self.add(store, table, f"key {key} has a row of {found_bytes} bytes, {expected}")


def check_insert(keys: NDArray[np.int64], vectors: NDArray[np.float32], embedding_dim: int) -> None:
    """Raise InvalidRequestError unless `insert` takes them: keys int64 [n], vectors float32 [n, embedding_dim]."""
    shape = (len(keys), embedding_dim)
    if keys.dtype != np.int64 or keys.ndim != 1 or vectors.shape != shape or vectors.dtype != np.float32:
        raise InvalidRequestError(
            f"insert takes keys int64 [n] and vectors float32 {list(shape)},"
            f" found {keys.dtype} {list(keys.shape)} and {vectors.dtype} {list(vectors.shape)}"
        )
