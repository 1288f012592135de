"""GpuRows: the rows of a version's table files, looked up by one kernel launch into device memory.

Tables lie in device memory as far as `cache_bytes`, or else most of what is free, allows, smallest first; the others in
pinned host memory, where the same kernel reads them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from inference_session.device.cuda import GpuContext
from inference_session.device.cuda_memory import check_free, memory_checked
from inference_session.device.placement import bytes_on_device, placed_on_device
from inference_session.errors import SessionClosedError, UnavailableError
from inference_session.kernels.cuda import launch as gpu
from inference_session.kernels.cuda.records import GPU_TABLE
from inference_session.kernels.records import VectorCode, address_of
from inference_session.rows import MappedRows
from inference_session.rows.gpu_source import GpuSource, Launches
from inference_session.rows.hot_keys import HotKeys
from inference_session.tables.device_rows import BaseRows
from inference_session.tables.table_file import TableFile

_log = logging.getLogger(__name__)
_UPLOAD_BYTES = 64 << 20
_FREE_FRACTION = 0.8
"""Of the free device memory, what tables may take where no setting says: the network and requests need some too."""


class GpuRows(GpuSource, MappedRows):
    """The rows of table files on a GPU."""

    def __init__(
        self, tables: Sequence[TableFile], context: GpuContext, *, num_threads: int, cache_bytes: int | None = None
    ) -> None:
        """Upload what fits, pin the rest.

        Args:
            tables: the version's.
            context: of the GPU.
            num_threads: of `fetch`, which reads the files.
            cache_bytes: most device memory for tables and their indexes; None: most of what is free.

        Raises:
            ConfigurationError: cache_bytes and the tables are more than the device has free, or there is too little
                memory, on the device for the indexes or on the host for the rest.
        """
        super().__init__(tables, num_threads=num_threads)
        self._context = context
        self._launches: Launches | None
        self._defaults: Any
        self._gpu_records: Any
        with cupy.cuda.Device(context.device_id), context.stream:
            with memory_checked(context.device_id, "free some, or set cache_bytes, so that tables stay in host memory"):
                gpu.compile_kernels()
                self._bases = _upload(tables, _budget(tables, cache_bytes, context.device_id))
                self._gpu_records = self._describe(tables)
            self._launches = Launches(self._gpu_records.data.ptr)
            context.stream.synchronize()
        on_host = [t.spec.folder for t, base in zip(tables, self._bases, strict=True) if not base.on_device]
        num_bytes = sum(base.num_bytes for base in self._bases)
        if on_host and cache_bytes is None:  # else it was asked for
            names = ", ".join(map(repr, on_host))
            _log.warning("cuda:%s had no room for tables %s: read from host memory", context.device_id, names)
        self._where = {"device": f"cuda:{context.device_id}", "bytes": num_bytes, "on_host": on_host}

    def look_up(
        self,
        segments: NDArray[np.void],
        num_keys: NDArray[np.int64],  # noqa: ARG002
        num_unknown: NDArray[np.int64],
    ) -> None:
        """See RowSource: launched, not waited for. What the segments lead to has been staged."""
        if self._launches is None:
            raise SessionClosedError("the session has been closed")
        launch, given = self._launches.of(segments)
        launch.run(given, num_unknown_address=address_of(num_unknown))

    def repeated(self, segments: NDArray[np.void], num_unknown: NDArray[np.int64]) -> Callable[[], None]:
        """`look_up` of always the same segments, which lead to other keys each time."""
        if self._launches is None:
            raise SessionClosedError("the session has been closed")
        launch, given = self._launches.of(segments)
        start = launch.repeated(given, address_of(num_unknown), self._context.stream)

        def look_up() -> None:
            if self._launches is None:
                raise SessionClosedError("the session has been closed")
            start()

        return look_up

    def warm_up(self, hot_keys: HotKeys, deadline: float) -> None:
        """See RowSource: the rows are where they are to be."""

    def fetch(self, table: int, keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        """See RowSource: from the files."""
        MappedRows(self._tables, num_threads=self._num_threads).fetch(table, keys, out)

    def stats(self) -> dict[str, Any]:
        """See RowSource. `gpu`: bytes on the device, and tables that are read from host memory."""
        return {**super().stats(), "gpu": {**self._where}}

    def close(self) -> None:
        """See RowSource. A GPU that has failed gives nothing back, but to the end of the process."""
        super().close()
        with contextlib.suppress(UnavailableError), self._context.request():
            for base in self._bases:
                base.close()
            # What follows this version on the device has all of the memory.
            self._bases, self._gpu_records, self._defaults, self._launches = [], None, None, None
            cupy.get_default_memory_pool().free_all_blocks()

    def _describe(self, tables: Sequence[TableFile]) -> Any:
        """GPU_TABLE records, and the default vectors they lead to, on the device."""
        records = np.zeros(len(tables), GPU_TABLE)
        defaults = [np.full(table.spec.embedding_dim, table.spec.default_vector, np.float32) for table in tables]
        dims = np.array([table.spec.embedding_dim for table in tables], np.int64)
        begins = np.cumsum(-(-dims // 4) * 4) - -(-dims // 4) * 4
        self._defaults = cupy.zeros(int(begins[-1] + dims[-1]) if len(dims) else 0, np.float32)
        for record, base, default, begin in zip(records, self._bases, defaults, begins.tolist(), strict=True):
            base.describe(record)
            self._defaults[begin : begin + len(default)] = cupy.asarray(default)
            record["cached_rows"]["wide"] = 1
            record["embedding_dim"] = len(default)
            record["default_address"] = self._defaults.data.ptr + 4 * begin
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
