"""Tables that a GPU looks up by one kernel launch, wherever they lie: in its memory, in another's, or in the host's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from inference_session.device.cuda import CudaDevice
from inference_session.device.cuda_memory import memory_checked
from inference_session.errors import SessionClosedError, UnavailableError
from inference_session.kernels.cuda import launch as gpu
from inference_session.kernels.cuda.records import GPU_TABLE
from inference_session.kernels.records import Lookup, VectorCode, address_of
from inference_session.tables.base import DeviceTables, Placement
from inference_session.tables.device_rows import BaseRows, Shards
from inference_session.tables.table_file import TableFile

_UPLOAD_BYTES = 64 << 20


class CudaTables(DeviceTables):
    """The rows of table files as one GPU looks them up."""

    is_launched = True

    def __init__(
        self, files: Sequence[TableFile], device: CudaDevice, vectors: Sequence[Any], placement: Placement
    ) -> None:
        """Use `placed_tables.open_cuda_tables`.

        Args:
            files: the version's; they are the caller's to close.
            device: the GPU.
            vectors: of each table: Shards, an array in host memory, or None, of which this GPU gets a copy.
            placement: where they lie; the bytes are counted here.

        Raises:
            ConfigurationError: there is too little memory, on the device or on the host.
        """
        self.device = self._cuda = device
        sharded = [each for each in vectors if isinstance(each, Shards)]
        self._num_shards = len(sharded[0].arrays) if sharded else 1
        self._shard_devices = {array.device.id for each in sharded for array in each.arrays}
        self._defaults: Any
        self._records: Any
        with cupy.cuda.Device(device.device_id), device.stream:
            with memory_checked(device.device_id, "free some memory, or set cache_bytes to keep tables in host memory"):
                gpu.compile_kernels(self._num_shards)
                self._bases = [_base_rows(file, each) for file, each in zip(files, vectors, strict=True)]
                self._records = self._describe(files)
            device.stream.synchronize()
        self._placement = placement._replace(bytes=sum(base.num_bytes for base in self._bases))

    @property
    def placement(self) -> Placement:
        """See DeviceTables."""
        return self._placement

    def prepare(self, segments: NDArray[np.void]) -> gpu.Launch:
        """See DeviceTables."""
        if self._records is None:
            raise SessionClosedError("the session has been closed")
        with self._cuda.request():  # kernels are those of the current device
            return gpu.prepare(segments, self._records.data.ptr, num_shards=self._num_shards)

    def look_up(self, lookup: Lookup) -> None:
        """See DeviceTables: launched, not waited for."""
        if self._records is None:
            raise SessionClosedError("the session has been closed")
        if lookup.repeat is not None:
            lookup.repeat()
        else:
            gpu.start(
                lookup,
                self._records.data.ptr,
                num_unknown_address=address_of(lookup.num_unknown),
                num_shards=self._num_shards,
            )

    def close(self) -> None:
        """See DeviceTables. A failed GPU frees no memory until the process ends."""
        with contextlib.suppress(UnavailableError), self._cuda.request():
            for base in self._bases:
                base.close()
            # The next version on the device can use all of the memory.
            self._bases, self._records, self._defaults = [], None, None
            for device_id in self._shard_devices | {self._cuda.device_id}:
                with cupy.cuda.Device(device_id):
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


def _base_rows(table: TableFile, vectors: Any) -> BaseRows:
    keys = None if table.spec.keys == "row_number" else table.keys()
    if vectors is None:
        vectors = _uploaded(table.vectors)
    return BaseRows(keys, vectors, table.spec.embedding_dim, code=VectorCode[table.spec.dtype.upper()])


def _uploaded(rows: NDArray[Any]) -> Any:
    """A copy on the device."""
    on_device = cupy.empty(rows.shape, rows.dtype)
    for piece in pieces(rows, 1):
        on_device[piece].set(np.ascontiguousarray(rows[piece]))
    return on_device


def pieces(rows: NDArray[Any], multiple: int) -> Iterator[slice]:
    """Rows to upload at once, a multiple: to upload all at once, CuPy would pin as much host memory, and keep it."""
    rows_per_piece = max(_UPLOAD_BYTES * len(rows) // max(rows.nbytes, 1) // multiple, 1) * multiple
    return (slice(begin, begin + rows_per_piece) for begin in range(0, len(rows), rows_per_piece))
