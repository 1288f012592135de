"""Tables that a GPU looks up by one kernel launch.

They lie in device memory as far as `cache_bytes`, or else most of what is free, allows, smallest first; the others in
pinned host memory, where the same kernel reads them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from inference_session.device.cuda import CudaDevice
from inference_session.device.cuda_memory import check_free, memory_checked
from inference_session.device.placement import bytes_on_device, placed_on_device
from inference_session.errors import SessionClosedError, UnavailableError
from inference_session.kernels.cuda import launch as gpu
from inference_session.kernels.cuda.records import GPU_TABLE
from inference_session.kernels.records import Lookup, VectorCode, address_of
from inference_session.tables.base import DeviceTables, Placement
from inference_session.tables.device_rows import BaseRows
from inference_session.tables.table_file import TableFile

_log = logging.getLogger(__name__)
_UPLOAD_BYTES = 64 << 20
_FREE_FRACTION = 0.8
"""Of the free device memory, what tables may take where no setting says: the network and requests need some too."""


class CudaTables(DeviceTables):
    """The rows of table files on a GPU."""

    is_launched = True

    def __init__(self, files: Sequence[TableFile], device: CudaDevice, *, cache_bytes: int | None = None) -> None:
        """Upload what fits, pin the rest.

        Args:
            files: the version's; they are the caller's to close.
            device: the GPU.
            cache_bytes: most device memory for tables and their indexes; None: most of what is free.

        Raises:
            ConfigurationError: cache_bytes and the tables are more than the device has free, or there is too little
                memory, on the device for the indexes or on the host for the rest.
        """
        self.device = self._cuda = device
        self._defaults: Any
        self._records: Any
        with cupy.cuda.Device(device.device_id), device.stream:
            with memory_checked(device.device_id, "free some memory, or set cache_bytes to keep tables in host memory"):
                gpu.compile_kernels()
                self._bases = _upload(files, _budget(files, cache_bytes, device.device_id))
                self._records = self._describe(files)
            device.stream.synchronize()
        on_host = [file.spec.folder for file, base in zip(files, self._bases, strict=True) if not base.on_device]
        if on_host and cache_bytes is None:  # else it was asked for
            names = ", ".join(map(repr, on_host))
            _log.warning("%s has no room for tables %s; they are read from host memory", device.name, names)
        self._placement = Placement(device.name, sum(base.num_bytes for base in self._bases), on_host)

    @property
    def placement(self) -> Placement:
        """See DeviceTables."""
        return self._placement

    def prepare(self, segments: NDArray[np.void]) -> gpu.Launch:
        """See DeviceTables."""
        if self._records is None:
            raise SessionClosedError("the session has been closed")
        return gpu.prepare(segments, self._records.data.ptr)

    def look_up(self, lookup: Lookup) -> None:
        """See DeviceTables: launched, not waited for."""
        if self._records is None:
            raise SessionClosedError("the session has been closed")
        if lookup.repeat is not None:
            lookup.repeat()
        else:
            gpu.start(lookup, self._records.data.ptr, num_unknown_address=address_of(lookup.num_unknown))

    def close(self) -> None:
        """See DeviceTables. A GPU that has failed gives nothing back until the process ends."""
        with contextlib.suppress(UnavailableError), self._cuda.request():
            for base in self._bases:
                base.close()
            # What follows this version on the device has all of the memory.
            self._bases, self._records, self._defaults = [], None, None
            cupy.get_default_memory_pool().free_all_blocks()

    def _describe(self, files: Sequence[TableFile]) -> Any:
        """GPU_TABLE records, and the default vectors they lead to, on the device."""
        dims = np.array([file.spec.embedding_dim for file in files], np.int64)
        begins = np.cumsum(-(-dims // 4) * 4) - -(-dims // 4) * 4
        self._defaults = cupy.zeros(int(begins[-1] + dims[-1]) if len(dims) else 0, np.float32)
        records = np.zeros(len(files), GPU_TABLE)
        for i, (file, base, begin) in enumerate(zip(files, self._bases, begins.tolist(), strict=True)):
            default = np.full(file.spec.embedding_dim, file.spec.default_vector, np.float32)
            self._defaults[begin : begin + len(default)] = cupy.asarray(default)
            records[i] = base.record(self._defaults.data.ptr + 4 * begin)
        return cupy.asarray(records.view(np.uint8).reshape(-1))


def _budget(tables: Sequence[TableFile], cache_bytes: int | None, device_id: int) -> int:
    """Bytes that tables may take on the current device."""
    if cache_bytes is None:
        return int(cupy.cuda.runtime.memGetInfo()[0] * _FREE_FRACTION)
    check_free(min(cache_bytes, sum(bytes_on_device(table.spec) for table in tables)), device_id, "cache_bytes")
    return cache_bytes


def _upload(tables: Sequence[TableFile], budget: int) -> list[BaseRows]:
    """The rows of each table, on the device while the budget lasts."""
    on_device = placed_on_device([table.spec for table in tables], budget)
    return [_base_rows(table, is_placed) for table, is_placed in zip(tables, on_device, strict=True)]


def _base_rows(table: TableFile, on_device: bool) -> BaseRows:
    keys = None if table.spec.keys == "row_number" else table.keys()
    vectors = _uploaded(table.vectors) if on_device else table.vectors
    return BaseRows(keys, vectors, table.spec.embedding_dim, code=VectorCode[table.spec.dtype.upper()])


def _uploaded(rows: NDArray[Any]) -> Any:
    """A copy on the device, made in pieces: in one, CuPy would pin as much host memory, and keep it."""
    on_device = cupy.empty(rows.shape, rows.dtype)
    rows_per_piece = max(_UPLOAD_BYTES * len(rows) // max(rows.nbytes, 1), 1)
    for begin in range(0, len(rows), rows_per_piece):
        piece = slice(begin, begin + rows_per_piece)
        on_device[piece].set(np.ascontiguousarray(rows[piece]))
    return on_device
