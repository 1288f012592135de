"""The rows of a version's table files, except those that an update stream has changed: these come from memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from inference_session.rows.base import Rows
from inference_session.rows.stats import RowStats
from inference_session.rows.updated import UpdatedRowWriter, UpdatedTables
from inference_session.tables.base import DeviceTables, RowBatch
from inference_session.tables.table_file import TableFile


class FileRows(Rows):
    """The rows of a version's table files, looked up wherever devices have them."""

    readers: Sequence[DeviceTables]

    def __init__(
        self, files: Sequence[TableFile], tables: Sequence[DeviceTables], changes: UpdatedRowWriter | None = None
    ) -> None:
        """Read files.

        Args:
            files: the version's; this object closes them.
            tables: the same tables on each device; this object closes them.
            changes: the rows that were changed since, which `tables` answer as well; None: rows never change.
        """
        self._files = {file.spec.folder: file for file in files}
        self.readers = tables
        self.changes = changes
        if changes is not None:
            self.writer = changes

    def scan(self, table: str) -> Iterator[RowBatch]:
        if self.changes is None:
            yield from self._files[table].scan()
            return
        updated, vectors, deleted = self.changes.tables[table].all_rows()
        yield updated[~deleted], vectors[~deleted]
        for keys, rows in self._files[table].scan():
            unchanged = ~np.isin(keys, updated)
            yield keys[unchanged], rows[unchanged]

    def stats(self) -> RowStats:
        updated = None if self.changes is None else self.changes.stats()
        return RowStats(updated=updated, placement=self.readers[0].placement)

    def close(self) -> None:
        """See Rows. The files stay mapped for look-ups under way."""
        for file in self._files.values():
            file.close()
        for tables in self.readers:
            tables.close()


def changing_rows(files: Sequence[TableFile], *, num_threads: int = 1) -> FileRows:
    """Rows that the processor looks up and an update stream changes; `num_threads`: see HostTables."""
    changes = UpdatedRowWriter(files)
    return FileRows(files, [UpdatedTables(changes, num_threads)], changes)
