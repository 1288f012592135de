"""Tables that the processor looks up, where their files are mapped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from inference_session.device.host import HOST
from inference_session.kernels.cpu import lookup as cpu
from inference_session.kernels.cpu.lookup import NO_POSITIONS, BoundLookups
from inference_session.kernels.records import TABLE, Lookup
from inference_session.platform.memory import available_bytes, map_pages
from inference_session.tables.base import DeviceTables, HotKeys
from inference_session.tables.table_file import TableFile


class HostTables(DeviceTables):
    """The records of mapped files, for the CPU kernels."""

    device = HOST

    def __init__(self, files: Sequence[TableFile], *, num_threads: int) -> None:
        """`num_threads`: threads over which a large look-up is split. The caller closes the files."""
        self._files = files
        self.records = np.array([file.record() for file in files], TABLE)
        self._num_threads = num_threads

    def bound_lookups(self) -> BoundLookups | None:
        return BoundLookups(self.records, self._num_threads)

    def look_up(self, lookup: Lookup) -> None:
        cpu.look_up(self.records, lookup.segments, lookup.num_unknown, NO_POSITIONS, self._num_threads)

    def warm_up(self, hot_keys: HotKeys, deadline: float) -> None:  # noqa: ARG002
        map_files(self._files, deadline)

    def close(self) -> None:
        """See DeviceTables. Look-ups under way go on: files stay mapped while an object refers to them."""


def map_files(files: Sequence[TableFile], deadline: float) -> None:
    """Map all pages of the files until `deadline`, if memory has room for them: requests have no page faults then."""
    arrays = [array for file in files for array in file.arrays()]
    if sum(array.nbytes for array in arrays) <= available_bytes():
        for array in arrays:
            map_pages(array, deadline)
