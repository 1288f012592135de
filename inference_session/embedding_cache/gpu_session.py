"""The GPU's cache as a session over stores uses it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from inference_session.device.cuda import GpuContext
from inference_session.embedding_cache.gpu import GpuEmbeddingCache
from inference_session.errors import SessionClosedError, UnavailableError
from inference_session.kernels.cuda import launch as gpu
from inference_session.kernels.cuda.records import BUCKET_BYTES, SLOTS
from inference_session.kernels.records import address_of
from inference_session.platform.pacing import Rests
from inference_session.rows.gpu_source import Launches

_KEYS_AT_ONCE, _BUCKETS_AT_ONCE = 1 << 11, 1 << 10
"""Written, read back: so few that a request which waits for the device meanwhile hardly notices."""
_FREE, _BUSY = 0, 255
"""Tags of slots that hold no row."""


class SessionGpuCache(GpuEmbeddingCache):
    """A GpuEmbeddingCache that is read and written by whoever holds its session's GPU; what comes out is NumPy's.

    So nobody writes while a look-up runs, nor allocates device memory while a CUDA graph is recorded, and a write is
    done when it returns. Large ones are cut up, and requests have their turn in between.
    """

    def __init__(
        self, dims: Mapping[str, int], cache_bytes: int, context: GpuContext, *, num_rows: Mapping[str, int]
    ) -> None:
        """As GpuEmbeddingCache, on the GPU of `context`."""
        self._context = context
        self._rests = Rests()
        with context.request():
            super().__init__(dims, cache_bytes, device_id=context.device_id, num_rows=num_rows)
            self._readers_address = 0  # of no look-up that a writer would have to wait for
            uncounted = self._records.copy()
            uncounted["events_address"] = 0
            self._uncounted: Any = cupy.asarray(uncounted.view(np.uint8).reshape(-1))
        self._launches, self._second_launches = Launches(self._tables_address), Launches(self._uncounted.data.ptr)
        self._last_stats: dict[str, Any] = self.stats()

    def look_up(self, segments: NDArray[np.void], num_keys: NDArray[np.int64], num_missing: NDArray[np.int64]) -> None:
        """Answer SEGMENT records of so many keys each, within a request of the context, which waits for it.

        What is missing is left as it is in the outputs. num_missing[s], in pinned memory, is raised by the missing keys
        of segment s.
        """
        self._check_open()
        launch, given = self._launches.of(segments)
        launch.run(given, num_unknown_address=address_of(num_missing), seed=next(self._seeds) & 0xFFFFFFFF)
        with self._count_lock:
            np.add.at(self._num_keys_before, segments["table"], num_keys)

    def look_up_again(self, segments: NDArray[np.void]) -> NDArray[np.uint32]:
        """Answer segments without pooling whose keys have been counted before; returns what `Launch.run` says of
        missing keys, in pinned memory.
        """
        self._check_open()
        launch, given = self._second_launches.of(segments)
        bits = self._context.pinned((launch.num_tiles,), np.uint32)
        launch.run(given, missing_bits_address=address_of(bits))
        return bits

    def erase(self, table: str, keys: Any) -> None:
        """See EmbeddingCache."""
        for part in _cut(len(keys)):
            super().erase(table, keys[part])
            self._rests.rest()

    def dump(self, table: str) -> NDArray[np.int64]:
        """See EmbeddingCache."""
        return np.concatenate([keys for keys, _ in self._held(table)])

    def hottest(self, table: str) -> NDArray[np.int64]:
        """See EmbeddingCache: the rows with the highest marks come first."""
        keys, marks = map(np.concatenate, zip(*self._held(table), strict=True))
        hottest: NDArray[np.int64] = keys[np.argsort(np.uint8(255) - marks, kind="stable")]
        return hottest

    def stats(self) -> dict[str, Any]:
        """See EmbeddingCache; on a GPU that has failed, what was known last."""
        with contextlib.suppress(UnavailableError), self._context.request():
            self._last_stats = super().stats()
        return self._last_stats

    def close(self) -> None:
        """See EmbeddingCache. A GPU that has failed gives nothing back, but to the end of the process."""
        with contextlib.suppress(UnavailableError), self._context.request():
            super().close()
            self._uncounted = None
            # What follows on the device has all of the memory.
            cupy.get_default_memory_pool().free_all_blocks()

    def _write(self, table: str, keys: Any, vectors: Any, *, may_insert: bool) -> None:
        for part in _cut(len(keys)):
            super()._write(table, keys[part], vectors[part], may_insert=may_insert)
            self._rests.rest()

    @contextlib.contextmanager
    def _writing(self, table: str) -> Iterator[gpu.Writer | None]:
        with self._context.request(), super()._writing(table) as writer:
            yield writer

    def _held(self, table: str) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
        """Keys and marks of the rows that are cached, some buckets at a time: a row never leaves its bucket."""
        index = self._records[self._positions[table]]["cached"]
        num_buckets = int(index["num_buckets"])
        for begin in range(0, num_buckets, _BUCKETS_AT_ONCE):
            buckets = begin, min(_BUCKETS_AT_ONCE, num_buckets - begin)
            with self._context.request():
                self._check_open()
                tags = self._read(index["tags_address"], *buckets, BUCKET_BYTES, np.uint8)[:, :SLOTS]
                marks = self._read(index["marks_address"], *buckets, BUCKET_BYTES, np.uint8)[:, :SLOTS]
                keys = self._read(index["keys_address"], *buckets, SLOTS, np.int64)
            held = (tags != _FREE) & (tags != _BUSY)
            yield keys[held], marks[held]
            self._rests.rest()

    def _read(self, address: np.int64, begin: int, num_buckets: int, per_bucket: int, dtype: Any) -> NDArray[Any]:
        """What the memory holds of some buckets: [num_buckets, per_bucket]."""
        offset = int(address) - self._memory.ptr + begin * per_bucket * np.dtype(dtype).itemsize
        array = cupy.ndarray((num_buckets, per_bucket), dtype, self._memory + offset)
        return np.asarray(cupy.asnumpy(array))

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosedError("the embedding cache has been closed")


def _cut(num_keys: int) -> Iterator[slice]:
    return (slice(begin, begin + _KEYS_AT_ONCE) for begin in range(0, num_keys, _KEYS_AT_ONCE))
