"""The rows of a version's table files, changed by an update stream while no store keeps them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.device.readers import Readers
from inference_session.kernels.cpu import lookup as cpu
from inference_session.kernels.cpu.lookup import NO_POSITIONS
from inference_session.kernels.cpu.updated_table import UpdatedArrays, count_deleted
from inference_session.kernels.records import SEGMENT
from inference_session.parameter_server.base import Rows
from inference_session.rows.mapped import MappedRows
from inference_session.tables.row_numbers import aliases_of
from inference_session.tables.table_file import TableFile
from inference_session.tables.updated_table import UpdatedTable


class UpdatableRows(MappedRows):
    """The rows of a version's table files, and in front of them those that were changed since, in memory.

    A table without changes is read as MappedRows does; otherwise keys are searched among the changed rows first.
    """

    def __init__(self, tables: Sequence[TableFile], *, num_threads: int) -> None:
        """As MappedRows."""
        super().__init__(tables, num_threads=num_threads)
        self._specs = [table.spec for table in tables]
        self._readers = Readers()
        defaults = [np.full(spec.embedding_dim, spec.default_vector, np.float32) for spec in self._specs]
        self._updated = [UpdatedTable(default, self._readers) for default in defaults]
        both = np.concatenate([self._records, self._records])
        self._state = _UpdatedState(both, np.zeros(len(tables), np.int64), (None,) * len(tables))
        self._writing = threading.Lock()
        count_deleted(np.zeros(0, SEGMENT), self._records, self._state.deleted_addresses, NO_POSITIONS)  # compiles

    def look_up(
        self,
        segments: NDArray[np.void],
        num_keys: NDArray[np.int64],  # noqa: ARG002
        num_unknown: NDArray[np.int64],
    ) -> None:
        """See RowSource."""
        reader = self._readers.enter()
        try:
            state = self._state
            cpu.lookup(state.records, segments, num_unknown, NO_POSITIONS, self._num_threads)
            if state.deleted_addresses.any():
                count_deleted(segments, state.records, state.deleted_addresses, num_unknown)
        finally:
            self._readers.leave(reader)

    def update(self, table: int, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """See RowSource."""
        aliases, original = aliases_of(self._specs[table], keys)
        rows = vectors if aliases is keys else vectors[original]
        with self._writing:
            self._updated[table].insert(aliases, rows)
            self._publish(table)

    def erase(self, table: int, keys: NDArray[np.int64]) -> None:
        """See RowSource."""
        with self._writing:
            self._updated[table].erase(aliases_of(self._specs[table], keys)[0])
            self._publish(table)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """See RowSource."""
        with self._writing:
            yield

    def scan(self, table: int) -> Iterator[Rows]:
        """See RowSource."""
        changed, vectors, deleted = self._updated[table].held()
        # A row number that counts from the end is the row's other key.
        kept = ~deleted if self._specs[table].keys == "stored" else ~deleted & (changed >= 0)
        yield changed[kept], vectors[kept]
        for keys, rows in self._tables[table].scan():
            unchanged = ~np.isin(keys, changed)
            yield keys[unchanged], rows[unchanged]

    def stats(self) -> dict[str, Any]:
        """See RowSource. The changed rows are under `updated`."""
        updated = {
            spec.folder: {"rows": table.num_rows, "bytes": table.num_bytes}
            for spec, table in zip(self._specs, self._updated, strict=True)
        }
        return {**super().stats(), "updated": updated}

    def _publish(self, t: int) -> None:
        """Have later look-ups find the changed rows of a table. Must be called while holding `_writing`."""
        table, state = self._updated[t], self._state
        deleted_address = table.arrays.deleted.ctypes.data if table.any_deleted else 0
        if state.held[t] is table.arrays and state.deleted_addresses[t] == deleted_address:
            return
        records, addresses = state.records.copy(), state.deleted_addresses.copy()
        records[t] = table.record(self._records[t]["default_address"], len(self._specs) + t)
        addresses[t] = deleted_address
        self._state = _UpdatedState(records, addresses, (*state.held[:t], table.arrays, *state.held[t + 1 :]))


class _UpdatedState(NamedTuple):
    """What one look-up of UpdatableRows reads."""

    records: NDArray[np.void]
    """TABLE records to begin with, then those of the files behind them."""
    deleted_addresses: NDArray[np.int64]
    """By table, of UpdatedArrays.deleted; 0: nothing has been deleted."""
    held: tuple[UpdatedArrays | None, ...]
    """What the records lead to."""
