"""The rows of a model, in any storage: what look-ups, updates and swaps may call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import StoreError
from inference_session.kernels.records import Lookup, key_segments
from inference_session.parameter_server.write_log import WriteLog
from inference_session.rows.stats import RowStats
from inference_session.tables.base import HotKeys, RowBatch, RowReader
from inference_session.tables.ordered_updates import OrderedUpdates

_READ_ONLY = (
    "rows in table files are read-only; to change them, set volatile_store or persistent_store, or update_stream"
)


class RowWriter:
    """Changes the rows of a model while they are looked up. Tables are named by their folders.

    This base class refuses all changes: rows that are in files alone never change.
    """

    is_durable = False
    """Whether what is written outlives this process: whether `save_note` works."""
    log: WriteLog
    """Writes to the rows of all tables, by their folders: each ends once look-ups answer it."""

    def __init__(self, log: WriteLog | None = None) -> None:
        self.log = log or WriteLog()

    def update(self, table: str, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:  # noqa: ARG002
        """Write rows, keys int64 [n] and vectors float32 [n, embedding_dim]; look-ups that begin later answer them.

        Raises:
            StoreError: there is no store that takes writes.
            UnavailableError: a store cannot take them at present.
        """
        raise StoreError(_READ_ONLY)

    def erase(self, table: str, keys: NDArray[np.int64]) -> None:  # noqa: ARG002
        """Drop the rows of keys [n], as `update` writes them: the default vector answers, whatever is in files."""
        raise StoreError(_READ_ONLY)

    @property
    def orders_updates(self) -> bool:
        """Whether `apply` works: whether the stores leave out updates that their rows already contain."""
        return False

    def apply(self, table: str, updates: OrderedUpdates) -> bool:  # noqa: ARG002
        """Write and drop rows as `update` and `erase` do, except where the stores may have newer ones: look-ups answer
        these. Returns False if the stores have lost earlier updates, so that all must be applied again.
        """
        raise StoreError(_READ_ONLY)

    def forget(self, table: str, keys: NDArray[np.int64]) -> None:
        """Make later look-ups read rows, keys [n], again: another process has changed them in the stores."""

    def refresh(self) -> None:
        """Read the cached rows again. UnavailableError if a store is down."""

    def renew(self) -> None:
        """As `refresh`, but rows that cannot be read now leave the cache."""

    def frozen(self) -> AbstractContextManager[None]:
        """Hold back all changes that this process makes to rows; look-ups go on."""
        return nullcontext()

    def note(self, table: str) -> str | None:  # noqa: ARG002
        """The table's note, stored with its rows where they are durable; None: there is none."""
        return None

    def save_note(self, table: str, text: str) -> None:
        """Store the table's note, once what was written before it is durable; errors of `update`."""
        raise StoreError(f"a note on table {table!r} cannot be kept: there is no writable persistent store ({text!r})")


class Rows(ABC):
    """The rows of all tables of a model, in files or in stores. Thread-safe. Tables are named by their folders."""

    readers: Sequence[RowReader]
    """For each device, what looks the rows up there."""
    writer = RowWriter()
    """Changes them for all devices."""

    @abstractmethod
    def scan(self, table: str) -> Iterator[RowBatch]:
        """All rows of a table in batches, as look-ups answer them; a row may come more than once.

        Raises:
            UnavailableError: a store is down.
        """

    def hot_keys(self) -> HotKeys:
        """Which rows in the caches are hot; none if there is no cache."""
        return {}

    @abstractmethod
    def stats(self) -> RowStats:
        """The counts so far, of all devices."""

    @abstractmethod
    def close(self) -> None:
        """Give back the memory, and close the files. May be called more than once."""


def look_up_keys(
    reader: RowReader, table: int, keys: NDArray[np.int64], out: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Look keys up in the table of that number: writes their vectors to `out`, which is returned.

    Args:
        reader: of the model's rows.
        table: its number.
        keys: int64 [n], contiguous.
        out: float32 [n, embedding_dim], contiguous.
    """
    device = reader.device
    with device.request():
        staged, vectors = device.stage(keys), device.output(out)
        reader.look_up(Lookup(key_segments([staged], [vectors], [table]), np.array([len(staged)]), device.counts(1)))
        device.wait()
        if vectors is not out:
            out[...] = vectors
    return out
