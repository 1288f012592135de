"""The rows of a version's table files, except those that an update stream has changed: these come from memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from inference_session.kernels.cpu.lookup import BoundLookups
from inference_session.kernels.records import Lookup, PreparedLookup
from inference_session.platform.memory import available_bytes, map_pages
from inference_session.rows.base import Rows
from inference_session.rows.hot_keys import HotKeys
from inference_session.rows.stats import RowStats
from inference_session.rows.updated import TableWriter, UpdatedTables
from inference_session.tables.base import DeviceTables, RowBatch
from inference_session.tables.table_file import TableFile


class FileRows(Rows):
    """The rows of a version's table files, looked up wherever a device has them."""

    def __init__(self, files: Sequence[TableFile], tables: DeviceTables, changes: TableWriter | None = None) -> None:
        """Read files.

        Args:
            files: the version's; this object closes them.
            tables: the same tables, for look-ups; this object closes them.
            changes: the rows that were changed since, which `tables` answers as well; None: rows never change.
        """
        self._files = {file.spec.folder: file for file in files}
        self._tables = tables
        self.device = tables.device
        self.is_launched = tables.is_launched
        self.changes = changes
        if changes is not None:
            self.writer = changes

    def prepare(self, segments: NDArray[np.void]) -> PreparedLookup | None:
        return self._tables.prepare(segments)

    def repeated(self, lookup: Lookup) -> Callable[[], None]:
        return self._tables.repeated(lookup)

    def bound_lookups(self) -> BoundLookups | None:
        return self._tables.bound_lookups()

    def look_up(self, lookup: Lookup) -> None:
        self._tables.look_up(lookup)

    def scan(self, table: str) -> Iterator[RowBatch]:
        if self.changes is None:
            yield from self._files[table].scan()
            return
        updated, vectors, deleted = self.changes.tables[table].all_rows()
        yield updated[~deleted], vectors[~deleted]
        for keys, rows in self._files[table].scan():
            unchanged = ~np.isin(keys, updated)
            yield keys[unchanged], rows[unchanged]

    def warm_up(self, hot_keys: HotKeys, deadline: float) -> None:  # noqa: ARG002
        """See Rows. Maps all pages of files that the host reads, if memory has room: requests have no page faults."""
        arrays = [array for file in self._files.values() for array in file.arrays()]
        if self._tables.placement is None and sum(array.nbytes for array in arrays) <= available_bytes():
            for array in arrays:
                map_pages(array, deadline)

    def stats(self) -> RowStats:
        updated = None if self.changes is None else self.changes.stats()
        return RowStats(updated=updated, placement=self._tables.placement)

    def close(self) -> None:
        """See Rows. The files stay mapped for look-ups under way."""
        for file in self._files.values():
            file.close()
        self._tables.close()


def changing_rows(files: Sequence[TableFile], *, num_threads: int = 1) -> FileRows:
    """Rows that the processor looks up and an update stream changes; `num_threads`: see HostTables."""
    changes = TableWriter(files)
    return FileRows(files, UpdatedTables(changes, num_threads), changes)
