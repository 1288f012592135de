"""The rows of a version that never change: its table files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.kernels.cpu.lookup import BoundLookups
from inference_session.kernels.records import Lookup
from inference_session.platform.available_memory import available_bytes
from inference_session.platform.mapped_pages import map_pages
from inference_session.rows.base import Rows
from inference_session.rows.hot_keys import HotKeys
from inference_session.rows.stats import RowStats
from inference_session.tables.base import DeviceTables, RowBatch
from inference_session.tables.table_file import TableFile


class MappedRows(Rows):
    """The rows of a version's table files, looked up wherever a device has them."""

    def __init__(self, files: Sequence[TableFile], tables: DeviceTables) -> None:
        """`tables`: the same ones, for look-ups; both become this object's to close."""
        self._files = {file.spec.folder: file for file in files}
        self._tables = tables
        self.device = tables.device
        self.is_launched = tables.is_launched

    def prepare(self, segments: NDArray[np.void]) -> Any:
        """See Rows."""
        return self._tables.prepare(segments)

    def bound_lookups(self) -> BoundLookups | None:
        """See Rows."""
        return self._tables.bound_lookups()

    def look_up(self, lookup: Lookup) -> None:
        """See Rows."""
        self._tables.look_up(lookup)

    def scan(self, table: str) -> Iterator[RowBatch]:
        """See Rows."""
        return self._files[table].scan()

    def warm_up(self, hot_keys: HotKeys, deadline: float) -> None:  # noqa: ARG002
        """See Rows: all rows are mapped, so that no request waits for the kernel to map them."""
        if self._tables.placement is None:
            map_files(self._files.values(), deadline)

    def stats(self) -> RowStats:
        """See Rows."""
        return RowStats(placement=self._tables.placement)

    def close(self) -> None:
        """See Rows. The files stay mapped for look-ups under way."""
        for file in self._files.values():
            file.close()
        self._tables.close()


def map_files(files: Collection[TableFile], deadline: float) -> None:
    """Map all pages of the files, where there is memory for them."""
    arrays = [array for file in files for array in file.arrays()]
    if sum(array.nbytes for array in arrays) <= available_bytes():
        for array in arrays:
            map_pages(array, deadline)
