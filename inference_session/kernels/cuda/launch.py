"""The CUDA kernels (cuda/*.cu) as functions: compiled by NVRTC on first use, kept by CuPy in its kernel cache.

All run on CuPy's current stream and return at once. Addresses are plain integers: a caller that passes one keeps
the memory behind it alive until the stream has finished the kernel.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy.cuda import driver, runtime
from numpy.typing import NDArray

from inference_session.kernels.cuda.records import (
    MAX_INLINE_SEGMENTS,
    MAX_TARGETS,
    REQUEST,
    Regions,
    Tiles,
    batch_of,
    divide,
    offset_of,
    request_of,
)
from inference_session.kernels.cuda.source import source
from inference_session.kernels.records import Lookup, VectorCode, address_of

THREADS = 256
_LOOKUP_THREADS, _SCAN_THREADS = 128, 1024
_ORDERED_WARPS = 128
"""Warps that take keys in order: enough to keep the bus to host memory busy."""
_TURN_BYTES = 16
"""Of a key, before it is in order and after."""
_CLAIM_BYTES = 8
"""Of the slot that a key takes."""
_MANY_TILES, _FEW_THREADS = 2048, 64
_ADDRESSES, _SEED = struct.Struct("<qqq"), struct.Struct("<I")
_SCRATCH_ADDRESSES = struct.Struct("<qqq")
"""The first fields of a BATCH."""
_SEGMENTS_OFFSET = offset_of(REQUEST, "few_segments")
_ADDRESSES_OFFSET, _SEED_OFFSET = offset_of(REQUEST, "missing_bits_address"), offset_of(REQUEST, "seed")
_LOOK_UPS = ("look_up", "look_up_and_pool")
_WRITES = ("note_last", "claim", "write_rows", "write_numbers", "erase", "mark_deleted")
_ORDERING = ("note_regions", "begin_regions", "order_keys")
_KERNELS = (*_LOOK_UPS, *_ORDERING, "write_columns", "copy_vectors", *_WRITES)


class Variant(NamedTuple):
    """Constants that look-ups are compiled for, so that those that need none of them do nothing for them."""

    num_shards: int = 1
    """GPUs that sharded tables lie on."""
    rows_change: bool = False
    """Whether the cached rows are all that were changed, as layout.cuh says."""
    narrow_rows: bool = False
    """Whether any rows are stored in float16 or int8."""
    narrow_outputs: bool = False
    """Whether any vectors are written in float16."""
    in_order: bool = False
    """Whether keys of some segments are taken in an order of their own."""


_PLAIN = Variant()


@cache
def _module(variant: Variant) -> Any:
    constants = [f"-D{name.upper()}={int(value)}" for name, value in variant._asdict().items()]
    return cupy.RawModule(code=source(), options=("-std=c++17", *constants))


@cache
def _kernel(name: str, variant: Variant = _PLAIN) -> Any:
    return _module(variant).get_function(name)


def compile_kernels(variant: Variant = _PLAIN) -> dict[str, Any]:
    """Compile, or load from CuPy's cache, for the current device: no request waits for it later.

    Returns:
        CuPy's kernels by name, of look-ups those for tables of one GPU that do not change.
    """
    kernels = {name: _kernel(name) for name in _KERNELS}
    for kernel in (*kernels.values(), *(_kernel(name, variant) for name in _LOOK_UPS)):
        kernel.compile()
    return kernels


class _Arguments:
    """A kernel's arguments where the driver reads them: a record, then numbers of at most 8 bytes."""

    def __init__(self, record: bytes, *numbers: int) -> None:
        self.record = bytearray(record)
        self._first = ctypes.c_char.from_buffer(self.record)
        self._numbers = (ctypes.c_uint64 * len(numbers))(*numbers)
        begin = ctypes.addressof(self._numbers)
        addresses = ctypes.addressof(self._first), *range(begin, begin + 8 * len(numbers), 8)
        self._addresses = (ctypes.c_void_p * len(addresses))(*addresses)
        self.address = ctypes.addressof(self._addresses)


class Scratch:
    """Device memory that launches share: one of them runs at a time."""

    def __init__(self) -> None:
        self._array: Any = None

    def of(self, num_bytes: int) -> Any:
        """At least this much, uint8. A larger piece replaces it when a later call needs more."""
        if self._array is None or self._array.nbytes < num_bytes:
            self._array = cupy.empty(max(num_bytes, 2 * getattr(self._array, "nbytes", 0)), np.uint8)
        return self._array


class _KeyOrder:
    """Puts keys in order before each run of a look-up; see order.cu."""

    def __init__(self, regions: Regions, scratch: Scratch) -> None:
        self.regions = regions
        self._of_segments = cupy.asarray(regions.of_segments)
        self._held = scratch.of(2 * _TURN_BYTES * regions.num_keys + 4 * regions.num_regions)
        self._noted: int = self._held.data.ptr
        self.address = self._noted + _TURN_BYTES * regions.num_keys
        """Where the keys are in order."""
        self._counts = self.address + _TURN_BYTES * regions.num_keys
        self._kernels = [_kernel(name).kernel for name in _ORDERING]
        self._to_begin = _Arguments(_packed(self._counts), regions.num_regions)
        self._to_order = _Arguments(_packed(self._noted), self._counts, regions.num_keys, self.address)

    def arguments(self, request: bytes) -> _Arguments:
        """A REQUEST, which the look-up reads as well, and what `note_regions` needs in addition."""
        return _Arguments(request, self._of_segments.data.ptr, self._counts, self._noted)

    def start(self, arguments: _Arguments, num_tiles: int, stream_address: int) -> None:
        """Launch on a stream."""
        note, begin, order = self._kernels
        runtime.memsetAsync(self._counts, 0, 4 * self.regions.num_regions, stream_address)
        warps = _LOOKUP_THREADS // 32
        _start(note, -(-num_tiles // warps), _LOOKUP_THREADS, arguments, stream_address)
        _start(begin, 1, _SCAN_THREADS, self._to_begin, stream_address)
        _start(order, -(-self.regions.num_keys // THREADS), THREADS, self._to_order, stream_address)


class Launch:
    """A look-up that is ready to run, often: its REQUEST record, and what that points to on the device.

    One run at a time: the thread that holds the cache, or the device, runs it.
    """

    def __init__(
        self,
        segments: NDArray[np.void],
        tiles: Tiles,
        *,
        variant: Variant = _PLAIN,
        order: _KeyOrder | None = None,
        **addresses: int,
    ) -> None:
        """`addresses`: fields of the REQUEST that are the same in each run."""
        request = request_of(segments, tiles)
        self._order = order
        if order is not None:
            request["order_address"], request["few_begins"][: len(segments)] = order.address, order.regions.begins
        for field, address in addresses.items():
            request[field] = address
        self.tiles, self.num_tiles, self._num_segments = tiles, int(tiles.first[-1]), len(segments)
        self.takes_segments = few = len(segments) <= MAX_INLINE_SEGMENTS
        """Whether `run` may be given other segments."""
        narrow_outputs = bool((segments["output_code"] == VectorCode.FLOAT16).any())
        variant = variant._replace(narrow_outputs=narrow_outputs, in_order=order is not None)
        self._kernel = _kernel(_LOOK_UPS[not few or tiles.pooled], variant).kernel
        # Small blocks spread a small request over all multiprocessors.
        self._threads = _LOOKUP_THREADS if self.num_tiles >= _MANY_TILES else _FEW_THREADS
        self._num_blocks = -(-self.num_tiles // (self._threads // 32))
        if order is not None:
            request["num_ordered_blocks"] = num_ordered_blocks = _ORDERED_WARPS // (self._threads // 32)
            self._num_blocks += num_ordered_blocks
        self._unknown_sums: Any = None
        self._held: tuple[Any, ...] = ()
        self._uploaded: Any = None
        if not few:
            self._held = cupy.asarray(segments.view(np.uint8)), cupy.asarray(tiles.first)
            request["segments_address"], request["first_tiles_address"] = (a.data.ptr for a in self._held)
            self._uploaded = cupy.cuda.Event(disable_timing=True)
            self._uploaded.record()
        self._arguments = self._arguments_of(request.tobytes())

    def run(
        self,
        segments: NDArray[np.void] | None = None,
        *,
        missing_bits_address: int = 0,
        num_unknown_address: int = 0,
        seed: int = 0,
    ) -> None:
        """Launch on the current stream.

        Args:
            segments: of the same shapes as those it was made of, for this run and those after it; not read where
                `takes_segments` is False.
            missing_bits_address: uint32 [num_tiles], zeros, for the positions that have no row where they are not
                pooled; 0: not noted.
            num_unknown_address: uint64 [segments], COUNT_STRIDE apart, to count keys in that have no row; 0: not
                counted.
            seed: any number; decides which hits leave a mark.
        """
        if not self.num_tiles:
            return
        if self._uploaded is not None:  # perhaps on another stream
            cupy.cuda.get_current_stream().wait_event(self._uploaded)
        self._fill_in(self._arguments, segments, missing_bits_address, num_unknown_address, seed)
        self._start(self._arguments, cupy.cuda.get_current_stream().ptr)

    def repeated(self, num_unknown_address: int) -> Callable[[], None]:
        """`run` of the segments that this was made of, each time it is called, on the stream that is current now."""
        if not self.num_tiles:
            return _nothing
        if self._uploaded is not None:
            self._uploaded.synchronize()
        arguments = self._arguments_of(bytes(self._arguments.record))
        self._fill_in(arguments, None, 0, num_unknown_address, seed=0)
        return partial(self._start, arguments, cupy.cuda.get_current_stream().ptr)

    def _arguments_of(self, request: bytes) -> _Arguments:
        return _Arguments(request) if self._order is None else self._order.arguments(request)

    def _fill_in(
        self,
        arguments: _Arguments,
        segments: NDArray[np.void] | None,
        missing_bits_address: int,
        num_unknown_address: int,
        seed: int,
    ) -> None:
        # The fields of a NumPy record take several times as long to write.
        request = arguments.record
        sums = self._sums_address() if num_unknown_address else 0
        _ADDRESSES.pack_into(request, _ADDRESSES_OFFSET, missing_bits_address, num_unknown_address, sums)
        if segments is not None and self.takes_segments:
            request[_SEGMENTS_OFFSET : _SEGMENTS_OFFSET + segments.nbytes] = segments.tobytes()
        _SEED.pack_into(request, _SEED_OFFSET, seed)

    def _sums_address(self) -> int:
        """Where warps add up unknown keys: zeros between two runs."""
        if self._unknown_sums is None:
            self._unknown_sums = cupy.zeros(self._num_segments, np.uint32)
        return int(self._unknown_sums.data.ptr)

    def _start(self, arguments: _Arguments, stream_address: int) -> None:
        _make_known()
        if self._order is not None:
            self._order.start(arguments, self.num_tiles, stream_address)
        _start(self._kernel, self._num_blocks, self._threads, arguments, stream_address)


class ColumnsWriter:
    """Fills the last columns of a matrix with values of the host, and zeros behind them, as often as it is started."""

    def __init__(self, given: NDArray[np.float32], matrix: Any, first: int) -> None:
        """Describe the columns.

        Args:
            given: float32 [rows, values], contiguous in pinned memory.
            matrix: float32 or float16 [rows, columns] on the device.
            first: of the columns.
        """
        num_rows, num_given = given.shape
        num_columns, row_bytes = matrix.shape[1] - first, matrix.strides[0]
        begin = matrix.data.ptr + first * matrix.itemsize
        numbers = num_given, begin, num_columns, row_bytes, num_rows, int(matrix.dtype == np.float16)
        self._arguments = _Arguments(_packed(given.ctypes.data), *numbers)
        self._num_blocks = -(-num_rows * num_columns // THREADS)
        self._kernel = _kernel("write_columns").kernel

    def start(self, stream_address: int) -> None:
        """Launch on a stream."""
        if self._num_blocks:
            _make_known()
            _start(self._kernel, self._num_blocks, THREADS, self._arguments, stream_address)


def prepare(
    segments: NDArray[np.void],
    tables_address: int,
    *,
    variant: Variant = _PLAIN,
    regions: Regions | None = None,
    scratch: Scratch | None = None,
) -> Launch:
    """A look-up of SEGMENT records in GPU_TABLE records; `regions`: by which keys are put in order, in `scratch`."""
    order = None if regions is None or scratch is None else _KeyOrder(regions, scratch)
    return Launch(segments, divide(segments), variant=variant, order=order, tables_address=tables_address)


def launch_of(lookup: Lookup, tables_address: int, *, variant: Variant = _PLAIN) -> Launch:
    """What runs this look-up: what was prepared for its shapes, if that takes other segments, or else a new one."""
    if isinstance(lookup.prepared, Launch) and lookup.prepared.takes_segments:
        return lookup.prepared
    return prepare(lookup.segments, tables_address, variant=variant)


def copy_vectors(copies: NDArray[np.void]) -> None:
    """Copy vectors in pinned memory to the outputs of a look-up: VECTOR_COPY records, in pinned memory as well."""
    num_blocks = -(-len(copies) // (_LOOKUP_THREADS // 32))
    arguments = _Arguments(_packed(address_of(copies)), len(copies))
    _make_known()
    _start(_kernel("copy_vectors").kernel, num_blocks, _LOOKUP_THREADS, arguments, cupy.cuda.get_current_stream().ptr)


def write_rows(targets: NDArray[np.void], *, may_insert: bool, may_evict: bool) -> None:
    """Put rows into indexes, on a held device: no other thread uses them. Of equal keys, the last counts.

    Args:
        targets: TARGET records, each of another index, complete but for `first`; fewer than 2**30 keys in all.
        may_insert: whether keys that are not there take a slot.
        may_evict: whether also where that costs another row its slot.
    """
    targets = targets[(targets["num_keys"] > 0) & (targets["index"]["num_buckets"] > 0)]
    for begin in range(0, len(targets), MAX_TARGETS):
        batch = batch_of(targets[begin : begin + MAX_TARGETS], may_insert=may_insert, may_evict=may_evict)
        _write("write_rows", batch)


def write_numbers(target: NDArray[np.void], numbers_address: int, first: int) -> None:
    """Put keys, at least one, into an index over rows elsewhere: keys[i] is row first + i.

    `numbers_address`: uint32, one per slot.
    """
    _write("write_numbers", batch_of(target.reshape(1), may_insert=True, may_evict=False), numbers_address, first)


def _write(name: str, batch: NDArray[np.void], *numbers: int) -> None:
    """Claim slots for the keys of a batch, then fill them by a kernel, which is given these numbers too."""
    num_places, num_positions = int(batch["seen_mask"]) + 1, int(batch["num_positions"])
    scratch = cupy.empty(4 * num_places + (_CLAIM_BYTES + 4) * num_positions, np.uint8)
    seen, stream = scratch.data.ptr, cupy.cuda.get_current_stream().ptr
    _make_known()
    runtime.memsetAsync(seen, 0, 4 * num_places, stream)
    claims = seen + 4 * num_places
    arguments = _Arguments(batch.tobytes(), *numbers)
    _SCRATCH_ADDRESSES.pack_into(arguments.record, 0, seen, claims, claims + _CLAIM_BYTES * num_positions)
    for kernel in ("note_last", "claim", name):
        _start(_kernel(kernel).kernel, -(-num_positions // THREADS), THREADS, arguments, stream)


def erase(index: NDArray[np.void], events_address: int, keys: Any) -> None:
    """Drop keys, int64 [n] on the device, from an index, an INDEX record."""
    _run("erase", len(keys), _raw(index), np.uint64(events_address), keys, np.uint32(len(keys)))


def mark_deleted(index: NDArray[np.void], keys: Any) -> None:
    """Of an index over rows that change: its keys, int64 [n] on the device, were deleted."""
    _run("mark_deleted", len(keys), _raw(index), keys, np.uint32(len(keys)))


def _make_known() -> None:
    """Make a thread that is new to the device known to it, as CuPy does before it calls a kernel."""
    if not driver.ctxGetCurrent():
        runtime.free(0)


def _start(kernel: Any, num_blocks: int, num_threads: int, arguments: _Arguments, stream_address: int) -> None:
    """Launch a kernel in half the time that CuPy takes."""
    driver.launchKernel(kernel.ptr, num_blocks, 1, 1, num_threads, 1, 1, 0, stream_address, arguments.address, 0)


def _packed(address: int) -> bytes:
    return struct.pack("<Q", address)


def _nothing() -> None:
    """A launch of no keys."""


def _run(name: str, num_threads: int, *arguments: Any) -> None:
    _kernel(name)((-(-num_threads // THREADS),), (THREADS,), arguments)


def _raw(record: NDArray[np.void]) -> NDArray[np.void]:
    """A record as a kernel's argument: CuPy spells fields out in a Python list whenever it is given any."""
    return record.view(np.dtype((np.void, record.dtype.itemsize)))
