"""The rows of a version that never change: its table files, mapped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from inference_session.kernels.cpu import lookup as cpu
from inference_session.kernels.cpu.lookup import NO_POSITIONS
from inference_session.kernels.records import TABLE
from inference_session.parameter_server.base import Rows
from inference_session.platform.available_memory import available_bytes
from inference_session.platform.mapped_pages import map_pages
from inference_session.rows.base import RowSource
from inference_session.rows.hot_keys import HotKeys
from inference_session.tables.table_file import TableFile


class MappedRows(RowSource):
    """The rows of a version's table files, all of them there."""

    def __init__(self, tables: Sequence[TableFile], *, num_threads: int) -> None:
        """`num_threads`: threads over which a large look-up is split."""
        self._tables = tables
        self._records = np.array([table.record() for table in tables], TABLE)
        self._num_threads = num_threads

    def look_up(
        self,
        segments: NDArray[np.void],
        num_keys: NDArray[np.int64],  # noqa: ARG002
        num_unknown: NDArray[np.int64],
    ) -> None:
        """See RowSource."""
        cpu.lookup(self._records, segments, num_unknown, NO_POSITIONS, self._num_threads)

    def warm_up(self, hot_keys: HotKeys, deadline: float) -> None:  # noqa: ARG002
        """See RowSource: all rows are mapped, so that no request has to wait for the kernel to do it."""
        arrays = [array for table in self._tables for array in table.arrays()]
        if sum(array.nbytes for array in arrays) <= available_bytes():
            for array in arrays:
                map_pages(array, deadline)

    def scan(self, table: int) -> Iterator[Rows]:
        """See RowSource."""
        return self._tables[table].scan()

    def close(self) -> None:
        """See RowSource. The files stay mapped for look-ups under way."""
        for table in self._tables:
            table.close()
