"""Rows that an update stream changes while no store keeps them: in memory, looked up before the table files."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.device.base import Device
from inference_session.device.host import HOST, Readers
from inference_session.kernels.cpu import lookup as cpu
from inference_session.kernels.cpu.lookup import NO_POSITIONS
from inference_session.kernels.cpu.updated_table import UpdatedArrays, count_deleted
from inference_session.kernels.records import SEGMENT, TABLE, Lookup
from inference_session.rows.base import RowWriter
from inference_session.rows.stats import UpdatedTableStats
from inference_session.tables.base import DeviceTables, HotKeys, UpdatedRows
from inference_session.tables.host_tables import map_files
from inference_session.tables.row_numbers import RowNumbers
from inference_session.tables.table_file import TableFile
from inference_session.tables.updated_table import UpdatedTable


class UpdatedRowWriter(RowWriter):
    """Keeps the updated rows of all tables, and makes look-ups find them: on the host, then on each device."""

    def __init__(self, files: Sequence[TableFile], copies: Sequence[DeviceTables] = ()) -> None:
        """`copies`: the tables of GPUs, which get the changed rows as well; the caller closes them."""
        super().__init__()
        self._copies = copies
        self.files = files
        self.specs = [file.spec for file in files]
        self._records = np.array([file.record() for file in files], TABLE)
        self._readers = Readers()
        self.tables = {
            spec.folder: UpdatedTable(np.full(spec.embedding_dim, spec.default_vector, np.float32), self._readers)
            for spec in self.specs
        }
        self._numbers = {spec.folder: number for number, spec in enumerate(self.specs)}
        both = np.concatenate([self._records, self._records])
        self._state = _UpdatedState(both, np.zeros(len(files), np.int64), (None,) * len(files))
        self._writing = threading.Lock()
        count_deleted(np.zeros(0, SEGMENT), self._records, self._state.deleted_addresses, NO_POSITIONS)  # compiles

    def read(self, use: Callable[[_UpdatedState], None]) -> None:
        """Call `use` with what a look-up reads; it stays unchanged until that returns."""
        self._readers.read(lambda: use(self._state))

    def update(self, table: str, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        rows = UpdatedRows(keys, vectors, np.zeros(len(keys), np.bool_))
        self._write(table, rows, lambda: self.tables[table].insert(keys, vectors))

    def erase(self, table: str, keys: NDArray[np.int64]) -> None:
        spec = self.specs[self._numbers[table]]
        defaults = np.full((len(keys), spec.embedding_dim), spec.default_vector, np.float32)
        rows = UpdatedRows(keys, defaults, np.ones(len(keys), np.bool_))
        self._write(table, rows, lambda: self.tables[table].erase(keys))

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        with self._writing:
            yield

    def stats(self) -> dict[str, UpdatedTableStats]:
        """The changed rows by table."""
        return {folder: UpdatedTableStats(table.num_rows, table.num_bytes) for folder, table in self.tables.items()}

    def _write(self, table: str, rows: UpdatedRows, change: Callable[[], None]) -> None:
        """Change a table on the host, then its copies; `rows`: as look-ups answer them from then on."""
        with self._writing, self.log.writing(table, rows.keys):
            change()
            self._renew_state(table)
            self._copy(table, rows)

    def _copy(self, folder: str, updated: UpdatedRows) -> None:
        """Copy these rows to each device. If one fails, the others still get them, and its error is raised. Must be
        called while holding `_writing`.
        """
        with contextlib.ExitStack() as puts:
            for tables in reversed(self._copies):
                puts.callback(tables.put, self._numbers[folder], updated, self.tables[folder].all_rows)

    def _renew_state(self, folder: str) -> None:
        """Make later look-ups find the changed rows of a table. Must be called while holding `_writing`."""
        table, t, state = self.tables[folder], self._numbers[folder], self._state
        deleted_address = table.arrays.deleted.ctypes.data if table.any_deleted else 0
        if state.arrays[t] is table.arrays and state.deleted_addresses[t] == deleted_address:
            return
        records, addresses = state.records.copy(), state.deleted_addresses.copy()
        records[t] = table.record(self._records[t]["default_address"], len(self.specs) + t)
        addresses[t] = deleted_address
        self._state = _UpdatedState(records, addresses, (*state.arrays[:t], table.arrays, *state.arrays[t + 1 :]))


class UpdatedTables(DeviceTables):
    """Tables that the processor looks up: the changed rows of a table, if it has any, then its file."""

    device: Device = HOST

    def __init__(self, writer: UpdatedRowWriter, num_threads: int) -> None:
        """`num_threads`: threads over which a large look-up is split."""
        self._writer = writer
        self._num_threads = num_threads
        self._row_numbers = RowNumbers(writer.specs)

    def look_up(self, lookup: Lookup) -> None:
        self._row_numbers.count_from_start(lookup)
        self._writer.read(lambda state: self._look_up(state, lookup))

    def _look_up(self, state: _UpdatedState, lookup: Lookup) -> None:
        cpu.look_up(state.records, lookup.segments, lookup.num_unknown, NO_POSITIONS, self._num_threads)
        if state.deleted_addresses.any():
            count_deleted(lookup.segments, state.records, state.deleted_addresses, lookup.num_unknown)

    def warm_up(self, hot_keys: HotKeys, deadline: float) -> None:  # noqa: ARG002
        map_files(self._writer.files, deadline)

    def close(self) -> None:
        """See DeviceTables. There is nothing to give back."""


class _UpdatedState(NamedTuple):
    """What one look-up reads."""

    records: NDArray[np.void]
    """TABLE records to begin with, then those of the files behind them."""
    deleted_addresses: NDArray[np.int64]
    """By table, of UpdatedArrays.deleted; 0: nothing has been deleted."""
    arrays: tuple[UpdatedArrays | None, ...]
    """The arrays that the records point to."""
