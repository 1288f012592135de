"""Sessions over stores whose cache is on a GPU: the answers of NumPy and of the processor, whatever is cached.

Runs where there is a CUDA device: `make test PYTEST_ARGS="-m gpu"`.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_session import InferenceSession, Request
from inference_session.device.discovery import unusable_for_sessions
from inference_session.embedding_cache.cpu import CpuEmbeddingCache
from inference_session.errors import ConfigurationError, SessionClosedError, UnavailableError, UnknownKeyError
from inference_session.kernels.records import SEGMENT, Lookup, PoolingCode, VectorCode, address_of
from inference_session.model_spec import TableSpec
from inference_session.parameter_server.create import create_store
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.server import ParameterServer
from inference_session.parameter_server.tier import Tier
from inference_session.rows.base import Rows, look_up_keys
from inference_session.rows.hot_keys import read_hot_keys
from inference_session.rows.stored import StoredRows
from tests.testing import concat_model, small_model
from tests.testing.memory_store import MemoryStore
from tests.testing.server_calls import await_inserts
from tests.testing.servers import PATIENCE_S, wait_until
from tests.testing.stored_model import (
    DIMS,
    HASHED_DEFAULT,
    assert_answers,
    assert_updates_are_read_back,
    push,
    url_of,
    write_stored,
)
from tests.testing.wrapper_store import FaultStore, HookedStore

NO_GPU = unusable_for_sessions(0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NO_GPU is not None, reason=f"no GPU: {NO_GPU}")]

SMALL_CACHE_BYTES = 7000
"""Room for 62 rows of each table."""
SPECS = (
    TableSpec("wide", "wide", 300, 8, keys="stored", default_vector=tuple(range(8))),
    TableSpec("odd", "odd", 200, 3, keys="stored", default_vector=(0.5, -0.5, 2.0)),
    TableSpec("numbered", "numbered", 90, 4, keys="row_number"),
)


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, small_model.Arrays]:
    """The small model, its tables pushed to a RocksDB next to the repository, and then removed."""
    return write_stored(tmp_path_factory.mktemp("stored"))


@pytest.fixture(scope="module", params=[SMALL_CACHE_BYTES, 1 << 20], ids=["small cache", "all cached"])
def session(version: tuple[Path, small_model.Arrays], request: pytest.FixtureRequest) -> Iterator[InferenceSession]:
    with open_on_gpu(version[0], cache_bytes=request.param) as opened:
        yield opened


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, small_model.Arrays]:
    """The same, for one test that changes it."""
    return write_stored(tmp_path)


def open_on_gpu(directory: Path, **settings: Any) -> InferenceSession:
    size = {} if "cache_fraction" in settings else {"cache_bytes": 1 << 20}
    settings = {**size, "persistent_store": url_of(directory), "warm_up_s": 10, **settings}
    return InferenceSession.open(directory, device="cuda:0", **settings)


def rows_of(session: InferenceSession) -> StoredRows:
    assert isinstance(session.rows, StoredRows)
    assert session.rows.readers[0].device.name == "cuda:0"
    return session.rows


@pytest.mark.parametrize("num_samples", [0, 1, 7, 64, 1000])
def test_all_outputs_agree_with_numpy(
    session: InferenceSession, version: tuple[Path, small_model.Arrays], num_samples: int
) -> None:
    """Plain, joined and pooled look-ups, float16 tables, unknown keys and row numbers from the end, cached or not."""
    for seed in range(6):
        inputs = small_model.random_inputs(num_samples, np.random.default_rng(seed), num_items=seed)
        assert_answers(session.run(inputs), small_model.expected(version[1], inputs))
        if seed % 2:
            await_inserts(rows_of(session))


def test_joined_requests_have_their_own_answers(
    session: InferenceSession, version: tuple[Path, small_model.Arrays]
) -> None:
    """Requests of several sizes in one call, with bags of several lengths."""
    rng = np.random.default_rng(1)
    inputs = [small_model.random_inputs(n, rng, num_items=n % 4) for n in (3, 1, 40, 2)]
    for answer, each in zip(session.run_many([Request(each) for each in inputs]), inputs, strict=True):
        assert_answers(answer, small_model.expected(version[1], each))


def test_many_threads_get_their_own_answers(
    session: InferenceSession, version: tuple[Path, small_model.Arrays]
) -> None:
    """Requests at once, some of whose rows are cached while others are fetched."""

    def ask(seed: int) -> None:
        inputs = small_model.random_inputs(1 + seed % 9, np.random.default_rng(seed))
        assert_answers(session.run(inputs), small_model.expected(version[1], inputs))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(200)))
    await_inserts(rows_of(session))
    cache = session.stats()["cache"]
    assert 0 < cache["rows"] <= cache["capacity"]


def test_what_was_missing_is_a_hit_once_it_is_cached(version: tuple[Path, small_model.Arrays]) -> None:
    """The same request misses each of its keys at first, later only those that are unknown."""
    inputs = small_model.random_inputs(40, np.random.default_rng(0))
    unknown = int((~np.isin(inputs["items"], version[1]["hashed/key"])).sum())
    counts = []
    with open_on_gpu(version[0]) as session:
        for _ in range(2):
            session.run(inputs)
            await_inserts(rows_of(session))
            cache, tables = session.stats()["cache"], session.stats()["tables"]
            counts.append((cache["hits"] + cache["misses"], cache["misses"], tables["hashed"]["default_vectors"]))

    num_keys = 40 * (1 + 2 + 5 + 1)
    assert [count[0] for count in counts] == [num_keys, 2 * num_keys]
    assert counts[1][1] - counts[0][1] == unknown
    assert [count[2] for count in counts] == [unknown, 2 * unknown]


def test_counts_are_those_of_the_processor(version: tuple[Path, small_model.Arrays]) -> None:
    """The same statistics of tables, and as many keys looked up in the cache, for the same requests."""
    counts = []
    for device in ("cpu", "cuda:0"):
        with InferenceSession.open(
            version[0], device=device, persistent_store=url_of(version[0]), cache_bytes=1 << 20
        ) as session:
            for seed in range(3):
                session.run(small_model.random_inputs(20, np.random.default_rng(seed)))
            stats = session.stats()
            counts.append((stats["tables"], stats["cache"]["hits"] + stats["cache"]["misses"]))
            assert stats["cache"]["tables"]["code"].keys() == {
                *("hits", "misses", "inserts", "updates", "evictions", "erases", "rows", "capacity", "bytes")
            }
    assert counts[0] == counts[1]


def test_lookup_answers_as_from_files(session: InferenceSession, version: tuple[Path, small_model.Arrays]) -> None:
    """session.lookup() gives vectors on the host, default vectors for unknown keys, the last row for -1."""
    keys = version[1]["hashed/key"]
    for _ in range(2):
        vectors = session.lookup("hashed", [*keys[:5].tolist(), 10**15, *keys[:5].tolist()])
        np.testing.assert_array_equal(vectors, [*version[1]["hashed"][:5], HASHED_DEFAULT, *version[1]["hashed"][:5]])
        np.testing.assert_array_equal(session.lookup("code", [-1, 39, 40])[:2], version[1]["code"][[39, 39]])
        np.testing.assert_array_equal(session.lookup("user.weight", []), np.empty((0, 4)))
        await_inserts(rows_of(session))


def test_default_vectors_are_not_cached(version: tuple[Path, small_model.Arrays]) -> None:
    """The cache holds nothing under a key that no tier has."""
    with open_on_gpu(version[0], warm_up_s=0) as session:
        await_inserts(rows_of(session))
        before = session.stats()["cache"]["tables"]["hashed"]
        for _ in range(3):
            session.lookup("hashed", [10**15])
            await_inserts(rows_of(session))
        after = session.stats()["cache"]["tables"]["hashed"]

    assert after["rows"] == before["rows"]
    assert after["misses"] == before["misses"] + 3


def test_unknown_keys_can_be_refused(version: tuple[Path, small_model.Arrays]) -> None:
    """unknown_keys=reject means the same as on the processor; the next request is answered."""
    inputs = small_model.random_inputs(2, np.random.default_rng(0))
    with open_on_gpu(version[0], unknown_keys="reject") as session:
        with pytest.raises(UnknownKeyError, match="'hashed'"):
            session.run({**inputs, "items": np.full_like(inputs["items"], 11)})
        known = {**inputs, "items": np.full_like(inputs["items"], 3)}
        assert_answers(session.run(known), small_model.expected(version[1], known))


@pytest.mark.parametrize("cache_bytes", [SMALL_CACHE_BYTES, 1 << 20])
def test_what_is_updated_is_answered(written: tuple[Path, small_model.Arrays], cache_bytes: int) -> None:
    """Rows updated, erased and new are answered at once, cached before or not, whichever way a row is counted."""
    directory, tables = written
    first = int(tables["hashed/key"][0])
    sevens = np.full((2, 3), 7, np.float32)
    with open_on_gpu(directory, cache_bytes=cache_bytes) as session:
        for _ in range(2):
            session.lookup("code", [39, -1, -40, 0, 5])
            session.lookup("hashed", [first, 10**15])
            await_inserts(rows_of(session))

        session.update("code", [39, 0], sevens)
        session.update("hashed", [10**15], np.array([[1, 2]], np.float32))
        session.erase("hashed", [first])

        for _ in range(2):
            np.testing.assert_array_equal(session.lookup("code", [39, -1, -40, 0]), sevens[[0, 0, 0, 0]])
            np.testing.assert_array_equal(session.lookup("hashed", [10**15, first]), [[1, 2], HASHED_DEFAULT])
        np.testing.assert_array_equal(session.lookup("code", [5]), tables["code"][[5]])


def test_updates_under_requests_are_never_lost(written: tuple[Path, small_model.Arrays]) -> None:
    """While requests fetch and cache rows, a thread that updates a row reads it back; no row is answered half."""
    with open_on_gpu(written[0], cache_bytes=SMALL_CACHE_BYTES) as session:
        assert_updates_are_read_back(session, lambda keys: [session.lookup("user.weight", keys)], num_updates=60)


def test_refresh_sees_what_was_written(written: tuple[Path, small_model.Arrays]) -> None:
    """refresh() replaces rows that have changed, also such as are only on their way into the cache."""
    directory, tables = written
    first, second = tables["hashed/key"][:2].tolist()
    with open_on_gpu(directory) as session:
        session.lookup("hashed", [first, 10**15])
        await_inserts(rows_of(session))
        session.lookup("hashed", [second])
        with create_store(url_of(directory), Namespace("small", "1"), DIMS, writable=True) as store:
            store.insert("hashed", np.array([first, second, 10**15]), np.array([[7, 7], [9, 9], [8, 8]], np.float32))

        session.refresh()

        for _ in range(2):
            found = session.lookup("hashed", [first, second, 10**15])
            np.testing.assert_array_equal(found, [[7, 7], [9, 9], [8, 8]])
            await_inserts(rows_of(session))


def test_rows_are_refreshed_in_the_background(written: tuple[Path, small_model.Arrays]) -> None:
    """With refresh_interval_s a change is seen without a call of refresh()."""
    directory, tables = written
    first = int(tables["hashed/key"][0])
    with open_on_gpu(directory, refresh_interval_s=0.05) as session:
        session.lookup("hashed", [first])
        with create_store(url_of(directory), Namespace("small", "1"), DIMS, writable=True) as store:
            store.insert("hashed", np.array([first]), np.full((1, 2), 7, np.float32))
        wait_until(lambda: bool((session.lookup("hashed", [first]) == 7).all()), "the row to be refreshed")


def test_async_inserts_answer_by_default_and_then_by_row(version: tuple[Path, small_model.Arrays]) -> None:
    """insert_mode=async: from the threshold on, missing keys get default vectors, counted, and their rows later."""
    inputs = small_model.random_inputs(30, np.random.default_rng(0), num_items=4)
    nothing = {folder: np.zeros_like(vectors) for folder, vectors in version[1].items()}
    nothing["hashed"] = np.tile(np.array(HASHED_DEFAULT, np.float32), (30, 1))
    nothing["hashed/key"] = version[1]["hashed/key"]
    with open_on_gpu(version[0], insert_mode="async", hit_rate_threshold=0) as session:
        rows = rows_of(session)
        await_inserts(rows)
        for spec in small_model.TABLES:
            rows.caches[0].clear(spec.folder)

        first = session.run(inputs)
        defaults = session.stats()["tables"]["user_weight"]["default_vectors"]
        await_inserts(rows)
        second = session.run(inputs)
        dropped = session.stats()["dropped_inserts"]

    assert defaults == 60
    assert dropped == 0
    assert_answers(first, small_model.expected(nothing, inputs))
    assert_answers(second, small_model.expected(version[1], inputs))


def test_the_next_session_starts_with_the_rows_of_the_last(
    version: tuple[Path, small_model.Arrays], tmp_path: Path
) -> None:
    """Rows that one session has cached on the GPU are cached in the next before the first request."""
    settings = {"state_dir": str(tmp_path), "warm_up_s": PATIENCE_S}
    inputs = small_model.random_inputs(40, np.random.default_rng(0))
    unknown = int((~np.isin(inputs["items"], version[1]["hashed/key"])).sum())
    with open_on_gpu(version[0], **settings) as session:
        session.run(inputs)
        await_inserts(rows_of(session))
    assert np.isin(2 * inputs["codes"], read_hot_keys(tmp_path / "small.hot_keys")["code"]).all()
    with open_on_gpu(version[0], **settings) as session:
        assert session.stats()["cache"]["rows"] > 0
        session.run(inputs)
        assert session.stats()["cache"]["misses"] == unknown


def test_the_cache_takes_a_part_of_the_rows(version: tuple[Path, small_model.Arrays]) -> None:
    """cache_fraction counts rows: 1 has room for all of them, 0 leaves the look-up to the processor."""
    with open_on_gpu(version[0], cache_fraction=1) as session:
        tables = session.stats()["cache"]["tables"]
        assert all(tables[spec.folder]["capacity"] >= spec.num_rows for spec in small_model.TABLES)
    with open_on_gpu(version[0], cache_fraction=0) as session:
        inputs = small_model.random_inputs(9, np.random.default_rng(0))
        assert_answers(session.run(inputs), small_model.expected(version[1], inputs))
        assert session.stats()["cache"]["capacity"] == 0


def test_without_a_cache_a_gpu_computes_with_vectors_of_the_processor(tmp_path: Path) -> None:
    """Also where inputs are written next to them, and sizes recur."""
    rng = np.random.default_rng(concat_model.CONCAT_SEED)
    model = concat_model.write(tmp_path / "repository" / "joined" / "1", rng)
    push(model.directory, url_of(model.directory))
    with open_on_gpu(model.directory, cache_fraction=0) as session:
        for num_samples in 3 * [1, 64, 300]:
            inputs = model.inputs(num_samples, rng)
            answer = session.run(inputs)
            for name, array in model.expected(inputs).items():
                np.testing.assert_allclose(answer[name], array, rtol=1e-4, atol=1e-4)


def test_a_cache_that_does_not_fit_is_refused(version: tuple[Path, small_model.Arrays]) -> None:
    """Too little for a row of each table, and more than the device has: both errors name the bytes needed."""
    with pytest.raises(ConfigurationError, match="cache_bytes is 100, too little for 3 tables on a GPU: set at least"):
        open_on_gpu(version[0], cache_bytes=100)
    from inference_session.device.cuda import CudaDevice
    from inference_session.embedding_cache.gpu import GpuEmbeddingCache

    with pytest.raises(ConfigurationError, match=r"cache_bytes needs \d+ bytes on cuda:0, which has \d+ free of \d+"):
        GpuEmbeddingCache({"huge": 64}, 1 << 42, CudaDevice(0), num_rows={"huge": 1 << 40})


def test_more_rows_than_are_written_or_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large cache that is filled, dumped, updated and erased in pieces holds the same as without pieces."""
    monkeypatch.setattr("inference_session.embedding_cache.gpu._BUCKETS_AT_ONCE", 50)
    from inference_session.device.cuda import CudaDevice
    from inference_session.embedding_cache.gpu import GpuEmbeddingCache

    keys = np.random.default_rng(0).permutation(np.arange(-5_000, 5_000))
    vectors = np.stack([keys, -keys], axis=1).astype(np.float32)
    with GpuEmbeddingCache({"t": 2}, 1 << 22, CudaDevice(0), num_rows={"t": len(keys)}) as cache:
        cache.insert("t", keys, vectors)
        held = cache.dump("t")
        assert len(held) == len(np.unique(held)) == cache.stats().rows >= 0.99 * len(keys)
        assert np.isin(held, keys).all()
        assert np.array_equal(np.sort(cache.hottest("t")), np.sort(held))
        cache.update("t", keys, vectors + 1)
        assert np.array_equal(np.sort(cache.dump("t")), np.sort(held))
        cache.erase("t", keys[keys % 2 == 0])
        assert np.array_equal(np.sort(cache.dump("t")), np.sort(held[held % 2 != 0]))
        cache.clear("t")
        assert cache.stats().rows == len(cache.dump("t")) == 0


def test_a_closed_session_refuses_look_ups(version: tuple[Path, small_model.Arrays]) -> None:
    """Nothing reads device memory that has been given back; closing twice is fine, and statistics remain."""
    session = open_on_gpu(version[0])
    rows = rows_of(session)
    session.close()
    session.close()
    with pytest.raises(SessionClosedError):
        session.run(small_model.random_inputs(2, np.random.default_rng(0)))
    with pytest.raises(SessionClosedError):
        look_up_keys(rows.readers[0], 0, np.arange(3), np.zeros((3, 4), np.float32))


class Look(NamedTuple):
    """One look-up: keys [rows, keys per row], or all keys of ragged bags behind each other."""

    table: int
    keys: NDArray[Any]
    pooling: PoolingCode = PoolingCode.NONE
    weights: NDArray[np.float32] | None = None
    begins: NDArray[np.int64] | None = None
    ends: NDArray[np.int64] | None = None
    code: VectorCode = VectorCode.FLOAT32
    """Of the output."""

    @property
    def bags(self) -> list[NDArray[np.intp]]:
        """Positions of keys, for each row of the output."""
        positions = np.arange(self.keys.size)
        if self.begins is None or self.ends is None:
            return list(positions.reshape(self.keys.shape))
        return [positions[begin:end] for begin, end in zip(self.begins, self.ends, strict=True)]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the output."""
        width = 1 if self.pooling else self.keys.shape[1]
        return len(self.bags), width * SPECS[self.table].embedding_dim


Known = list[dict[int, NDArray[np.float32]]]


def random_look(rng: np.random.Generator, known: Known) -> Look:
    """A look-up of cached, missing and unknown keys, some of them more than once."""
    table = int(rng.integers(len(SPECS)))
    dtype = rng.choice([np.int64, np.int32])
    pool = np.array([key for key in known[table] if abs(key) < 2**31 or dtype == np.int64] + [10**6, -(10**6)])
    rows, keys_per_row = int(rng.integers(1, 12)), int(rng.integers(0, 7))
    keys = rng.choice(pool, (rows, keys_per_row)).astype(dtype)
    pooling = PoolingCode(int(rng.integers(4)))
    if not pooling:
        return Look(table, keys)
    if rng.random() < 0.5:
        weights = rng.standard_normal(keys.shape, np.float32) if rng.random() < 0.5 else None
        return Look(table, keys, pooling, weights)
    lengths, gap = rng.integers(0, 5, rows), int(rng.integers(3))
    ends = np.cumsum(lengths + gap)
    return Look(table, rng.choice(pool, ends[-1] + gap).astype(dtype), pooling, None, ends - lengths, ends)


def expected(look: Look, known: Known) -> NDArray[np.float64]:
    """The output, in float64."""
    default = np.array(SPECS[look.table].default_vector or 0.0, float)
    default = np.broadcast_to(default, SPECS[look.table].embedding_dim)
    rows = []
    for bag in look.bags:
        vectors = np.array([known[look.table].get(int(key), default) for key in look.keys.ravel()[bag]], float)
        vectors = vectors.reshape(-1, len(default))
        if look.pooling and look.weights is not None:
            vectors = vectors * look.weights.ravel()[bag, None]
        if not look.pooling:
            rows.append(vectors.ravel())
        elif not len(vectors):
            rows.append(np.zeros(len(default)))
        else:
            pool: Any = {PoolingCode.SUM: np.sum, PoolingCode.MEAN: np.mean, PoolingCode.MAX: np.max}[look.pooling]
            rows.append(pool(vectors, axis=0))
    return np.array(rows).reshape(look.shape)


def answers_of(rows: Rows, looks: Sequence[Look]) -> tuple[list[NDArray[np.float32]], list[int]]:
    """Outputs and unknown keys of look-ups in one call."""
    segments, outputs, held = np.zeros(len(looks), SEGMENT), [], []
    num_keys = np.array([sum(map(len, look.bags)) for look in looks], np.int64)
    reader = rows.readers[0]
    device = reader.device
    with device.request():
        for segment, look in zip(segments, looks, strict=True):
            keys, dtype = device.stage(look.keys), np.dtype(look.code.name.lower())
            output = device.empty(look.shape, dtype)
            item, keys_per_row = keys.itemsize, 1 if keys.ndim == 1 else keys.shape[1]
            segment["table"], segment["pooling"], segment["keys_address"] = look.table, look.pooling, address_of(keys)
            segment["key_bytes"], segment["key_stride"], segment["row_stride"] = item, item, item * keys_per_row
            segment["num_rows"] = look.shape[0]
            segment["keys_per_row"] = 0 if keys.ndim == 1 else keys_per_row
            segment["output_address"], segment["output_code"] = address_of(output), look.code
            segment["output_stride"] = dtype.itemsize * look.shape[1]
            outputs.append(output)
            held.append(keys)
            for field in ("begins", "ends", "weights"):
                if (array := getattr(look, field)) is not None:
                    held.append(device.stage(array))
                    segment[f"{field}_address"] = address_of(held[-1])
        lookup = Lookup(segments, num_keys, device.counts(len(looks)), reader.prepare(segments))
        reader.look_up(lookup)
        device.wait()
        return [
            array if isinstance(array, np.ndarray) else array.get() for array in outputs
        ], lookup.num_unknown.tolist()


def memory_store() -> tuple[MemoryStore, Known]:
    """All rows of SPECS; known keys include row numbers from the end."""
    rng = np.random.default_rng(3)
    store, known = MemoryStore({spec.folder: spec.embedding_dim for spec in SPECS}), []
    for spec in SPECS:
        keys = np.arange(spec.num_rows)
        if spec.keys == "stored":
            keys = np.unique(np.concatenate([keys[:-20] - 50, rng.integers(-(2**63), 2**63 - 1, 20)]))
        vectors = rng.standard_normal((len(keys), spec.embedding_dim), np.float32)
        store.insert(spec.folder, keys, vectors)
        rows = dict(zip(keys.tolist(), vectors, strict=True))
        if spec.keys == "row_number":
            rows |= {key - spec.num_rows: vector for key, vector in rows.items()}
        known.append(rows)
    return store, known


def gpu_rows(server: ParameterServer, cache_bytes: int = 13_000) -> StoredRows:
    """SPECS on a GPU, in a cache of few rows as a rule."""
    from inference_session.device.cuda import CudaDevice
    from inference_session.embedding_cache.gpu import GpuEmbeddingCache

    device = CudaDevice(0)
    dims = {spec.folder: spec.embedding_dim for spec in SPECS}
    num_rows = {spec.folder: spec.num_rows for spec in SPECS}
    numbered = {spec.folder: spec.num_rows for spec in SPECS if spec.keys == "row_number"}
    cache = GpuEmbeddingCache(dims, cache_bytes, device, num_rows=num_rows, row_numbers=numbered)
    return StoredRows(SPECS, [cache], server)


@pytest.mark.parametrize("codes", [[VectorCode.FLOAT32], [VectorCode.FLOAT16], [*VectorCode][:2]], ids=str)
@pytest.mark.parametrize(("num_looks", "most_bytes"), [(1, None), (3, None), (9, None), (40, None), (9, 1), (20, 2000)])
def test_any_look_up_answers_as_numpy_and_the_processor(
    num_looks: int, most_bytes: int | None, codes: list[VectorCode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pooling, weights, ragged bags with gaps, both types of keys, few segments and many, hits next to misses; outputs
    in float32, in float16, and in both; also in several parts, where memory would not do for all at once.
    """
    if most_bytes is not None:
        monkeypatch.setattr("inference_session.embedding_cache.gpu_misses._MOST_BYTES", most_bytes)
    store, known = memory_store()
    on_gpu = gpu_rows(ParameterServer([Tier("memory", store)]))
    cache = CpuEmbeddingCache({spec.folder: spec.embedding_dim for spec in SPECS}, 1 << 14)
    on_cpu = StoredRows(SPECS, [cache], ParameterServer([Tier("memory", store)]))
    for seed in range(12):
        rng = np.random.default_rng(seed)
        looks = [random_look(rng, known) for _ in range(num_looks)]
        found, num_unknown = answers_of(on_gpu, [look._replace(code=VectorCode(rng.choice(codes))) for look in looks])
        assert num_unknown == answers_of(on_cpu, looks)[1]
        for look, output in zip(looks, found, strict=True):
            tolerance = 1e-5 if output.dtype == np.float32 else 1e-3
            np.testing.assert_allclose(output, expected(look, known), rtol=tolerance, atol=tolerance)
        if seed % 3 == 0:
            await_inserts(on_gpu)
    on_gpu.close()
    on_cpu.close()


def test_bags_that_overlap_count_their_keys_as_often() -> None:
    """A key in two bags is pooled in both, and counted in both where it is unknown."""
    store, known = memory_store()
    rows = gpu_rows(ParameterServer([Tier("memory", store)]))
    begins, ends = np.array([0, 1, 4, 2]), np.array([3, 3, 4, 4])
    look = Look(1, np.array([10**6, 5, 10**6, -7, 3]), PoolingCode.SUM, None, begins, ends)
    found, num_unknown = answers_of(rows, [look])
    np.testing.assert_allclose(found[0], expected(look, known), rtol=1e-5, atol=1e-5)
    assert num_unknown == [4]
    rows.close()


def test_a_row_is_cached_once_whatever_end_its_number_counts_from(version: tuple[Path, small_model.Arrays]) -> None:
    """Asked for by its two numbers, and by one of them after the other: it takes one place, and is changed there."""
    rows = version[1]["user_weight"]
    with open_on_gpu(version[0]) as session:
        for keys in ([3, -47, -1], [49, -43, 7]):
            np.testing.assert_array_equal(session.lookup("user.weight", keys), rows[keys])
            await_inserts(rows_of(session))
        cache = session.stats()["cache"]["tables"]["user_weight"]
        held = rows_of(session).hot_keys()["user_weight"].tolist()
        assert cache["misses"] == 5
        assert sorted({*held} - {0}) == [3, 7, 49]  # row 0 was asked for when the session warmed up
        assert len(held) == cache["rows"] == len({*held})
        assert not session.lookup("user.weight", [-51, 50, -(2**63), 2**63 - 1]).any()


def test_others_are_answered_while_rows_are_fetched() -> None:
    """A request that waits for a store leaves the GPU to others that do not wait."""
    store, known = memory_store()
    hooked = HookedStore(store)
    rows = gpu_rows(ParameterServer([Tier("memory", hooked)]), cache_bytes=1 << 20)
    hit, miss = Look(0, np.array([[1, 2, 3]])), Look(0, np.array([[1, 40], [2, 41]]))
    pooled = Look(0, np.array([[1, 42], [2, 43]]), PoolingCode.SUM)
    answers_of(rows, [hit])
    await_inserts(rows)
    answered: list[NDArray[np.float32]] = []

    def ask_in_between() -> None:
        thread = threading.Thread(target=lambda: answered.append(answers_of(rows, [hit])[0][0]))
        thread.start()
        thread.join(PATIENCE_S)

    hooked.hooks["fetch_many"] = ask_in_between
    found, _ = answers_of(rows, [miss, pooled, hit])

    np.testing.assert_array_equal(answered[0], expected(hit, known).astype(np.float32))
    for look, output in zip((miss, pooled, hit), found, strict=True):
        np.testing.assert_allclose(output, expected(look, known), rtol=1e-5, atol=1e-5)
    rows.close()


def test_a_row_updated_while_it_is_fetched_is_not_cached() -> None:
    """A look-up under way never caches a row older than the stores' row."""
    store = HookedStore(memory_store()[0])
    rows = gpu_rows(ParameterServer([Tier("memory", store)]), cache_bytes=1 << 20)
    out = np.zeros((90, 4), np.float32)
    store.hooks["fetch_many"] = lambda: rows.writer.update(
        SPECS[2].folder, np.array([3, 48]), np.full((2, 4), 7, np.float32)
    )

    look_up_keys(rows.readers[0], 2, np.arange(-90, 0), out)
    await_inserts(rows)
    look_up_keys(rows.readers[0], 2, np.arange(-90, 0), out)

    assert out[[3, 48]].tolist() == [[7] * 4] * 2
    rows.close()


def test_in_an_outage_what_is_cached_is_answered() -> None:
    """A store that is down fails look-ups that need it, and no others."""
    store, known = memory_store()
    failures: list[Exception] = []
    faulty = FaultStore(store, lambda _: failures[-1] if failures else None)
    rows = gpu_rows(ParameterServer([Tier("memory", faulty)], on_store_failure="error"), cache_bytes=1 << 20)
    hit, miss = Look(0, np.array([[1, 2, 3]])), Look(0, np.array([[1, 40]]))
    answers_of(rows, [hit])
    await_inserts(rows)
    failures.append(UnavailableError("gone"))
    for _ in range(2):
        with pytest.raises(UnavailableError):
            answers_of(rows, [miss, hit])
        np.testing.assert_array_equal(answers_of(rows, [hit])[0][0], expected(hit, known).astype(np.float32))
    rows.close()


def test_large_requests_have_many_missing_rows() -> None:
    """Tiles of all sizes: a look-up of many keys in the smallest of caches, plain and pooled."""
    store, known = memory_store()
    rows = gpu_rows(ParameterServer([Tier("memory", store)]))
    rng = np.random.default_rng(0)
    pool = np.array([*list(known[0])[:250], 10**6])
    plain = Look(0, rng.choice(pool, (4000, 3)))
    bags = Look(0, rng.choice(pool, (500, 40)), PoolingCode.MEAN, rng.standard_normal((500, 40), np.float32))
    for _ in range(2):
        found, num_unknown = answers_of(rows, [plain, bags])
        np.testing.assert_allclose(found[0], expected(plain, known), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found[1], expected(bags, known), rtol=1e-4, atol=1e-4)
        assert num_unknown == [int((look.keys == 10**6).sum()) for look in (plain, bags)]
        await_inserts(rows)
    rows.close()


def test_a_failed_device_fails_all_that_needs_it(written: tuple[Path, small_model.Arrays]) -> None:
    """After an illegal access requests, updates and refreshes get an error; statistics and closing still work."""
    script = f"""
import os
import numpy as np
import cupy
from inference_session import InferenceSession
from inference_session.errors import UnavailableError
from tests.testing import small_model
settings = {{"persistent_store": {url_of(written[0])!r}, "cache_bytes": 1 << 20, "refresh_interval_s": 0.1}}
session = InferenceSession.open({str(written[0])!r}, device="cuda:0", **settings)
inputs = small_model.random_inputs(4, np.random.default_rng(0))
session.run(inputs)
cupy.RawKernel('extern "C" __global__ void break_it(int* p) {{ *p = 1; }}', "break_it")((1,), (1,), (np.uint64(16),))
update = lambda: session.update("code", [1], np.ones((1, 3), np.float32))
for use in (lambda: session.run(inputs), lambda: session.lookup("code", [1]), update, session.refresh):
    try:
        use()
    except UnavailableError as error:
        assert "cuda:0 has failed" in str(error), error
    else:
        raise AssertionError("answered")
assert "cuda:0 has failed" in session.failure
assert session.stats()["cache"]["capacity"] > 0
session.close()
print("all as expected", flush=True)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=200, cwd=Path.cwd()
    )
    assert "all as expected" in done.stdout, done.stderr
