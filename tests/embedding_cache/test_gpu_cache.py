"""The GPU cache against the contract of both twins, and what is its own: streams, backing rows, eviction within sets.

Runs where there is a CUDA device: `make test PYTEST_ARGS="-m gpu"`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inference_session.device.discovery import unusable
from inference_session.embedding_cache import create_embedding_cache
from inference_session.embedding_cache.base import LookupResult
from inference_session.errors import ConfigurationError, InvalidRequestError, TableNotFoundError
from inference_session.kernels.cuda.records import READERS, READERS_BYTES
from tests.embedding_cache.contract import AMPLE_BYTES, DIMS, HIGHEST, LOWEST, EmbeddingCacheContract, vectors_of
from tests.testing.full_device import full_device

NO_GPU = unusable(0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NO_GPU is not None, reason=f"no GPU: {NO_GPU}")]
if NO_GPU is None:
    import cupy


class HostView:
    """A GPU cache for tests that know NumPy only: what it returns is copied to the host."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def __enter__(self) -> HostView:
        return self

    def __exit__(self, *error: object) -> None:
        self._cache.close()

    def lookup(self, keys: Mapping[str, Any], out: Mapping[str, Any] | None = None, wait: bool = False) -> Any:
        on_device = None if out is None else {t: _uploaded(array) for t, array in out.items()}
        result = self._cache.lookup(keys, on_device, wait)
        missing = {table: cupy.asnumpy(positions) for table, positions in result.missing.items()}
        vectors = {table: cupy.asnumpy(array) for table, array in result.vectors.items()}
        for table, array in (out or {}).items():
            if isinstance(array, np.ndarray) and table in vectors:
                array[...] = vectors[table]
                vectors[table] = array
        return LookupResult(vectors, missing)

    def dump(self, table: str) -> NDArray[np.int64]:
        return cupy.asnumpy(self._cache.dump(table))


def _uploaded(array: Any) -> Any:
    """The same array on the device, with the same strides; what is no writeable float32 stays as it is."""
    if not isinstance(array, np.ndarray) or not array.flags.writeable:
        return array
    memory = cupy.zeros(array.size * 16 + 64, np.uint8)
    strided = cupy.ndarray(array.shape, array.dtype, memory.data, tuple(map(abs, array.strides)))
    strided[...] = cupy.asarray(array)
    return strided


class TestGpuEmbeddingCache(EmbeddingCacheContract):
    """The contract, on the device."""

    def create(self, dims: dict[str, int], cache_bytes: int = AMPLE_BYTES) -> Any:
        return HostView(create_embedding_cache(dims, "cuda:0", cache_bytes=cache_bytes))

    least_bytes = 6_000

    def test_out_of_another_type_or_shape_is_refused(self) -> None:
        """`out` must have room for exactly the vectors, be float32, on the device and there for every table."""
        bad = {
            r"out is CuPy's float64 \[1, 5\], expected CuPy's float32": cupy.zeros((1, 5)),
            r"out is CuPy's float32 \[2, 5\]": cupy.zeros((2, 5), np.float32),
            "out is list": [[0.0] * 5],
            "elements of a row adjacent": cupy.zeros((1, 10), np.float32)[:, ::2],
        }
        with self.create(DIMS) as cache:
            for message, out in bad.items():
                with pytest.raises(InvalidRequestError, match=message):
                    cache.lookup({"wide": [1]}, out={"wide": out})
            with pytest.raises(InvalidRequestError, match="no array for table 'wide'"):
                cache.lookup({"wide": [1]}, out={})


def cache_of(dims: dict[str, int], cache_bytes: int = 1 << 24, **settings: Any) -> Any:
    return create_embedding_cache(dims, "cuda:0", cache_bytes=cache_bytes, **settings)


def rows_of(result: LookupResult, table: str) -> Any:
    return cupy.asnumpy(result.vectors[table])


@pytest.mark.parametrize(("dtype", "error"), [("float32", 0.0), ("float16", 2**-11), ("int8", 1 / 255)])
@pytest.mark.parametrize("dim", [1, 3, 4, 8, 9, 32, 64, 100, 128, 200, 513])
def test_rows_are_held_as_asked(dtype: Any, error: float, dim: int) -> None:
    """Any dimension, any type: a look-up answers float32 within the error of the type; the rest is untouched."""
    generator = np.random.default_rng(dim)
    keys = generator.integers(LOWEST, HIGHEST, 500)
    vectors = generator.random((500, dim), np.float32)
    with cache_of({"t": dim}, dtype=dtype) as cache:
        cache.insert("t", keys, vectors)
        asked = cupy.asarray(np.concatenate([generator.permutation(keys), [0, 1, -1]]))
        out = cupy.full((len(asked), dim), np.nan, np.float32)
        result = cache.lookup({"t": asked}, {"t": out})
        expected = vectors[[np.flatnonzero(keys == k)[0] for k in asked.get()[:500].tolist()]]

        assert result.missing["t"].tolist() == [500, 501, 502]
        assert np.abs(out.get()[:500] - expected).max() <= error
        assert np.isnan(out.get()[500:]).all()


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 700), min_size=1, max_size=70),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(["float32", "float16", "int8"]),
)
def test_any_request_answers_as_the_oracle(sizes: list[int], seed: int, dtype: Any) -> None:
    """Any number of tables of any dims, any number of keys, some of them missing or twice: as NumPy has it."""
    generator = np.random.default_rng(seed)
    dims = {f"t{i}": int(generator.integers(1, 70)) for i in range(len(sizes))}
    held = {t: generator.integers(LOWEST, HIGHEST, 300) for t in dims}
    with cache_of(dims, 1 << 27, dtype=dtype) as cache:
        for t, keys in held.items():
            cache.insert(t, keys, vectors_of(keys, dims[t]))
        asked = {
            t: generator.choice(np.concatenate([held[t], generator.integers(LOWEST, HIGHEST, 30)]), size)
            for t, size in zip(dims, sizes, strict=True)
        }
        result = cache.lookup({t: cupy.asarray(keys) for t, keys in asked.items()})
        for t, keys in asked.items():
            known = np.isin(keys, held[t])
            assert result.missing[t].tolist() == np.flatnonzero(~known).tolist()
            expected = np.where(known[:, None], vectors_of(keys, dims[t]), 0)
            assert np.allclose(rows_of(result, t), expected, rtol=1e-3)
        stats = cache.stats()
        assert stats["hits"] + stats["misses"] == sum(sizes)
        assert stats["misses"] == sum(len(result.missing[t]) for t in dims)


def test_large_requests_with_hot_keys_are_right() -> None:
    """A million keys, most of them the same few, inserted and looked up at once: the last of equal keys wins."""
    generator = np.random.default_rng(1)
    keys = np.minimum(generator.zipf(1.2, 1_000_000), 200_000).astype(np.int64) - 100
    vectors = np.arange(len(keys), dtype=np.float32)[:, None].repeat(8, 1)
    with cache_of({"t": 8}, 1 << 26) as cache:
        cache.insert("t", keys, vectors)
        last = dict(zip(keys.tolist(), range(len(keys)), strict=True))
        result = cache.lookup({"t": keys})
        missing = set(result.missing["t"].tolist())
        expected = np.array([0 if i in missing else last[k] for i, k in enumerate(keys.tolist())], np.float32)

        assert not missing
        assert np.array_equal(rows_of(result, "t"), expected[:, None].repeat(8, 1))
        assert cache.stats()["rows"] == len(last) == len(cache.dump("t"))


def test_it_fills_to_nine_tenths_and_more() -> None:
    """So many random keys as there is capacity fill more than nine tenths of it; those of half are all kept."""
    with cache_of({"t": 4}, 1 << 24) as cache:
        capacity = cache.stats()["capacity"]
        keys = np.random.default_rng(2).integers(LOWEST, HIGHEST, capacity)
        cache.insert("t", keys[: capacity // 2], vectors_of(keys[: capacity // 2], 4))
        kept = len(cache.dump("t"))
        cache.insert("t", keys, vectors_of(keys, 4))
        held = cache.dump("t").get()

        assert kept == capacity // 2
        assert 0.92 * capacity < len(held) <= capacity
        assert np.array_equal(rows_of(cache.lookup({"t": held}), "t"), vectors_of(held, 4))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_misses_come_from_backing_rows(dtype: Any) -> None:
    """Keys that are not cached are answered from pinned host memory by the same look-up; unknown ones are missing."""
    generator = np.random.default_rng(3)
    keys = generator.permutation(np.arange(-5000, 5000))
    vectors = generator.random((10_000, 16), np.float32)
    backing = {
        "t": (keys, vectors),
        "none": (np.empty(0, np.int64), np.empty((0, 2), np.float32)),
        "one": ([7], [[1.5]]),
    }
    backing["one"] = (np.array([7]), np.array([[1.5]], np.float32))
    with cache_of({"t": 16, "none": 2, "one": 1}, 1 << 20, backing=backing, dtype=dtype) as cache:
        cache.insert("t", keys[:1000], vectors[:1000] + 1)
        asked = cupy.asarray(np.concatenate([keys[:2000], [5000, LOWEST]]))
        result = cache.lookup({"t": asked, "none": cupy.asarray([1]), "one": cupy.asarray([7, 8])})
        found = rows_of(result, "t")

        assert result.missing["t"].tolist() == [2000, 2001]
        assert np.allclose(found[:1000], vectors[:1000] + 1, atol=0.01)
        assert np.array_equal(found[1000:2000], vectors[1000:2000])
        assert rows_of(result, "one").tolist() == [[1.5], [0.0]]
        assert result.missing["none"].tolist() == [0]
        assert cache.stats()["tables"]["t"]["misses"] == 1002


def test_backing_may_be_pinned_or_read_only_already() -> None:
    """Memory that CuPy has pinned is used as it is, memory that must not be written to is served all the same."""
    from inference_session.tables.device_rows import pinned_empty

    rows = pinned_empty((100, 4), np.float32)
    rows[:] = vectors_of(np.arange(100), 4)
    frozen = rows.copy()
    frozen.flags.writeable = False
    for vectors in (rows, frozen):
        with cache_of({"t": 4}, 0, backing={"t": (np.arange(100), vectors)}) as cache:
            assert np.array_equal(rows_of(cache.lookup({"t": cupy.arange(100)}), "t"), rows)


def test_caches_may_share_backing_rows() -> None:
    """Two caches over the same rows, or over a part of them: the one that is left answers when the other is closed."""
    rows = vectors_of(np.arange(100), 4)
    for part in (rows, rows[:50]):
        first = cache_of({"t": 4}, 0, backing={"t": (np.arange(len(part)), part)})
        with cache_of({"t": 4}, 0, backing={"t": (np.arange(100), rows)}) as second:
            first.close()
            assert np.array_equal(rows_of(second.lookup({"t": cupy.arange(100)}), "t"), rows)


def test_a_lookup_waits_for_nobody() -> None:
    """With wait=False the call returns while the stream is still busy; its result is there when the stream is done."""
    with cache_of({"t": 8}) as cache, cupy.cuda.Stream(non_blocking=True) as stream:
        cache.insert("t", np.arange(1000), vectors_of(np.arange(1000), 8))
        keys, out = cupy.arange(1000), cupy.zeros((1000, 8), np.float32)
        out.fill(-2)  # compiles
        cache.lookup({"t": keys}, {"t": out}, wait=True)
        busy = cupy.RawKernel('extern "C" __global__ void wait(){for(int i=0;i<500;++i)__nanosleep(1000000);}', "wait")
        busy.compile()
        busy((1,), (1,), ())
        out.fill(-1)
        cache.lookup({"t": keys}, {"t": out})
        returned_early = not stream.done
        stream.synchronize()

        assert returned_early
        assert np.array_equal(out.get(), vectors_of(np.arange(1000), 8))


def test_requests_without_out_come_again() -> None:
    """The same arrays asked for without `out`, often and with other contents: new vectors each time, old ones kept."""
    dims = {f"t{i}": 1 + i for i in range(40)}
    with cache_of(dims, 1 << 26) as cache:
        for t, dim in dims.items():
            cache.insert(t, np.arange(50), vectors_of(np.arange(50), dim))
        for some in (list(dims)[:5], list(dims)):
            with pytest.raises(InvalidRequestError, match="no array for table 't0'"):
                cache.lookup({t: cupy.arange(3) for t in some}, {})
            keys = {t: cupy.arange(i) for i, t in enumerate(some)}
            results = []
            for shift in range(5):
                for array in keys.values():
                    array[...] = cupy.arange(len(array)) + shift
                results.append(cache.lookup(keys).vectors)
            for shift, vectors in enumerate(results):
                for i, t in enumerate(some):
                    assert np.array_equal(vectors[t].get(), vectors_of(np.arange(i) + shift, dims[t]))


def test_the_same_arrays_may_change_their_contents() -> None:
    """A look-up of arrays that were looked up before reads what is in them now, and new arrays are never mixed up."""
    with cache_of({"a": 2, "b": 3}) as cache:
        for t, dim in (("a", 2), ("b", 3)):
            cache.insert(t, np.arange(50), vectors_of(np.arange(50), dim))
        keys = {"a": cupy.arange(10), "b": cupy.arange(10)}
        out = {"a": cupy.zeros((10, 2), np.float32), "b": cupy.zeros((10, 3), np.float32)}
        for shift in range(5):
            keys["a"][...] = cupy.arange(10) + shift
            result = cache.lookup(keys, out)
            assert rows_of(result, "a")[:, 0].tolist() == [float(i + shift) for i in range(10)]
        for shift in range(100):
            asked, into = cupy.arange(shift, shift + 10) % 50, cupy.zeros((10, 2), np.float32)
            assert cache.lookup({"a": asked}, {"a": into}).vectors["a"][:, 0].tolist() == asked.tolist()


def test_rows_that_are_hit_stay() -> None:
    """Under a flood of new keys, rows that are looked up all the time are mostly still there."""
    with cache_of({"t": 4}, 1 << 22) as cache:
        capacity = cache.stats()["capacity"]
        hot = np.arange(capacity // 10)
        cache.insert("t", hot, vectors_of(hot, 4))
        for i in range(40):
            for _ in range(8):
                cache.lookup({"t": hot})
            cold = np.arange(capacity // 4) + (i + 1) * 10**6
            cache.insert("t", cold, vectors_of(cold, 4))
        kept = len(hot) - len(cache.lookup({"t": hot}).missing["t"])

        assert kept > 0.7 * len(hot)  # none would be left of ten times as many evictions at random


def test_writers_on_other_streams_leave_whole_rows() -> None:
    """Look-ups on their own stream see rows of one version only while another stream replaces and evicts them."""
    dim, num_keys = 128, 4000
    keys = np.arange(num_keys)
    broken: list[Any] = []
    with cache_of({"t": dim}, 3_000_000) as cache:
        done = threading.Event()

        def read() -> None:
            with cupy.cuda.Stream(non_blocking=True):
                generator = np.random.default_rng(5)
                while not done.is_set():
                    asked = generator.integers(0, num_keys, 20_000)
                    result = cache.lookup({"t": asked}, wait=True)
                    found = np.delete(np.arange(len(asked)), result.missing["t"].get())
                    rows = rows_of(result, "t")[found]
                    if not (rows == rows[:, :1]).all() or not np.array_equal(rows[:, 0] % 1000, asked[found] % 1000):
                        broken.append(rows)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            with cupy.cuda.Stream(non_blocking=True):
                for version in range(150):
                    write = cache.update if version % 3 == 2 else cache.insert
                    write("t", keys, vectors_of(keys, dim, 1000 * version))
                    cache.erase("t", keys[version % 7 :: 7])
                cupy.cuda.get_current_stream().synchronize()
        finally:
            done.set()
            reader.join()

    assert not broken


def test_what_cannot_be_is_refused_clearly() -> None:
    """Too little memory, too much, a wrong table or dtype, arrays of the wrong kind: errors that say what to do."""
    with pytest.raises(ConfigurationError, match=r"cache_bytes is 100, too little for 1 tables on a GPU: at least \d+"):
        cache_of({"t": 4}, 100)
    with pytest.raises(ConfigurationError, match=r"needs \d+ bytes on cuda:0, which has \d+ free of \d+"):
        cache_of({"t": 1024}, 1 << 44)
    with pytest.raises(ConfigurationError, match="dtype 'float64' is none of"):
        cache_of({"t": 4}, dtype="float64")
    with pytest.raises(ConfigurationError, match="this machine shows"):
        create_embedding_cache({"t": 4}, "cuda:99", cache_bytes=1 << 20)
    with pytest.raises(TableNotFoundError, match="no table 'other'"):
        cache_of({"t": 4}, backing={"other": ([], [])})
    with pytest.raises(ConfigurationError, match="backing of table 't': vectors are"):
        cache_of({"t": 4}, backing={"t": ([1], np.zeros((1, 3), np.float32))})
    with cache_of({"t": 4}) as cache:
        apart = cupy.zeros(84, np.uint8)[4:]
        with pytest.raises(InvalidRequestError, match="keys must lie at multiples of 8 bytes"):
            cache.lookup({"t": apart.view(np.int64)})
        with pytest.raises(InvalidRequestError, match=r"out is NumPy's float32 \[1, 4\], expected CuPy's"):
            cache.lookup({"t": [1]}, {"t": np.zeros((1, 4), np.float32)})
        assert repr(cache).startswith("<GpuEmbeddingCache [1 tables, 0 of")
    assert repr(cache) == "<GpuEmbeddingCache closed>"


def test_an_index_that_finds_no_memory_is_refused_clearly() -> None:
    """That over backing rows lies on the device beside the cache, and its bytes are nobody's setting."""
    keys = np.arange(5_000_000)
    backing = {"t": (keys, np.zeros((len(keys), 1), np.float32))}
    message = r"memory ran out on cuda:0, which has \d+ bytes free of \d+"
    with full_device(spare_bytes=64 << 20), pytest.raises(ConfigurationError, match=message):
        cache_of({"t": 1}, 1 << 20, backing=backing)


def test_a_request_beyond_one_launch_is_refused() -> None:
    """Its keys are numbered by 31 bits; the next one is answered."""
    keys = cupy.broadcast_to(cupy.asarray([1]), 2**31)
    with cache_of({"t": 4}) as cache:
        with pytest.raises(InvalidRequestError, match="2147483648 keys is more than one launch can answer"):
            cache.lookup({"t": keys})
        assert cupy.asnumpy(cache.lookup({"t": keys[:3]}).missing["t"]).tolist() == [0, 1, 2]


def test_a_writer_waits_for_however_many_look_ups() -> None:
    """Blocks of look-ups are counted between two writes: minutes without one are more than 32 bits can count."""
    with cache_of({"t": 4}) as cache:
        cache.insert("t", [1], np.full((1, 4), 1, np.float32))
        cupy.cuda.Device(0).synchronize()
        counts = cupy.ndarray((READERS, READERS_BYTES // READERS // 8), np.uint64, cache._memory)
        counts[:, :2] = 2**32 - 1  # arrived, and departed again
        for key in (2, 3):
            assert cupy.asnumpy(cache.lookup({"t": [1, key]}).missing["t"]).tolist() == [1]
            cache.insert("t", [key], np.full((1, 4), key, np.float32))
            cupy.cuda.Device(0).synchronize()
        assert rows_of(cache.lookup({"t": [1, 2, 3]}), "t").tolist() == [[k] * 4 for k in (1, 2, 3)]


def test_a_thread_may_begin_with_a_look_up() -> None:
    """One that has not used the device before, where arrays and memory of the look-up are there already."""
    keys = {"t": cupy.arange(8)}
    out = {"t": cupy.zeros((8, 4), np.float32)}
    with cache_of({"t": 4}) as cache, ThreadPoolExecutor(1) as pool:
        cache.insert("t", keys["t"], cupy.ones((8, 4), np.float32))
        for _ in range(3):
            cache.lookup(keys, out)
        cupy.cuda.Device(0).synchronize()
        out["t"][:] = 0
        cupy.cuda.Device(0).synchronize()
        pool.submit(cache.lookup, keys, out, wait=True).result()
        assert (out["t"] == 1).all()
