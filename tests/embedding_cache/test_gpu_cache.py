"""The GPU cache against the contract of both caches, and its own features: encodings, eviction within sets, its device.

Runs where there is a CUDA device: `make test PYTEST_ARGS="-m gpu"`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_session.device.discovery import unusable
from inference_session.errors import ConfigurationError, InvalidRequestError
from inference_session.kernels.records import Lookup, PoolingCode, key_segments
from tests.testing.cache_contract import AMPLE_BYTES, HIGHEST, LOWEST, EmbeddingCacheContract, vectors_of
from tests.testing.cache_lookups import look_up
from tests.testing.missed_rows import missed_rows

if TYPE_CHECKING:
    from inference_session.embedding_cache.gpu import GpuEmbeddingCache

NO_GPU = unusable(0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NO_GPU is not None, reason=f"no GPU: {NO_GPU}")]


def cache_of(dims: dict[str, int], cache_bytes: int = 1 << 24, **settings: Any) -> GpuEmbeddingCache:
    from inference_session.device.cuda import CudaDevice
    from inference_session.embedding_cache.gpu import GpuEmbeddingCache

    return GpuEmbeddingCache(dims, cache_bytes, CudaDevice(0), **settings)


class TestGpuEmbeddingCache(EmbeddingCacheContract):
    """The contract, on the device."""

    least_bytes = 6_000

    def create(self, dims: dict[str, int], cache_bytes: int = AMPLE_BYTES) -> GpuEmbeddingCache:
        return cache_of(dims, cache_bytes)


@pytest.mark.parametrize("dim", [1, 3, 4, 8, 9, 32, 64, 100, 128, 200, 513])
def test_rows_of_any_width_come_back(dim: int) -> None:
    """A look-up answers each row as it was inserted; the rest is untouched."""
    generator = np.random.default_rng(dim)
    keys = generator.integers(LOWEST, HIGHEST, 500)
    vectors = generator.random((500, dim), np.float32)
    order = generator.permutation(500)
    with cache_of({"t": dim}) as cache:
        cache.insert("t", keys, vectors)
        found = look_up(cache, {"t": np.concatenate([keys[order], [0, 1, -1]])}, fill=np.nan)

    assert found.missing["t"].tolist() == [500, 501, 502]
    np.testing.assert_array_equal(found.vectors["t"][:500], vectors[order])
    assert np.isnan(found.vectors["t"][500:]).all()


@pytest.mark.parametrize("dim", [16, 32, 64, 100, 128, 132])
@pytest.mark.parametrize("num_missing", [0, 3, 100_000])
def test_large_requests_of_any_width_are_right(dim: int, num_missing: int) -> None:
    """Whole tiles of cached rows are copied in a way of their own; others, and the last tile, are not."""
    generator = np.random.default_rng(dim)
    keys = generator.integers(LOWEST, HIGHEST, 5_000)
    vectors = generator.random((len(keys), dim), np.float32)
    asked = generator.integers(0, len(keys), 150_001)
    missing = np.sort(generator.choice(len(asked), num_missing, replace=False))
    asked_keys = keys[asked]
    asked_keys[missing] = np.arange(num_missing)
    expected = vectors[asked]
    expected[missing] = -1.0
    with cache_of({"t": dim}) as cache:
        cache.insert("t", keys, vectors)
        found = look_up(cache, {"t": asked_keys}, fill=-1.0)
    np.testing.assert_array_equal(found.missing["t"], missing)
    np.testing.assert_array_equal(found.vectors["t"], expected)


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(0, 700), min_size=1, max_size=70), seed=st.integers(0, 2**32 - 1))
def test_any_request_answers_as_the_oracle(sizes: list[int], seed: int) -> None:
    """Any number of tables of any dims, any number of keys, some of them missing or twice: the result is NumPy's."""
    generator = np.random.default_rng(seed)
    dims = {f"t{i}": int(generator.integers(1, 70)) for i in range(len(sizes))}
    held = {t: generator.integers(LOWEST, HIGHEST, 300) for t in dims}
    with cache_of(dims, 1 << 27) as cache:
        for t, keys in held.items():
            cache.insert(t, keys, vectors_of(keys, dims[t]))
        asked = {
            t: generator.choice(np.concatenate([held[t], generator.integers(LOWEST, HIGHEST, 30)]), size)
            for t, size in zip(dims, sizes, strict=True)
        }
        found = look_up(cache, asked)
        stats = cache.stats()
    for t, keys in asked.items():
        known = np.isin(keys, held[t])
        assert found.missing[t].tolist() == np.flatnonzero(~known).tolist()
        assert np.allclose(found.vectors[t], np.where(known[:, None], vectors_of(keys, dims[t]), 0), rtol=1e-3)
    assert stats.hits + stats.misses == sum(sizes)
    assert stats.misses == sum(len(missing) for missing in found.missing.values())


def test_large_requests_with_hot_keys_are_right() -> None:
    """A million keys, most of them the same few, inserted and looked up at once: the last of equal keys wins."""
    generator = np.random.default_rng(1)
    keys = np.minimum(generator.zipf(1.2, 1_000_000), 200_000).astype(np.int64) - 100
    vectors = np.arange(len(keys), dtype=np.float32)[:, None].repeat(8, 1)
    with cache_of({"t": 8}, 1 << 26) as cache:
        cache.insert("t", keys, vectors)
        last = dict(zip(keys.tolist(), range(len(keys)), strict=True))
        found = look_up(cache, {"t": keys})
        expected = np.array([last[key] for key in keys.tolist()], np.float32)

        assert not len(found.missing["t"])
        assert np.array_equal(found.vectors["t"], expected[:, None].repeat(8, 1))
        assert cache.stats().rows == len(last) == len(cache.dump("t"))


def test_it_fills_to_nine_tenths_and_more() -> None:
    """As many random keys as the capacity fill more than nine tenths of it; half as many are all kept."""
    with cache_of({"t": 4}, 1 << 24) as cache:
        capacity = cache.stats().capacity
        keys = np.random.default_rng(2).integers(LOWEST, HIGHEST, capacity)
        cache.insert("t", keys[: capacity // 2], vectors_of(keys[: capacity // 2], 4))
        kept = len(cache.dump("t"))
        cache.insert("t", keys, vectors_of(keys, 4))
        held = cache.dump("t")

        assert kept == capacity // 2
        assert 0.92 * capacity < len(held) <= capacity
        assert np.array_equal(look_up(cache, {"t": held}).vectors["t"], vectors_of(held, 4))


@pytest.mark.parametrize("piece_bytes", [1 << 12, 1 << 24])
@pytest.mark.parametrize("place", ["host", "strided", "narrow", "pinned", "device", "strided device", "mixed"])
def test_rows_may_be_anywhere(place: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays on the host, in pinned memory or on the device, in one piece or many: the same rows are held."""
    import cupy

    from inference_session.device.pinned import pinned_copy
    from inference_session.embedding_cache import gpu_writes

    monkeypatch.setattr(gpu_writes, "_STAGED_BYTES", piece_bytes)
    monkeypatch.setattr(gpu_writes, "_DEVICE_BYTES", piece_bytes)
    keys = np.random.default_rng(0).permutation(40_000).astype(np.int32 if place == "narrow" else np.int64)
    vectors = vectors_of(keys, 5)
    wide = np.repeat(vectors, 2, axis=1)
    given: dict[str, tuple[Any, Any]] = {
        "host": (keys, vectors),
        "strided": (keys, wide[:, ::2]),
        "narrow": (keys, vectors.astype(np.float16).astype(np.float64)),
        "pinned": (pinned_copy(keys), pinned_copy(vectors)),
        "device": (cupy.asarray(keys), cupy.asarray(vectors)),
        "strided device": (cupy.asarray(keys), cupy.asarray(wide)[:, ::2]),
        "mixed": (keys, cupy.asarray(vectors)),
    }
    with cache_of({"t": 5}, 1 << 25) as cache:
        cache.insert("t", *given[place])
        found = look_up(cache, {"t": keys})
        assert not len(found.missing["t"])
        assert np.array_equal(found.vectors["t"], given["narrow"][1] if place == "narrow" else vectors)
        cache.update("t", given[place][0][::2], given[place][1][::2] * 2)
        assert np.array_equal(look_up(cache, {"t": keys[::2]}).vectors["t"], 2 * found.vectors["t"][::2])
        cache.erase("t", given[place][0][:30_000])
        assert np.array_equal(np.sort(cache.dump("t")), np.sort(keys[30_000:]))


@pytest.mark.parametrize("piece_bytes", [1 << 12, 1 << 24])
def test_many_missed_rows_are_inserted(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more tables than a kernel takes at once, in one piece or, where they are too many for that, by table."""
    from inference_session.embedding_cache import gpu_writes

    monkeypatch.setattr(gpu_writes, "_STAGED_BYTES", piece_bytes)
    generator = np.random.default_rng(2)
    dims = {f"t{i}": i % 9 + 1 for i in range(80)}
    asked = [generator.integers(LOWEST, HIGHEST, int(generator.integers(0, 2_000))) for _ in dims]
    rows = missed_rows([*dims.values()], asked)
    for part in rows.by_table.values():
        part.vectors[:] = vectors_of(part.keys, part.vectors.shape[1])
    with cache_of(dims, 1 << 27) as cache:
        cache.insert_missing([rows])
        found = look_up(cache, dict(zip(dims, asked, strict=True)))
        stats = cache.stats()
    for t, keys in zip(dims, asked, strict=True):
        assert not len(found.missing[t])
        assert np.array_equal(found.vectors[t], vectors_of(keys, dims[t]))
        assert stats.tables[t].rows == stats.tables[t].inserts == len(np.unique(keys))


@pytest.mark.parametrize("pooling", [PoolingCode.NONE, PoolingCode.SUM])
def test_an_interrupted_look_up_leaves_nothing_behind(pooling: PoolingCode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes after the launch, before what it has noted is read: the next look-up, a shorter one, is right."""
    keys = np.arange(100)
    with cache_of({"t": 4}) as cache:
        cache.insert("t", keys, vectors_of(keys, 4))
        wait, interrupts = cache.device.wait, [KeyboardInterrupt()]

        def interrupted() -> None:
            wait()
            if interrupts:
                raise interrupts.pop()

        monkeypatch.setattr(cache.device, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            look_up(cache, {"t": np.arange(5_000, 10_000)})
        asked, missing = np.concatenate([keys[:40], [1000, 5, 2000, 1000]]), [40, 42, 43]
        with cache.device.request():
            staged, output = cache.device.stage(asked), cache.device.empty((len(asked), 4))
            segments = key_segments([staged], [output])
            segments["pooling"] = pooling
            lookup = Lookup(segments, np.array([len(asked)]), cache.device.counts(1), cache.prepare(segments))
            assert cache.look_up(lookup) == len(missing)
            (rows,) = [misses.rows for misses in cache.misses(lookup)]
    assert rows.positions.tolist() == missing
    assert sorted(rows.by_table[0].keys.tolist()) == [1000, 2000]


def test_rows_come_from_several_threads() -> None:
    """Each of them in its own pieces."""
    parts = np.split(np.random.default_rng(1).permutation(400_000), 8)
    with cache_of({"t": 5}, 1 << 27) as cache, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda keys: cache.insert("t", keys, vectors_of(keys, 5)), parts))
        found = look_up(cache, {"t": np.arange(400_000)})
        assert not len(found.missing["t"])
        assert np.array_equal(found.vectors["t"], vectors_of(np.arange(400_000), 5))


def test_rows_that_the_device_computes_are_waited_for() -> None:
    """Rows are read only after earlier launches on the caller's stream have ended."""
    import cupy

    with cache_of({"t": 4}, 1 << 26) as cache:
        for value in range(5):
            with cupy.cuda.Stream(non_blocking=True):
                vectors = cupy.zeros((100_000, 4), np.float32)
                for _ in range(200):
                    vectors += value
                cache.insert("t", cupy.arange(100_000), vectors)
            assert (look_up(cache, {"t": np.arange(100_000)}).vectors["t"] == 200 * value).all()


def test_arrays_on_the_device_are_checked_as_others_are() -> None:
    """Shapes and types."""
    import cupy

    keys, vectors = cupy.arange(3), cupy.ones((3, 4), np.float32)
    with cache_of({"t": 4}) as cache:
        for wrong in ((keys, vectors[:2]), (keys, vectors.astype(np.int32)), (keys.astype(np.float32), vectors)):
            with pytest.raises(InvalidRequestError, match="expected"):
                cache.insert("t", *wrong)
        assert not len(cache.dump("t"))


def test_rows_that_are_hit_stay() -> None:
    """Under a flood of new keys, rows that are looked up all the time are mostly still there."""
    with cache_of({"t": 4}, 1 << 22) as cache:
        capacity = cache.stats().capacity
        hot = np.arange(capacity // 10)
        cache.insert("t", hot, vectors_of(hot, 4))
        for i in range(40):
            for _ in range(8):
                look_up(cache, {"t": hot})
            cold = np.arange(capacity // 4) + (i + 1) * 10**6
            cache.insert("t", cold, vectors_of(cold, 4))
        kept = len(hot) - len(look_up(cache, {"t": hot}).missing["t"])

        # None would be left of ten times as many evictions at random. Keys are written in small pieces, so that
        # requests wait little, and each piece lowers the marks that it passes: 0.69 stay on an H200.
        assert kept > 0.65 * len(hot)


def test_what_cannot_be_is_refused_clearly() -> None:
    """Too little memory or too much: errors that say what to do."""
    with pytest.raises(ConfigurationError, match=r"cache_bytes is 100, too little for 1 tables on a GPU: set at"):
        cache_of({"t": 4}, 100)
    with pytest.raises(ConfigurationError, match=r"needs \d+ bytes on cuda:0, which has \d+ free of \d+"):
        cache_of({"t": 1024}, 1 << 44)
    with cache_of({"t": 4}) as cache:
        assert repr(cache).startswith("<GpuEmbeddingCache [1 tables, 0 of")
    assert repr(cache) == "<GpuEmbeddingCache closed>"


def test_a_thread_may_begin_with_a_look_up() -> None:
    """The thread has not used the device before."""
    keys = {"t": np.arange(8)}
    with cache_of({"t": 4}) as cache, ThreadPoolExecutor(1) as pool:
        cache.insert("t", keys["t"], np.ones((8, 4), np.float32))
        look_up(cache, keys)
        assert (pool.submit(look_up, cache, keys).result().vectors["t"] == 1).all()


@contextmanager
def pinned(rows: Any) -> Iterator[Any]:
    """The rows where a GPU reads them."""
    from inference_session.device.pinned import PinnedArray

    array = PinnedArray(rows)
    try:
        yield array
    finally:
        array.close()


def read_by_the_device(array: Any) -> Any:
    """What a kernel finds at the array's address."""
    import cupy

    copy = cupy.RawKernel(
        'extern "C" __global__ void copy(const float* a, float* b) { b[threadIdx.x] = a[threadIdx.x]; }', "copy"
    )
    out = cupy.zeros(array.array.size, np.float32)
    copy((1,), (array.array.size,), (np.uint64(array.address), out))
    return out.get().reshape(array.array.shape)


def test_rows_may_be_pinned_or_read_only_already() -> None:
    """Memory that CuPy has pinned is used unchanged; read-only memory is read, too."""
    from inference_session.device.pinned import pinned_empty

    rows = pinned_empty((100, 4), np.float32)
    rows[:] = vectors_of(np.arange(100), 4)
    frozen = rows.copy()
    frozen.flags.writeable = False
    for vectors in (rows, frozen):
        with pinned(vectors) as array:
            assert np.array_equal(read_by_the_device(array), rows)


def test_rows_may_be_pinned_twice() -> None:
    """Two uses share rows or a part of them: when one has ended, the other can still be read."""
    rows = vectors_of(np.arange(100), 4)
    for part in (rows, rows[:50]):
        with pinned(rows) as whole:
            with pinned(part):
                pass
            assert np.array_equal(read_by_the_device(whole), rows)
