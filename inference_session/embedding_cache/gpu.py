"""GpuEmbeddingCache: rows in device memory, looked up by one kernel launch for all tables of a request.

Look-ups run on whatever stream is CuPy's current one and wait for nobody. Writers take turns, also across streams, and
wait on the device until the look-ups that may still read a replaced row have ended (kernels/cuda/write.cu): the host
waits for neither.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, get_args

import cupy
import numpy as np
from numpy.typing import ArrayLike, NDArray

from inference_session.device.cuda_memory import check_free, memory_checked
from inference_session.embedding_cache.base import (
    ROW_COUNTS,
    EmbeddingCache,
    LookupResult,
    check_keys,
    check_range,
    check_vectors,
)
from inference_session.embedding_cache.gpu_budget import (
    aligned,
    buckets_per_table,
    buckets_to_hold,
    fixed_bytes,
    table_bytes,
)
from inference_session.embedding_cache.gpu_results import Geometry, Missing, Vectors
from inference_session.errors import ConfigurationError, InvalidRequestError, SessionClosedError
from inference_session.kernels.cuda import launch as gpu
from inference_session.kernels.cuda.records import (
    BUCKET_BYTES,
    EVENTS,
    GPU_TABLE,
    INDEX,
    READERS_BYTES,
    ROWS,
    SLOTS,
    divide,
    index_bytes,
    is_wide,
)
from inference_session.kernels.records import SEGMENT, VectorCode
from inference_session.model_spec import VectorType, bytes_per_row
from inference_session.tables.device_rows import BaseRows, check_base

_KEYS_PER_WRITE = 1 << 20
_MAX_GEOMETRIES = 1024
_MAX_REMEMBERED = 64
_WORD_BYTES = 4
_INT64, _INT32, _FLOAT32 = np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.float32)


class _Prepared(NamedTuple):
    """A look-up of certain arrays, ready to launch."""

    geometry: Geometry
    launch: gpu.Launch
    copies: Sequence[Any]
    """Keys that it reads which are not the caller's own arrays: they must live until it has been launched."""
    watched: Sequence[weakref.ref[Any]] = ()


class GpuEmbeddingCache(EmbeddingCache):
    """The GPU twin: CuPy arrays in and out, NumPy's are copied. Tables have the same number of rows, or all they need.

    It caches within sets of 62 rows, not freely as the CPU twin does: from about seven tenths of its capacity on, a row
    may be evicted while there is space elsewhere.
    """

    def __init__(
        self,
        dims: Mapping[str, int],
        cache_bytes: int,
        *,
        device_id: int = 0,
        dtype: VectorType = "float32",
        backing: Mapping[str, tuple[ArrayLike, ArrayLike]] | None = None,
        num_rows: Mapping[str, int] | None = None,
    ) -> None:
        """Allocate the cache, and index the backing rows.

        Args:
            dims: embedding_dim of each table by name.
            cache_bytes: upper bound on all memory that the cache allocates and keeps on the device; the index over
                backing rows (24 bytes a row, 30 of hundreds of millions) is not part of it, nor are results, nor what
                a write needs meanwhile.
            device_id: number of the GPU.
            dtype: how rows are held. float16 rounds to nearest, int8 as `quantise_int8` says.
            backing: keys int64 [n] and vectors float32 [n, embedding_dim] that misses are served from, by table. They
                are pinned where they lie, or where that cannot be, copied to pinned memory.
            num_rows: rows that tables have in all, as far as known; what they leave over goes to the others.

        Raises:
            ConfigurationError: cache_bytes is too small for the tables, or the device has too little memory free; the
                message says how much there is.
        """
        super().__init__(dims)
        if dtype not in get_args(VectorType):
            raise ConfigurationError(f"dtype {dtype!r} is none of {', '.join(get_args(VectorType))}")
        for table in backing or {}:
            self._check(table)
        self.cache_bytes = cache_bytes
        self.dtype = dtype
        self.device = cupy.cuda.Device(device_id)
        self._row_bytes = [bytes_per_row(dim, dtype) for dim in dims.values()]
        limits = [buckets_to_hold((num_rows or {}).get(table)) for table in dims]
        self._num_buckets = buckets_per_table(cache_bytes, self._row_bytes, limits)
        self._write_lock = Lock()
        self._geometries: dict[Any, Geometry] = {}
        self._num_keys_before = np.zeros(len(dims), np.int64)
        self._num_keys_forgotten = np.zeros(len(dims), np.int64)
        self._num_missing_forgotten = np.zeros(len(dims), np.int64)
        self._remembered: dict[Any, _Prepared] = {}
        self._seen: set[int] = set()
        self._seeds = itertools.count()
        with self.device, memory_checked(device_id, "ask for a smaller cache, or free some"):
            gpu.compile_kernels()
            self._allocate(VectorCode[dtype.upper()])
            self._base = self._index_backing(backing or {})
            self._written = cupy.cuda.Event(disable_timing=True)
            self._upload_tables()
            cupy.cuda.get_current_stream().synchronize()

    def lookup(
        self, keys: Mapping[str, ArrayLike], out: Mapping[str, Any] | None = None, wait: bool = False
    ) -> LookupResult:
        """See EmbeddingCache. One launch on CuPy's current stream; nothing is waited for but what `wait` says, unless
        keys are on the host. `missing` waits when it is read.
        """
        if self._closed:
            raise SessionClosedError("the embedding cache has been closed")
        if cupy.cuda.runtime.getDevice() == self.device.id:  # switching costs more than the launch
            return self._look_up(keys, out, wait)
        with self.device:
            return self._look_up(keys, out, wait)

    def insert(self, table: str, keys: ArrayLike, vectors: ArrayLike) -> None:
        """See EmbeddingCache. On CuPy's current stream, after the writes before; the host does not wait for it."""
        self._write(table, keys, vectors, may_insert=True)

    def update(self, table: str, keys: ArrayLike, vectors: ArrayLike) -> None:
        """See EmbeddingCache; runs as `insert` does."""
        self._write(table, keys, vectors, may_insert=False)

    def erase(self, table: str, keys: ArrayLike) -> None:
        """See EmbeddingCache; runs as `insert` does."""
        checked = self._checked_keys(table, keys)
        with self._writing(table) as writer:
            if len(checked) and writer is not None:
                writer.erase(_on_device(checked, np.int64))

    def dump(self, table: str) -> Any:
        """See EmbeddingCache: int64 [n] on the device."""
        with self._writing(table) as writer:
            return cupy.empty(0, np.int64) if writer is None else writer.dump()

    def _dump_to_host(self, table: str) -> NDArray[np.int64]:
        keys: NDArray[np.int64] = cupy.asnumpy(self.dump(table))
        return keys

    def stats(self) -> dict[str, Any]:
        """See EmbeddingCache. `misses` counts keys that backing rows answered as well. Waits for the current stream."""
        with self._write_lock:
            if self._closed:
                raise SessionClosedError("the embedding cache has been closed")
            with self.device:
                self._counts = self._read_events()
            with self._count_lock:
                self._num_keys[:] = self._keys_asked() - self._num_keys_forgotten
                self._num_missing[:] = self._counts[:, EVENTS.index("misses")] - self._num_missing_forgotten
        return super().stats()

    def forget_lookups(self) -> None:
        """See EmbeddingCache. Waits for the current stream."""
        self.stats()
        with self._count_lock:
            self._num_keys_forgotten += self._num_keys
            self._num_missing_forgotten += self._num_missing
            self._num_keys[:] = self._num_missing[:] = 0

    def close(self) -> None:
        """See EmbeddingCache."""
        with self._write_lock:
            if self._closed:
                return
            with self._count_lock:
                self._closed = True
            with self.device:
                self.device.synchronize()
                for base in self._base.values():
                    base.close()
                self._remembered.clear()
                del self._memory

    def __repr__(self) -> str:
        if self._closed:
            return "<GpuEmbeddingCache closed>"
        stats = self.stats()
        return f"<GpuEmbeddingCache [{len(self.dims)} tables, {stats['rows']} of {stats['capacity']} rows]>"

    def _allocate(self, code: VectorCode) -> None:
        """One piece of device memory for everything."""
        sizes = [table_bytes(*pair) for pair in zip(self._num_buckets, self._row_bytes, strict=True)]
        self._fixed_bytes = fixed_bytes(len(sizes))
        total = self._fixed_bytes + sum(sizes)
        check_free(total, self.device.id, "cache_bytes")
        self._memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(total), 0)
        self._memory.memset_async(0, self._fixed_bytes)
        self._readers_address: int = self._memory.ptr
        self._events_address: int = self._memory.ptr + aligned(READERS_BYTES)
        self._tables_address = self._events_address + aligned(len(sizes) * len(EVENTS) * 8)
        self._records = np.zeros(len(sizes), GPU_TABLE)
        offset = self._fixed_bytes
        for t, (num_buckets, row_bytes, size) in enumerate(zip(self._num_buckets, self._row_bytes, sizes, strict=True)):
            self._describe(t, offset, num_buckets, row_bytes, code)
            (self._memory + offset).memset_async(0, 2 * BUCKET_BYTES * num_buckets)
            offset += size

    def _describe(self, t: int, offset: int, num_buckets: int, row_bytes: int, code: VectorCode) -> None:
        """Enter a table's part of the memory in its record."""
        tags = self._memory.ptr + offset
        marks = tags + num_buckets * BUCKET_BYTES
        keys = marks + num_buckets * BUCKET_BYTES
        vectors = tags + aligned(index_bytes(num_buckets, marks=True, numbers=False))
        dim = list(self.dims.values())[t]
        wide = is_wide(
            dim, {VectorCode.FLOAT32: 4, VectorCode.FLOAT16: 2, VectorCode.INT8: 1}[code], vectors, row_bytes
        )
        record = self._records[t]
        record["cached"] = (tags, keys, marks, num_buckets)
        record["cached_rows"] = (vectors, row_bytes, int(code), int(wide))
        record["base_rows"]["wide"] = 1
        record["embedding_dim"] = dim
        record["events_address"] = self._events_address + t * len(EVENTS) * 8

    def _index_backing(self, backing: Mapping[str, tuple[ArrayLike, ArrayLike]]) -> dict[str, BaseRows]:
        rows = {}
        for table, (keys, vectors) in backing.items():
            rows[table] = BaseRows(*check_base(table, keys, vectors, self.dims[table]), self.dims[table])
            rows[table].describe(self._records[self._positions[table]])
        return rows

    def _upload_tables(self) -> None:
        num_bytes = self._records.nbytes
        place = self._memory + (self._tables_address - self._memory.ptr)
        cupy.ndarray(num_bytes, np.uint8, place).set(self._records.view(np.uint8).reshape(-1))

    def _look_up(self, keys: Mapping[str, ArrayLike], out: Mapping[str, Any] | None, wait: bool) -> LookupResult:
        stream = cupy.cuda.get_current_stream()
        prepared, vectors = self._prepare(keys, out, stream)
        geometry, launch = prepared.geometry, prepared.launch
        bits = cupy.cuda.alloc(launch.num_tiles * _WORD_BYTES)
        with self._count_lock:
            if self._closed:  # since `lookup` began; after the launch `close` waits for it
                raise SessionClosedError("the embedding cache has been closed")
            launch.run(
                missing_bits_address=bits.ptr,
                seed=next(self._seeds) & 0xFFFFFFFF,
                fill=out is None,
                outputs_address=vectors.address if isinstance(vectors, Vectors) else 0,
            )
            geometry.num_calls += 1
        if wait:
            stream.synchronize()
        return LookupResult(vectors, Missing(geometry, bits, stream))

    def _prepare(
        self, keys: Mapping[str, ArrayLike], out: Mapping[str, Any] | None, stream: Any
    ) -> tuple[_Prepared, Mapping[str, Any]]:
        """What to launch, and the arrays that take the vectors.

        Arrays that come again under the same names on the same stream, with other contents, are known by their
        identity; they are forgotten as they go, and what was uploaded for them is that stream's again.
        """
        into = out or {}
        known = (stream.ptr, out is None, len(keys), *keys, *into, *map(id, keys.values()), *map(id, into.values()))
        prepared = self._remembered.get(known)
        if prepared is None:
            prepared = self._prepare_new(keys, out)
            if hash(known) in self._seen and not prepared.copies:
                if len(self._remembered) >= _MAX_REMEMBERED:
                    self._remembered.clear()
                forget = partial(_forget, weakref.ref(self), known)
                watched = [weakref.ref(array, forget) for array in (*keys.values(), *into.values())]
                self._remembered[known] = prepared._replace(watched=watched)
            if len(self._seen) >= _MAX_REMEMBERED:
                self._seen.clear()
            self._seen.add(hash(known))
        if out is None:
            return prepared, Vectors(prepared.geometry)
        return prepared, dict(out) if len(out) == len(keys) else {table: out[table] for table in keys}

    def _prepare_new(self, keys: Mapping[str, ArrayLike], out: Mapping[str, Any] | None) -> _Prepared:
        """Where `out` is None, outputs are as far from its beginning as in a block of all of them."""
        checked = {table: self._device_keys(table, asked) for table, asked in keys.items()}
        arrays: list[Any] | None = None
        if out is not None:
            arrays = [self._output(table, len(array), out) for table, array in checked.items()]
        geometry = self._geometry(checked, arrays)
        segments = geometry.segments.copy()
        segments["keys_address"] = [array.data.ptr for array in checked.values()]
        if arrays is not None:
            segments["output_address"] = [array.data.ptr for array in arrays]
        addresses = {"tables_address": self._tables_address, "readers_address": self._readers_address}
        launch = gpu.Launch(segments, geometry.tiles, **addresses)
        copies = [array for table, array in checked.items() if array is not keys[table]]
        return _Prepared(geometry, launch, copies)

    def _geometry(self, keys: Mapping[str, Any], out: Sequence[Any] | None) -> Geometry:
        """The geometry of checked arrays."""
        strides = [4 * self.dims[table] for table in keys] if out is None else [array.strides[0] for array in out]
        described = tuple(
            [
                (table, len(asked), asked.strides[0] if asked.size else 0, asked.itemsize, stride)
                for (table, asked), stride in zip(keys.items(), strides, strict=True)
            ]
        )
        return self._geometries.get(described) or self._new_geometry(described)

    def _new_geometry(self, described: Any) -> Geometry:
        segments = np.zeros(len(described), SEGMENT)
        for segment, (table, count, stride, key_bytes, output_stride) in zip(segments, described, strict=True):
            segment["table"], segment["num_rows"], segment["row_stride"] = self._positions[table], count, stride
            segment["key_bytes"], segment["keys_per_row"], segment["output_stride"] = key_bytes, 1, output_stride
        tables = [each[0] for each in described]
        geometry = Geometry(tables, [self.dims[table] for table in tables], segments, divide(segments))
        segments["output_address"] = 4 * np.array(geometry.begins, np.int64)
        with self._count_lock:
            if len(self._geometries) >= _MAX_GEOMETRIES:
                self._num_keys_before = self._keys_asked()
                self._geometries.clear()
                self._remembered.clear()  # they would count in geometries that nobody adds up
            self._geometries[described] = geometry
        return geometry

    def _keys_asked(self) -> NDArray[np.int64]:
        """Keys looked up so far, by table: a geometry counts its calls only. Must be called while holding the lock."""
        asked: NDArray[np.int64] = self._num_keys_before.copy()
        for geometry in self._geometries.values():
            for table, count in zip(geometry.tables, geometry.num_keys, strict=True):
                asked[self._positions[table]] += geometry.num_calls * count
        return asked

    def _device_keys(self, table: str, keys: ArrayLike) -> Any:
        """Keys as an int64 or int32 array [n] on the device, at any distance; a copy of those of another device."""
        if isinstance(keys, cupy.ndarray) and keys.ndim == 1 and keys.dtype in (_INT64, _INT32):
            self._check(table)
            if keys.data.device_id == self.device.id:
                _check_aligned(table, "keys", keys)
                return keys
        return _on_device(self._checked_keys(table, keys), np.int64)

    def _checked_keys(self, table: str, keys: ArrayLike) -> Any:
        if not isinstance(keys, cupy.ndarray):
            return super()._checked_keys(table, keys)
        self._check(table)
        check_keys(table, keys)
        return keys

    def _checked_rows(self, table: str, keys: ArrayLike, vectors: ArrayLike) -> tuple[Any, Any]:
        checked = self._checked_keys(table, keys)
        array = vectors if isinstance(vectors, cupy.ndarray) else np.asarray(vectors)
        check_vectors(table, array, (len(checked), self.dims[table]))
        return checked, array

    def _checked_out(self, table: str, num_keys: int, out: Any) -> Any:
        shape = (num_keys, self.dims[table])
        if not isinstance(out, cupy.ndarray) or out.dtype != _FLOAT32 or out.shape != shape:
            whose = {cupy.ndarray: "CuPy's", np.ndarray: "NumPy's"}.get(type(out))
            found = f"{whose} {out.dtype} {list(out.shape)}" if whose else type(out).__name__
            raise InvalidRequestError(f"table {table!r}: out is {found}, expected CuPy's float32 {list(shape)}")
        if out.size and out.data.device_id != self.device.id:
            raise InvalidRequestError(
                f"table {table!r}: out is on cuda:{out.data.device_id}, the cache on cuda:{self.device.id}"
            )
        if out.size and out.strides[1] != out.itemsize:
            raise InvalidRequestError(f"table {table!r}: out must be writeable, the elements of a row adjacent")
        _check_aligned(table, "out", out)
        return out

    def _write(self, table: str, keys: ArrayLike, vectors: ArrayLike, *, may_insert: bool) -> None:
        checked, floats = self._checked_rows(table, keys, vectors)
        with self.device:
            check_range(table, floats, self.dtype, cupy.get_array_module(floats))
        with self._writing(table) as writer:
            if writer is None:
                return
            rows = np.array(self._records[self._positions[table]]["cached_rows"], ROWS)
            for begin in range(0, len(checked), _KEYS_PER_WRITE):
                part = slice(begin, begin + _KEYS_PER_WRITE)
                part_keys, part_rows = _on_device(checked[part], np.int64), _on_device(floats[part], np.float32)
                claims = writer.claim(part_keys, may_insert=may_insert, may_evict=may_insert)
                writer.write_rows(rows, part_keys, part_rows, claims)

    @contextlib.contextmanager
    def _writing(self, table: str) -> Iterator[gpu.Writer | None]:
        """The one writer, after the writes before it; None where a table has no room for rows."""
        with self._write_lock, self.device:
            self._check(table)
            record = self._records[self._positions[table]]
            if record["cached"]["num_buckets"] == 0:
                yield None
                return
            stream = cupy.cuda.get_current_stream()
            stream.wait_event(self._written)
            index = np.array(record["cached"], INDEX)
            try:
                yield gpu.Writer(index, int(record["events_address"]), self._readers_address)
            finally:
                self._written.record(stream)  # also where memory ran out halfway: the next writer waits for that half

    def _read_events(self) -> NDArray[np.int64]:
        """Counts by table and event, at one moment between two writes."""
        stream = cupy.cuda.get_current_stream()
        stream.wait_event(self._written)
        memory = self._memory + (self._events_address - self._memory.ptr)
        counts = cupy.ndarray((len(self.dims), len(EVENTS)), np.int64, memory)
        return np.asarray(cupy.asnumpy(counts))

    def _row_counts(self, table: str) -> dict[str, int]:
        t = self._check(table) and self._positions[table]
        inserts, updates, evictions, erases = self._counts[t, :4].tolist()
        num_buckets = self._num_buckets[t]
        num_bytes = table_bytes(num_buckets, self._row_bytes[t]) + (self._fixed_bytes if t == 0 else 0)
        rows = inserts - evictions - erases
        return dict(
            zip(ROW_COUNTS, (inserts, updates, evictions, erases, rows, SLOTS * num_buckets, num_bytes), strict=True)
        )


def _forget(cache: weakref.ref[GpuEmbeddingCache], known: Any, _gone: object) -> None:
    if (alive := cache()) is not None:
        alive._remembered.pop(known, None)


def _check_aligned(table: str, what: str, array: Any) -> None:
    """InvalidRequestError for views between the places of their elements, which would break the device for good."""
    if array.size and (array.data.ptr | array.strides[0]) % array.itemsize:
        raise InvalidRequestError(f"table {table!r}: {what} must lie at multiples of {array.itemsize} bytes")


def _on_device(array: Any, dtype: Any) -> Any:
    return cupy.ascontiguousarray(cupy.asarray(array), dtype)
