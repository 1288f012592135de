"""Tables that a GPU looks up by one kernel launch, wherever they lie: in its memory, in another's, or in the host's."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from inference_session.device.cuda import CudaDevice
from inference_session.device.cuda_memory import memory_checked
from inference_session.errors import SessionClosedError, UnavailableError
from inference_session.kernels.cuda import launch as gpu
from inference_session.kernels.cuda.records import GPU_TABLE, regions_of
from inference_session.kernels.records import Lookup, VectorCode, address_of, key_segments
from inference_session.model_spec import TableSpec
from inference_session.tables.base import DeviceTables, Placement, UpdatedRows
from inference_session.tables.cuda.local_copies import LocalCopies, pieces_of, repeat_copying
from inference_session.tables.cuda.table import CudaTable, Shards
from inference_session.tables.cuda.updated_table import CudaUpdatedTable
from inference_session.tables.table_file import TableFile

_UPLOAD_BYTES = 64 << 20


class CudaTables(DeviceTables):
    """The rows of table files as one GPU looks them up."""

    is_launched = True

    def __init__(
        self,
        files: Sequence[TableFile],
        device: CudaDevice,
        vectors: Sequence[Any],
        placement: Placement,
        *,
        rows_change: bool,
        copy_bytes: Mapping[int, int] | None,
    ) -> None:
        """Use `placed_tables.open_cuda_tables`.

        Args:
            files: the version's; the caller closes them.
            device: the GPU.
            vectors: of each table: Shards, an array in host memory, or None: then this GPU gets a copy of the file's.
            placement: where they lie; the bytes are counted here.
            rows_change: whether `put` may be called.
            copy_bytes: by number of the table, most memory for copies of its hot rows that lie on other GPUs; of
                float32 tables that do not change.

        Raises:
            ConfigurationError: there is too little memory, on the device or on the host.
        """
        self.device = self._cuda = device
        sharded = [each for each in vectors if isinstance(each, Shards)]
        narrow_rows = any(file.spec.dtype != "float32" for file in files)
        self._variant = gpu.Variant(len(sharded[0].arrays) if sharded else 1, rows_change, narrow_rows)
        self._updated: dict[int, CudaUpdatedTable] = {}
        """By table; tables without changes are not in it."""
        self._shard_devices = {array.device.id for each in sharded for array in each.arrays}
        self._defaults: Any
        self._records: Any
        self._scratch = gpu.Scratch()
        with cupy.cuda.Device(device.device_id), device.stream:
            with memory_checked(device.device_id, "free some memory, or set cache_bytes to keep tables in host memory"):
                gpu.compile_kernels(self._variant)
                self._tables = [_cuda_table(file, each) for file, each in zip(files, vectors, strict=True)]
                self._copies = {
                    t: _local_copies(files[t].spec, vectors[t], device, num_bytes)
                    for t, num_bytes in (copy_bytes or {}).items()
                }
                self._host_records = self._describe(files)
                self._records = cupy.asarray(self._host_records.view(np.uint8).reshape(-1))
            device.stream.synchronize()
        self._placement = placement._replace(bytes=sum(table.num_bytes for table in self._tables))
        self._copying = repeat_copying(self.copy_hot_rows) if self._copies else None
        self._close_shared: Callable[[], object] = _nothing

    def keep(self, close: Callable[[], object]) -> None:
        """Call this once look-ups have ended: it gives back memory that other processes share."""
        self._close_shared = finalizer = weakref.finalize(self, close)
        finalizer.atexit = False  # the driver may have ended by then

    @property
    def placement(self) -> Placement:
        changed = sum(rows.num_bytes for rows in [*self._updated.values()])
        copied = sum(copies.num_bytes for copies in [*self._copies.values()])
        return self._placement._replace(bytes=self._placement.bytes + changed + copied)

    def prepare(self, segments: NDArray[np.void]) -> gpu.Launch:
        if self._records is None:
            raise SessionClosedError("the session has been closed")
        num_rows = np.array([table.num_host_rows for table in self._tables], np.int64)
        row_bytes = np.array([table.row_bytes for table in self._tables], np.int64)
        with self._cuda.request():  # kernels are those of the current device
            return gpu.prepare(
                segments,
                self._records.data.ptr,
                variant=self._variant,
                regions=regions_of(segments, num_rows, row_bytes),
                scratch=self._scratch,
            )

    def repeated(self, lookup: Lookup) -> Callable[[], None]:
        return self.prepare(lookup.segments).repeated(address_of(lookup.num_unknown))

    def look_up(self, lookup: Lookup) -> None:
        """See DeviceTables: launched, not waited for."""
        if self._records is None:
            raise SessionClosedError("the session has been closed")
        if lookup.repeat is not None:
            lookup.repeat()
        else:
            launch = gpu.launch_of(lookup, self._records.data.ptr, variant=self._variant)
            launch.run(lookup.segments, num_unknown_address=address_of(lookup.num_unknown))

    def put(self, table: int, updated: UpdatedRows, all_updated: Callable[[], UpdatedRows]) -> None:
        """See DeviceTables. Look-ups that were recorded find the rows as well."""
        if self._records is None:
            raise SessionClosedError("the session has been closed")
        rows = self._updated.get(table)
        if rows is None or not rows.put(updated):
            self._replace(table, self._holding(table, all_updated()))

    def _holding(self, table: int, updated: UpdatedRows) -> CudaUpdatedTable:
        """A table that holds these rows, and has room for as many more."""
        dim, num_rows = int(self._host_records[table]["embedding_dim"]), 2 * len(updated.keys)
        while not (rows := CudaUpdatedTable(self._cuda, dim, num_rows)).put(updated):
            num_rows += num_rows // 8 + 1
        return rows

    def _replace(self, table: int, rows: CudaUpdatedTable) -> None:
        """Let look-ups read these rows."""
        with self._cuda.request():
            if self._records is None:
                raise SessionClosedError("the session has been closed")
            self._read_first(table, rows.index, rows.rows)
            self._updated[table] = rows  # the memory of those before is free from here on

    def _read_first(self, table: int, index: NDArray[np.void], rows: NDArray[np.void]) -> None:
        """Let look-ups search this index before the table's own, within a request of the device."""
        record = self._host_records[table]
        record["cached"], record["cached_rows"] = index, rows
        begin = table * GPU_TABLE.itemsize
        self._records[begin : begin + GPU_TABLE.itemsize].set(record.reshape(1).view(np.uint8))
        self._cuda.wait()

    def copy_hot_rows(self) -> int:
        """Copy rows of other GPUs that look-ups have read often; returns how many.

        Raises:
            UnavailableError: the device has failed, or has too little memory.
        """
        num_copied = 0
        for table, copies in [*self._copies.items()]:
            for keys in pieces_of(copies.hot_keys()):
                with self._cuda.request():
                    if self._records is None:
                        return num_copied
                    self._copy(table, copies, keys)
                num_copied += len(keys)
        return num_copied

    def _copy(self, table: int, copies: LocalCopies, keys: NDArray[np.int64]) -> None:
        on_device = cupy.asarray(keys)
        vectors = cupy.empty((len(keys), int(self._host_records[table]["embedding_dim"])), np.float32)
        segments = key_segments([on_device], [vectors], [table])
        gpu.prepare(segments, self._records.data.ptr, variant=self._variant).run()
        copies.write(on_device, vectors)
        if not self._host_records[table]["cached"]["num_buckets"]:
            self._read_first(table, copies.index, copies.rows)

    def close(self) -> None:
        """See DeviceTables. A failed GPU frees no memory until the process ends."""
        if self._copying is not None:
            self._copying.close()
            self._copying = None
        with contextlib.suppress(UnavailableError), self._cuda.request():
            for table in self._tables:
                table.close()
            # The next version on the device can use all of the memory.
            self._tables, self._records, self._defaults, self._updated, self._copies = [], None, None, {}, {}
            self._scratch = gpu.Scratch()
            for device_id in self._shard_devices | {self._cuda.device_id}:
                with cupy.cuda.Device(device_id):
                    cupy.get_default_memory_pool().free_all_blocks()
        self._close_shared()

    def _describe(self, files: Sequence[TableFile]) -> NDArray[np.void]:
        """GPU_TABLE records; the default vectors that they point to are on the device."""
        dims = np.array([file.spec.embedding_dim for file in files], np.int64)
        begins = np.cumsum(-(-dims // 4) * 4) - -(-dims // 4) * 4
        self._defaults = cupy.zeros(int(begins[-1] + dims[-1]) if len(dims) else 0, np.float32)
        records = np.zeros(len(files), GPU_TABLE)
        for i, (file, table, begin) in enumerate(zip(files, self._tables, begins.tolist(), strict=True)):
            default = np.full(file.spec.embedding_dim, file.spec.default_vector, np.float32)
            self._defaults[begin : begin + len(default)] = cupy.asarray(default)
            records[i] = table.record(self._defaults.data.ptr + 4 * begin)
        for t, copies in self._copies.items():
            records[t]["samples_address"], records[t]["max_sampled"] = copies.samples_address, copies.max_sampled
        return records


def _nothing() -> None:
    """There is no shared memory."""


def _local_copies(spec: TableSpec, shards: Shards, device: CudaDevice, num_bytes: int) -> LocalCopies:
    return LocalCopies(device, spec.embedding_dim, spec.num_rows - len(shards.arrays[shards.this]), num_bytes)


def _cuda_table(file: TableFile, vectors: Any) -> CudaTable:
    keys = None if file.spec.keys == "row_number" else file.keys()
    if vectors is None:
        vectors = _uploaded(file.vectors)
    return CudaTable(keys, vectors, file.spec.embedding_dim, code=VectorCode[file.spec.dtype.upper()])


def _uploaded(rows: NDArray[Any]) -> Any:
    """A copy on the device."""
    on_device = cupy.empty(rows.shape, rows.dtype)
    for piece in pieces(rows, 1):
        on_device[piece].set(np.ascontiguousarray(rows[piece]))
    return on_device


def pieces(rows: NDArray[Any], multiple: int) -> Iterator[slice]:
    """Rows [n, …] to upload at once, a multiple: for all at once, CuPy would pin as much host memory, and keep it."""
    rows_per_piece = max(_UPLOAD_BYTES * len(rows) // max(rows.nbytes, 1) // multiple, 1) * multiple
    return (slice(begin, begin + rows_per_piece) for begin in range(0, len(rows), rows_per_piece))
