"""The CPU cache against the contract, and its own features: accounting, eviction, encodings, records for the kernel."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inference_session.embedding_cache import cpu
from inference_session.embedding_cache.base import EmbeddingCache
from inference_session.embedding_cache.cpu import CpuEmbeddingCache
from inference_session.errors import ConfigurationError, InvalidRequestError
from inference_session.kernels.cpu import cache as cpu_cache
from inference_session.kernels.records import Lookup, PoolingCode, key_segments
from inference_session.sizing.hit_rate import LruCurve
from tests.testing.cache_contract import AMPLE_BYTES, EmbeddingCacheContract, vectors_of
from tests.testing.cache_lookups import look_up
from tests.testing.traces import generated_trace, real_trace


def cache_of(num_rows: int, dim: int = 1) -> CpuEmbeddingCache:
    """A cache of one table with exactly this many rows."""
    cache = CpuEmbeddingCache({"t": dim}, 1 << 26, num_rows={"t": num_rows})
    assert cache.stats().capacity >= num_rows
    return cache


def offer(cache: EmbeddingCache, keys: NDArray[np.int64]) -> int:
    """Look keys up, insert those that miss; returns the hits, as if each key had come alone."""
    missing = np.unique(keys[look_up(cache, {"t": keys}).missing["t"]])
    cache.insert("t", missing, vectors_of(missing, cache.dims["t"]))
    return len(keys) - len(missing)


class TestCpuEmbeddingCache(EmbeddingCacheContract):
    """The contract."""

    def create(self, dims: dict[str, int], cache_bytes: int = AMPLE_BYTES) -> EmbeddingCache:
        return CpuEmbeddingCache(dims, cache_bytes)


@settings(max_examples=60)
@given(dims=st.lists(st.integers(1, 300), min_size=1, max_size=6), extra=st.integers(0, 200_000))
def test_all_memory_is_accounted_for(dims: list[int], extra: int) -> None:
    """`bytes` is what the arrays take, to the byte, and within cache_bytes; none of the budget is left for a row."""
    named = {f"t{i}": dim for i, dim in enumerate(dims)}
    with pytest.raises(ConfigurationError, match="cache_bytes is 1, too little") as refusal:
        CpuEmbeddingCache(named, 1)
    least = int(str(refusal.value).split("at least ")[1].split(",")[0])
    cache = CpuEmbeddingCache(named, least + extra)
    stats = cache.stats()

    arrays = [array for table in cache.arrays.values() for array in table]
    allocated = sum((array if array.base is None else _owner(array)).nbytes for array in arrays)
    assert stats.bytes == allocated + cache.records.nbytes <= cache.cache_bytes
    assert all(counts.capacity >= 1 for counts in stats.tables.values())
    assert cache.cache_bytes - stats.bytes < sum(4 * dim + 8 + 100 for dim in dims)


def _owner(array: NDArray[np.generic]) -> NDArray[np.generic]:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


@pytest.mark.parametrize("num_rows", [0, 1, 2, 11, 12, 13, 1000])
def test_a_small_table_is_held_whole(num_rows: int) -> None:
    """A table of few rows gets room for all of them; the others get the rest of the budget."""
    cache = CpuEmbeddingCache({"t": 4, "large": 4}, 1 << 20, num_rows={"t": num_rows})
    keys = np.arange(num_rows)
    cache.insert("t", keys, vectors_of(keys, 4))
    tables = cache.stats().tables

    assert num_rows <= tables["t"].capacity <= num_rows + 3
    assert tables["large"].capacity > 5000
    assert look_up(cache, {"t": keys}).missing["t"].size <= num_rows // 100


def test_a_scan_does_not_empty_it() -> None:
    """Rows that are hit again and again survive a scan of ten times the capacity."""
    cache = cache_of(2000)
    hot = np.arange(1000)
    for _ in range(4):
        offer(cache, hot)
    for begin in range(10_000, 30_000, 500):
        offer(cache, np.arange(begin, begin + 500))

    assert offer(cache, hot) >= 950


def test_new_favourites_replace_old_ones() -> None:
    """Rows that are no longer looked up are evicted in favour of those that are."""
    cache = cache_of(1000)
    for _ in range(8):
        offer(cache, np.arange(900))
    for _ in range(30):
        offer(cache, np.arange(10_000, 10_900))

    assert offer(cache, np.arange(10_000, 10_900)) >= 850


def hit_rate_of(trace: NDArray[np.int64], num_rows: int, num_keys: int = 32) -> float:
    """The hit rate of a cache on a trace, so many keys at a time."""
    cache = cache_of(num_rows)
    return sum(offer(cache, trace[begin : begin + num_keys]) for begin in range(0, len(trace), num_keys)) / len(trace)


@pytest.fixture(scope="module")
def trace() -> NDArray[np.int64]:
    """Popular keys, and many that occur once."""
    return generated_trace()


@pytest.fixture(scope="module")
def lru(trace: NDArray[np.int64]) -> LruCurve:
    """What an LRU finds in that trace."""
    return LruCurve(trace)


@pytest.mark.parametrize(("num_rows", "gain"), [(1_000, 0.01), (10_000, 0.01), (50_000, 0.001)])
def test_popular_keys_are_found_more_often_than_in_lru(
    trace: NDArray[np.int64], lru: LruCurve, num_rows: int, gain: float
) -> None:
    """Keys that occur once do not evict popular ones: the cache finds more keys than LRU does, at any size."""
    assert hit_rate_of(trace, num_rows, num_keys=128) >= lru.hit_rate(num_rows) + gain


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("num_rows", "hit_rate"), [(1_000, 0.270 + 0.05), (10_000, 0.486 + 0.03), (50_000, 0.691 + 0.008)]
)
def test_a_real_trace_hits_more_than_lru(real_data: Path, num_rows: int, hit_rate: float) -> None:
    """On a recommender's trace the cache finds clearly more keys than LRU, whose hit rates stand first in the sums."""
    assert hit_rate_of(real_trace(real_data), num_rows) >= hit_rate


def test_rows_are_held_as_float32() -> None:
    """Of wider vectors, what rounding leaves."""
    vectors = np.random.default_rng(3).random((50, 9))
    cache = CpuEmbeddingCache({"t": 9}, AMPLE_BYTES)
    cache.insert("t", np.arange(50), vectors)
    found = look_up(cache, {"t": np.arange(50)}).vectors["t"]

    np.testing.assert_array_equal(found, vectors.astype(np.float32))


def test_vectors_are_pooled_from_the_cache() -> None:
    """The look-up kernel pools vectors of the cache as of any table, and counts each of their keys."""
    cache = cache_of(100, dim=3)
    cache.insert("t", [5, 7], [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
    keys, out = np.array([5, 7, 7]), np.empty((1, 3), np.float32)
    segment = key_segments([keys], [out])
    segment["num_rows"], segment["keys_per_row"], segment["pooling"] = 1, 3, PoolingCode.SUM
    assert cache.look_up(Lookup(segment, np.array([3]), np.zeros(1, np.int64))) == 0

    assert out.tolist() == [[21.0, 42.0, 63.0]]
    assert cache.stats().hits == 3


def test_a_row_is_not_written_to_while_it_may_be_read() -> None:
    """Rows that could be read when `read` began stay unchanged until it ends, however much is written meanwhile."""
    cache = cache_of(8, dim=2)
    cache.insert("t", np.arange(8), vectors_of(np.arange(8), 2))
    written = threading.Event()

    def write() -> None:
        for version in range(1, 50):
            cache.update("t", np.arange(8), vectors_of(np.arange(8), 2, version))
        written.set()

    arrays, writer = cache.arrays["t"], threading.Thread(target=write)

    def read(_: object) -> None:
        cached = np.flatnonzero(arrays.lists >= 2)
        before = arrays.vectors[cached].copy()
        writer.start()
        while not cache.readers.writer_waits:
            assert not written.is_set()
        assert np.array_equal(arrays.vectors[cached], before)

    cache.read(read)
    writer.join()

    assert look_up(cache, {"t": [3]}).vectors["t"].tolist() == [[52.0, 52.0]]


def test_no_write_waits_for_a_compiler() -> None:
    """Arrays that are read-only, unaligned, strided or of another type run through the code that exists already."""
    cache = cache_of(8, dim=2)
    kernels: list[Any] = [cpu_cache.write_rows, cpu_cache.erase_rows]
    compiled = [len(kernel.signatures) for kernel in kernels]
    memory = b"-" + np.arange(4, dtype=np.int64).tobytes()
    keys = np.frombuffer(memory, np.int64, offset=1)
    vectors = np.frombuffer(memory + bytes(3), np.float32, 8, offset=1).reshape(4, 2)
    cache.insert("t", keys, vectors)
    cache.update("t", keys[::2], np.asfortranarray(vectors[::2], np.float64))
    cache.erase("t", keys[:2].astype(np.int8))

    assert sorted(cache.dump("t").tolist()) == [2, 3]
    assert [len(kernel.signatures) for kernel in kernels] == compiled


def test_a_thread_does_not_wait_for_itself() -> None:
    """Writing under one's own `read` until the spare rows are used up is an error, not a deadlock."""
    cache = cache_of(8)
    with pytest.raises(InvalidRequestError, match="cannot write to or close an embedding cache that it is reading"):
        cache.read(lambda _: cache.insert("t", np.arange(100), vectors_of(np.arange(100), 1)))

    cache.insert("t", np.arange(100), vectors_of(np.arange(100), 1))
    assert cache.stats().rows == cache.stats().capacity


def test_closing_waits_for_readers() -> None:
    """The memory stays until the last look-up has ended."""
    cache = cache_of(8)
    closer = threading.Thread(target=cache.close)

    def read(_: object) -> None:
        closer.start()
        while not cache.readers.writer_waits:
            assert closer.is_alive()
        assert cache.arrays

    cache.read(read)
    closer.join()

    assert not cache.arrays
    assert repr(cache) == "<CpuEmbeddingCache closed>"


def test_what_an_interrupted_close_has_left_is_freed_by_the_next() -> None:
    """Ctrl-C may come while it waits for look-ups."""
    cache = cache_of(8)
    with (
        patch.object(cache.readers, "wait_for_those_under_way", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        cache.close()

    cache.close()

    assert not cache.arrays


def test_more_memory_than_the_machine_has_is_refused() -> None:
    """Also where Linux would promise it, as on nodes of Kubernetes. The error says how much it is."""
    with pytest.raises(ConfigurationError, match=r"would take \d{12,} bytes, .* set a smaller cache_bytes"):
        CpuEmbeddingCache({"t": 4, "u": 4}, 10**15)


def test_memory_that_a_process_cannot_allocate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a limit is set for it."""

    def allocate(num_rows: int, size: int) -> cpu_cache.CacheArrays:
        raise MemoryError(f"{num_rows} rows of {size} bytes")

    monkeypatch.setattr(cpu, "allocate", allocate)
    with pytest.raises(ConfigurationError, match=r"cache_bytes is 10000, more memory than this process can allocate"):
        CpuEmbeddingCache({"t": 4}, 10_000)


def test_it_shows_what_it_holds() -> None:
    """The repr counts tables and rows."""
    cache = cache_of(100)
    cache.insert("t", [1, 2], [[1.0], [2.0]])

    assert repr(cache) == f"<CpuEmbeddingCache [1 tables, 2 of {cache.stats().capacity} rows]>"
