"""InferenceSession over stores: the answers equal those of table files, whatever the cache holds or drops."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inference_session import InferenceSession, Request
from inference_session.embedding_cache.cpu import CpuEmbeddingCache
from inference_session.embedding_cache.missing_rows import MissingRows
from inference_session.embedding_cache.null import NullEmbeddingCache
from inference_session.errors import (
    ConfigurationError,
    InvalidRequestError,
    ModelFormatError,
    StoreError,
    UnavailableError,
    UnknownKeyError,
)
from inference_session.execution.network import Network
from inference_session.execution.staging.host import stage_on_host
from inference_session.kernels.records import Lookup, PoolingCode, key_segments
from inference_session.parameter_server.base import FetchRequest
from inference_session.parameter_server.create import create_store
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.server import ParameterServer
from inference_session.parameter_server.tier import Tier
from inference_session.rows.base import look_up_keys
from inference_session.rows.stored import StoredRows
from tests.testing import small_model
from tests.testing.memory_store import MemoryStore
from tests.testing.server_calls import await_inserts
from tests.testing.servers import PATIENCE_S, wait_until
from tests.testing.stored_model import DIMS, HASHED_DEFAULT, assert_answers, push, url_of, write_stored
from tests.testing.wrapper_store import FaultStore, HookedStore

TINY_CACHE_BYTES = 2000
"""Room for some eight rows of each table."""


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, small_model.Arrays]:
    """The small model, its tables pushed to a RocksDB next to the repository, and then removed."""
    return write_stored(tmp_path_factory.mktemp("stored"))


@pytest.fixture(scope="module", params=[0, TINY_CACHE_BYTES, 1 << 20], ids=["no cache", "tiny cache", "all cached"])
def session(version: tuple[Path, small_model.Arrays], request: pytest.FixtureRequest) -> Iterator[InferenceSession]:
    with InferenceSession.open(
        version[0], persistent_store=url_of(version[0]), cache_bytes=request.param, lookup_threads=2
    ) as opened:
        yield opened


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    lengths=st.lists(st.integers(0, 6), min_size=6, max_size=6),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_requests_are_answered_as_from_files(
    session: InferenceSession,
    version: tuple[Path, small_model.Arrays],
    sizes: list[int],
    lengths: list[int],
    seed: int,
) -> None:
    """Joined or alone, known keys, unknown ones and row numbers from the end, whatever was evicted before."""
    rng = np.random.default_rng(seed)
    requests = [small_model.random_inputs(n, rng, num_items=k) for n, k in zip(sizes, lengths, strict=False)]
    before = session.stats()["tables"]["hashed"]["default_vectors"]

    joined = session.run_many([Request(inputs) for inputs in requests])
    alone = [session.run(inputs) for inputs in requests]

    for inputs, answer, again in zip(requests, joined, alone, strict=True):
        expected = small_model.expected(version[1], inputs)
        assert_answers(answer, expected)
        assert_answers(again, expected)
    unknown = sum(int((~np.isin(inputs["items"], version[1]["hashed/key"])).sum()) for inputs in requests)
    assert session.stats()["tables"]["hashed"]["default_vectors"] - before == 2 * unknown


def test_row_numbers_from_before_the_first_row_are_unknown(tmp_path: Path) -> None:
    """They are counted from the end once, not again in the files behind the store: no key is answered by two rows."""
    directory = tmp_path / "repository" / "small" / "1"
    small_model.write(directory)
    keys = np.arange(-160, 160)
    with InferenceSession.open(directory) as files:
        expected = {table: files.lookup(table, keys) for table in ("user.weight", "code")}
    push(directory, f"rocksdb://{tmp_path}/db")

    with InferenceSession.open(directory, persistent_store=f"rocksdb://{tmp_path}/db") as session:
        for table, vectors in expected.items():
            np.testing.assert_array_equal(session.lookup(table, keys), vectors)
            assert not vectors[keys < -50].any()


def test_a_closed_session_still_has_statistics(version: tuple[Path, small_model.Arrays]) -> None:
    """As one without stores; they were an error."""
    with InferenceSession.open(version[0], persistent_store=url_of(version[0]), cache_bytes=1 << 20) as session:
        session.lookup("code", [1, 2, 3])
        last = session.stats()

    session.close()

    assert session.stats() == last


def test_rows_are_written_by_row_numbers_from_0(tmp_path: Path) -> None:
    """A row under a number from the end would be in the store, and never be found."""
    directory = tmp_path / "repository" / "small" / "1"
    small_model.write(directory)
    push(directory, f"rocksdb://{tmp_path}/db")

    with InferenceSession.open(directory, persistent_store=f"rocksdb://{tmp_path}/db") as session:
        for write in (
            lambda: session.update("code", [3, -1], np.ones((2, 3))),
            lambda: session.erase("code", [-1]),
        ):
            with pytest.raises(InvalidRequestError, match=r"'code' uses row numbers as keys.* at least 0; found -1"):
                write()
        session.update("hashed", [-1], np.ones((1, 2)))

        assert session.lookup("hashed", [-1]).tolist() == [[1.0, 1.0]]
        assert not np.isclose(session.lookup("code", [3, -1]), 1.0).all(axis=1).any()


def test_large_requests_are_split_over_threads(
    session: InferenceSession, version: tuple[Path, small_model.Arrays]
) -> None:
    """Missing keys keep their places where several threads look for them."""
    inputs = small_model.random_inputs(20_000, np.random.default_rng(1), num_items=8)

    assert_answers(session.run(inputs), small_model.expected(version[1], inputs))


def test_concurrent_requests_evict_each_others_rows(
    session: InferenceSession, version: tuple[Path, small_model.Arrays]
) -> None:
    """Rows that vanish between two looks at the cache are fetched again."""
    failures: list[BaseException] = []

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(60):
                inputs = small_model.random_inputs(int(rng.integers(1, 20)), rng)
                assert_answers(session.run(inputs), small_model.expected(version[1], inputs))
        except BaseException as error:  # noqa: BLE001  reported below, in the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not failures, failures[0]


def test_lookup_answers_as_from_files(session: InferenceSession, version: tuple[Path, small_model.Arrays]) -> None:
    """session.lookup() takes the same way; unknown keys get the default vector, -1 is the last row."""
    keys = version[1]["hashed/key"]

    vectors = session.lookup("hashed", [*keys[:5].tolist(), 10**15])

    np.testing.assert_array_equal(vectors, [*version[1]["hashed"][:5], HASHED_DEFAULT])
    np.testing.assert_array_equal(session.lookup("code", [-1, 39, 40])[:2], version[1]["code"][[39, 39]])
    np.testing.assert_array_equal(session.lookup("user.weight", []), np.empty((0, 4)))


def test_rows_are_found_by_the_name_that_a_model_is_given(
    version: tuple[Path, small_model.Arrays], tmp_path: Path
) -> None:
    """A server may have copied the version to a folder of another name."""
    directory, tables = version
    copy = shutil.copytree(directory, tmp_path / "folderX2mA9e" / "1")
    keys = tables["hashed/key"][:5]

    with InferenceSession.open(copy, model="small", persistent_store=url_of(directory)) as opened:
        found = opened.lookup("hashed", keys)

    np.testing.assert_array_equal(found, tables["hashed"][:5])


def test_default_vectors_are_not_cached(version: tuple[Path, small_model.Arrays]) -> None:
    """The cache holds nothing under a key that no tier has."""
    with InferenceSession.open(version[0], persistent_store=url_of(version[0]), cache_bytes=1 << 20) as session:
        session.lookup("hashed", [10**15])
        before = session.stats()["cache"]["tables"]
        session.lookup("hashed", [10**15])

        after = session.stats()["cache"]["tables"]

    assert after["hashed"]["rows"] == before["hashed"]["rows"]
    assert after["hashed"]["misses"] == before["hashed"]["misses"] + 1


def test_refresh_sees_what_was_written(tmp_path: Path) -> None:
    """refresh() replaces rows that have changed, finds new ones, and drops those that were erased."""
    directory = tmp_path / "repository" / "small" / "1"
    tables = small_model.write(directory)
    url = f"rocksdb://{tmp_path}/db"
    push(directory, url)
    first, second = tables["hashed/key"][:2].tolist()
    with InferenceSession.open(directory, persistent_store=url, cache_bytes=1 << 20) as session:
        session.lookup("hashed", [first, second, 10**15])
        with create_store(url, Namespace("small", "1"), DIMS, writable=True) as store:
            store.insert("hashed", np.array([first, 10**15]), np.array([[7, 7], [8, 8]], np.float32))

        session.refresh()

        np.testing.assert_array_equal(session.lookup("hashed", [first, 10**15]), [[7, 7], [8, 8]])


def test_the_cache_takes_a_part_of_the_rows(version: tuple[Path, small_model.Arrays]) -> None:
    """cache_fraction counts rows; 1 holds them all and 0 none."""
    directory = version[0]
    capacities = []
    for fraction in (0, 0.5, 1):
        with InferenceSession.open(directory, persistent_store=url_of(directory), cache_fraction=fraction) as session:
            capacities.append(session.stats()["cache"]["capacity"])

    assert capacities[0] == 0
    assert 40 <= capacities[1] <= 90
    assert capacities[2] >= 120


def test_without_tables_and_without_a_store_the_missing_file_is_named(version: tuple[Path, small_model.Arrays]) -> None:
    """A version whose tables are gone opens only with a store."""
    with pytest.raises(ModelFormatError, match=r"tables/.*no such file"):
        InferenceSession.open(version[0])


def test_a_store_that_is_not_there_fails_the_load(version: tuple[Path, small_model.Arrays], tmp_path: Path) -> None:
    """The error names the folder, or the host; a password is not shown."""
    with pytest.raises(StoreError, match="nowhere"):
        InferenceSession.open(version[0], persistent_store=f"rocksdb://{tmp_path}/nowhere")
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1.*1") as raised:
        InferenceSession.open(version[0], volatile_store="redis://:secret@127.0.0.1:1")
    assert "secret" not in str(raised.value)
    with pytest.raises(ConfigurationError, match=r"'volatile_store'.*'postgres' is unknown; allowed: redis://"):
        InferenceSession.open(version[0], volatile_store="postgres://me:secret@db")


def test_a_dead_redis_is_no_error_over_a_rocksdb(version: tuple[Path, small_model.Arrays]) -> None:
    """A version opens, and answers, while one of its two stores is down; stats() says so."""
    inputs = small_model.random_inputs(9, np.random.default_rng(0))
    with InferenceSession.open(
        version[0], volatile_store="redis://127.0.0.1:1", persistent_store=url_of(version[0])
    ) as session:
        assert_answers(session.run(inputs), small_model.expected(version[1], inputs))

        tiers = session.stats()["tiers"]

    assert tiers["persistent"]["failure"] is None
    assert "127.0.0.1:1" in tiers["volatile"]["failure"]
    assert list(tiers) == ["volatile", "persistent"]


def test_a_row_in_a_store_comes_before_the_files(tmp_path: Path) -> None:
    """Where a version has its files and a store, an update in the store is seen, and the files have the rest."""
    directory = tmp_path / "repository" / "small" / "1"
    tables = small_model.write(directory)
    first, second = tables["hashed/key"][:2].tolist()
    url = f"rocksdb://{tmp_path}/db"
    with create_store(url, Namespace("small"), DIMS, writable=True) as store:
        store.insert("hashed", np.array([first]), np.full((1, 2), 7, np.float32))

    with InferenceSession.open(directory, persistent_store=url, store_namespace="shared") as session:
        vectors = session.lookup("hashed", [first, second])

    np.testing.assert_array_equal(vectors, [[7, 7], tables["hashed"][1]])


@pytest.mark.parametrize("cache_bytes", [0, TINY_CACHE_BYTES, 1 << 20])
def test_what_is_updated_is_answered(tmp_path: Path, cache_bytes: int) -> None:
    """Rows updated, erased and new are answered at once, in stores and cache, whichever way a row is counted."""
    directory, tables = write_stored(tmp_path)
    url = url_of(directory)
    first = int(tables["hashed/key"][0])
    sevens = np.full((2, 3), 7, np.float32)
    with InferenceSession.open(directory, persistent_store=url, cache_bytes=cache_bytes) as session:
        for _ in range(2):
            session.lookup("code", [39, -1, -40, 0, 5])
            session.lookup("hashed", [first, 10**15])

        session.update("code", [39, 0], sevens)
        session.update("hashed", [10**15], np.array([[1, 2]], np.float32))
        session.erase("hashed", [first])

        for _ in range(2):
            np.testing.assert_array_equal(session.lookup("code", [39, -1, -40, 0]), sevens[[0, 0, 0, 0]])
            np.testing.assert_array_equal(session.lookup("hashed", [10**15, first]), [[1, 2], HASHED_DEFAULT])
        np.testing.assert_array_equal(session.lookup("code", [5]), tables["code"][[5]])
    with create_store(url, Namespace("small", "1"), DIMS) as store:
        out = np.zeros((2, 2), np.float32)
        assert store.fetch("hashed", np.array([10**15, first]), out).tolist() == [True, False]
        np.testing.assert_array_equal(out[0], [1, 2])


@pytest.mark.parametrize("cached", [3, -47], ids=["from the start", "from the end"])
def test_a_row_has_one_age_by_both_its_keys(cached: int) -> None:
    """Also while only the store has a write, and not yet the cache: a reader of the new row sees no older one later."""
    store = HookedStore(MemoryStore(DIMS))
    store.insert("user_weight", np.arange(50), np.ones((50, 4), np.float32))
    rows = StoredRows(small_model.TABLES, [CpuEmbeddingCache(DIMS, 1 << 16)], ParameterServer([Tier("memory", store)]))
    out = np.zeros((1, 4), np.float32)
    look_up_keys(rows.readers[0], 0, np.array([cached]), out)
    seen: list[float] = []

    def ask_by_both() -> None:
        for key in (3, -47, 3):
            look_up_keys(rows.readers[0], 0, np.array([key]), out)
            seen.append(float(out[0, 0]))

    store.hooks["insert"] = ask_by_both
    rows.writer.update("user_weight", np.array([3]), np.full((1, 4), 7, np.float32))
    ask_by_both()

    assert seen == sorted(seen)
    assert seen[-3:] == [7, 7, 7]
    rows.close()


@pytest.mark.parametrize("refreshing", [False, True], ids=["look-up", "refresh"])
@pytest.mark.parametrize("fails", [False, True], ids=["written", "failed"])
def test_a_row_updated_while_it_is_fetched_is_not_cached(refreshing: bool, fails: bool) -> None:
    """Neither a look-up nor a refresh under way puts an older row into the cache than the stores have."""
    failures: list[Exception] = []
    store = HookedStore(MemoryStore(DIMS))
    store.insert("user_weight", np.arange(50), np.ones((50, 4), np.float32))
    faulty = FaultStore(store, lambda verb: failures.pop() if verb == "erase" and failures else None)
    server = ParameterServer([Tier("memory", faulty)])
    rows = StoredRows(small_model.TABLES, [CpuEmbeddingCache(DIMS, 1 << 16)], server)
    out = np.zeros((50, 4), np.float32)
    if refreshing:
        look_up_keys(rows.readers[0], 0, np.arange(50), out)

    def write() -> None:
        rows.writer.update("user_weight", np.array([3, 48]), np.full((2, 4), 7, np.float32))
        if fails:
            failures.append(UnavailableError("gone"))
            with pytest.raises(UnavailableError):
                rows.writer.erase("user_weight", np.array([5]))
            store.erase("user_weight", np.array([5]))  # done anyway

    store.hooks["fetch_many"] = write
    if refreshing:
        rows.writer.refresh()
    else:
        look_up_keys(rows.readers[0], 0, np.arange(-50, 0), out)
    look_up_keys(rows.readers[0], 0, np.arange(-50, 0), out)

    assert out[[3, 48]].tolist() == [[7] * 4] * 2
    assert out[5].tolist() == ([0] * 4 if fails else [1] * 4)
    rows.close()


def _rows_over(store: HookedStore, cache_bytes: int = 1 << 16) -> StoredRows:
    """Rows of ones in a store of this process, over which there is a cache."""
    store.insert("user_weight", np.arange(50), np.ones((50, 4), np.float32))
    cache = CpuEmbeddingCache(DIMS, cache_bytes) if cache_bytes else NullEmbeddingCache(DIMS)
    return StoredRows(small_model.TABLES, [cache], ParameterServer([Tier("memory", store)]))


def _first_of(rows: StoredRows, key: int) -> float:
    """The first number of a row, as a look-up answers it."""
    return float(look_up_keys(rows.readers[0], 0, np.array([key]), np.zeros((1, 4), np.float32))[0, 0])


def test_a_row_that_was_fetched_before_a_write_is_not_cached_while_it_is_under_way() -> None:
    """A look-up that misses answers the new row as soon as a store has it, so that no later one may answer the old."""
    store = HookedStore(MemoryStore(DIMS))
    rows = _rows_over(store)
    is_stored, may_end = threading.Event(), threading.Event()
    answers: list[float] = []

    def pause() -> None:
        is_stored.set()
        assert may_end.wait(PATIENCE_S)

    def begin_to_write() -> None:
        store.hooks["insert"] = pause
        writing.start()
        assert is_stored.wait(PATIENCE_S)
        answers.append(_first_of(rows, 3))

    writing = threading.Thread(
        target=lambda: rows.writer.update("user_weight", np.array([3]), np.full((1, 4), 7, np.float32))
    )
    store.hooks["fetch_many"] = begin_to_write  # the row has been fetched, and is not cached yet

    first = _first_of(rows, 3)
    answers += [_first_of(rows, 3), _first_of(rows, 3)]
    may_end.set()
    writing.join()
    answers.append(_first_of(rows, 3))

    assert first == 7  # it is looked up once more
    assert answers == [7] * 4
    rows.close()


def test_no_store_has_a_new_row_while_the_old_one_is_on_its_way_into_the_cache() -> None:
    """A GPU's cache takes a while to insert a row; look-ups that miss it meanwhile read the stores."""
    store = HookedStore(MemoryStore(DIMS))
    rows = _rows_over(store)
    cache, caching = rows.caches[0], _NoticedLock()
    rows.writer._caching = caching  # type: ignore[assignment]
    stored = np.zeros((1, 4), np.float32)

    def insert(missing: Sequence[MissingRows]) -> None:
        writing.start()
        assert caching.wanted.wait(PATIENCE_S)
        store.fetch_many([FetchRequest("user_weight", np.array([3]), stored)])
        insert_missing(missing)

    writing = threading.Thread(
        target=lambda: rows.writer.update("user_weight", np.array([3]), np.full((1, 4), 7, np.float32))
    )
    insert_missing = cache.insert_missing
    with patch.object(cache, "insert_missing", insert):
        _first_of(rows, 3)
    writing.join()

    assert stored[0, 0] == 1
    assert _first_of(rows, 3) == 7
    rows.close()


@pytest.mark.parametrize("pooling", [PoolingCode.NONE, PoolingCode.SUM], ids=["single keys", "bags"])
@pytest.mark.parametrize("cache_bytes", [1 << 16, 0], ids=["cache", "no cache"])
def test_no_look_up_answers_a_new_row_while_a_cache_answers_the_old_one(cache_bytes: int, pooling: PoolingCode) -> None:
    """A look-up misses a row, another one caches it, and then a write begins before the first one reads the store."""
    store = HookedStore(MemoryStore(DIMS))
    rows = _rows_over(store, cache_bytes)
    is_stored, may_end = threading.Event(), threading.Event()
    fetch_many, answers = store.fetch_many, []

    def look_up() -> float:
        keys, out = np.array([[3]]), np.zeros((1, 4), np.float32)
        segments = key_segments([keys], [out], [0], pooling)
        rows.readers[0].look_up(Lookup(segments, np.ones(1, np.int64), np.zeros(1, np.int64)))
        return float(out[0, 0])

    def pause() -> None:
        is_stored.set()
        assert may_end.wait(PATIENCE_S)

    def fetch_late(requests: Sequence[FetchRequest]) -> list[NDArray[np.bool_]]:
        store.fetch_many = fetch_many  # type: ignore[method-assign]
        answers.append(look_up())
        store.hooks["insert"] = pause
        writing.start()
        assert is_stored.wait(PATIENCE_S)
        return fetch_many(requests)

    writing = threading.Thread(
        target=lambda: rows.writer.update("user_weight", np.array([3]), np.full((1, 4), 7, np.float32))
    )
    store.fetch_many = fetch_late  # type: ignore[method-assign]
    late = look_up()
    answers += [late, look_up(), look_up()]
    may_end.set()
    writing.join()

    assert answers == sorted(answers)
    assert look_up() == 7
    rows.close()


class _NoticedLock:
    """A lock that says when another thread than the one that made it wants it."""

    def __init__(self) -> None:
        self.wanted = threading.Event()
        self._lock, self._own = threading.Lock(), threading.get_ident()

    def __enter__(self) -> None:
        if threading.get_ident() != self._own:
            self.wanted.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_updates_that_do_not_fit_are_refused(version: tuple[Path, small_model.Arrays], tmp_path: Path) -> None:
    """Wrong shapes and types name what was expected; without a store there is nothing to write to."""
    directory = tmp_path / "small" / "1"
    small_model.write(directory)
    with InferenceSession.open(directory) as session:
        for vectors in (np.zeros((2, 3), np.float32), np.zeros((1, 4), np.float32), np.zeros((2, 4), np.complex64)):
            with pytest.raises(InvalidRequestError, match=r"expected float32 \[2, 4\]"):
                session.update("user.weight", [1, 2], vectors)
        with pytest.raises(InvalidRequestError, match="keys are float64"):
            session.erase("user.weight", [0.5])
        with pytest.raises(StoreError, match="set volatile_store or persistent_store"):
            session.update("user.weight", [1], np.zeros((1, 4), np.float32))
        with pytest.raises(StoreError, match="set volatile_store or persistent_store"):
            session.erase("user.weight", [1])


class FailingRows:
    """The small model's rows in two MemoryStores, the upper of which holds half of them and can be made to fail."""

    def __init__(self, tables: small_model.Arrays, **server_settings: str) -> None:
        self.error: Exception | None = None
        upper, lower = MemoryStore(DIMS), MemoryStore(DIMS)
        for table in small_model.TABLES:
            vectors = tables[table.folder].astype(np.float32)
            keys = tables["hashed/key"] if table.keys == "stored" else np.arange(table.num_rows)
            lower.insert(table.folder, keys[::2], vectors[::2])
            upper.insert(table.folder, keys, vectors)
        tiers = [Tier("volatile", FaultStore(upper, lambda _: self.error)), Tier("persistent", lower)]
        server = ParameterServer(tiers, **server_settings)  # type: ignore[arg-type]
        self.rows = StoredRows(small_model.TABLES, [NullEmbeddingCache(DIMS)], server)


def test_in_an_outage_only_requests_that_need_the_tier_fail(
    version: tuple[Path, small_model.Arrays], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With on_store_failure=error, joined requests whose keys the living tier has are still answered."""
    failing = FailingRows(version[1], on_store_failure="error")
    inputs = small_model.random_inputs(2, np.random.default_rng(0), num_items=0)
    inputs["codes"][:] = 0
    even, odd = ({**inputs, "user": np.full((2, 1), user)} for user in (4, 5))
    with InferenceSession.open(version[0], persistent_store=url_of(version[0])) as session:
        replica = session.replicas.all[0]
        dense, keys = replica.network.dense, replica.network.keys
        network = Network(session.spec, failing.rows.readers[0], dense, keys, keys_follow_inputs=True)
        monkeypatch.setattr(session, "rows", failing.rows)
        monkeypatch.setattr(replica, "network", network)
        monkeypatch.setattr(replica, "staging_pool", stage_on_host(session.spec, session.layout, network))
        failing.error = UnavailableError("gone")

        answers = session.run_many([Request(even), Request(odd)])

        assert_answers(answers[0], small_model.expected(version[1], even))
        assert isinstance(answers[1], UnavailableError)
        monkeypatch.undo()
    failing.rows.close()


def test_refresh_in_an_outage_erases_nothing(version: tuple[Path, small_model.Arrays]) -> None:
    """Cached rows that only the dead tier has stay; refresh() raises an error."""
    failing = FailingRows(version[1])
    cache = CpuEmbeddingCache(DIMS, 1 << 16)
    rows = StoredRows(small_model.TABLES, [cache], failing.rows.server)
    out = np.zeros((4, 4), np.float32)
    look_up_keys(rows.readers[0], 0, np.arange(4), out)
    failing.error = UnavailableError("gone")

    with pytest.raises(UnavailableError):
        rows.writer.refresh()

    assert sorted(cache.dump("user_weight")) == [0, 1, 2, 3]
    rows.close()


def test_unknown_keys_can_be_refused(version: tuple[Path, small_model.Arrays]) -> None:
    """unknown_keys=reject means the same over stores as over files."""
    inputs = small_model.random_inputs(2, np.random.default_rng(0))
    inputs["items"][:] = 11
    with (
        InferenceSession.open(version[0], persistent_store=url_of(version[0]), unknown_keys="reject") as session,
        pytest.raises(UnknownKeyError, match="'hashed'"),
    ):
        session.run(inputs)


def test_rows_are_refreshed_in_the_background(tmp_path: Path) -> None:
    """With refresh_interval_s a change is seen without a call of refresh(); close() ends the thread."""
    directory = tmp_path / "repository" / "small" / "1"
    tables = small_model.write(directory)
    url = f"rocksdb://{tmp_path}/db"
    push(directory, url)
    first = int(tables["hashed/key"][0])
    with InferenceSession.open(directory, persistent_store=url, refresh_interval_s=0.05) as session:
        session.lookup("hashed", [first])
        with create_store(url, Namespace("small", "1"), DIMS, writable=True) as store:
            store.insert("hashed", np.array([first]), np.full((1, 2), 7, np.float32))
        wait_until(lambda: bool((session.lookup("hashed", [first]) == 7).all()), "the row to be refreshed")

    assert not [thread for thread in threading.enumerate() if thread.name == "hotrow-refresh"]


def test_async_inserts_answer_by_default_and_then_by_row(
    version: tuple[Path, small_model.Arrays],
) -> None:
    """insert_mode=async: from the threshold on, missing keys get default vectors, counted, and their rows later."""
    inputs = small_model.random_inputs(30, np.random.default_rng(0), num_items=4)
    with InferenceSession.open(
        version[0],
        persistent_store=url_of(version[0]),
        cache_bytes=1 << 20,
        insert_mode="async",
        hit_rate_threshold=0,
    ) as session:
        nothing = {folder: np.zeros_like(vectors) for folder, vectors in version[1].items()}
        nothing["hashed"] = np.tile(np.array(HASHED_DEFAULT, np.float32), (30, 1))
        nothing["hashed/key"] = version[1]["hashed/key"]
        rows = session.rows
        assert isinstance(rows, StoredRows)
        await_inserts(rows)
        for spec in small_model.TABLES:
            rows.caches[0].clear(spec.folder)

        first = session.run(inputs)
        defaults = session.stats()["tables"]["user_weight"]["default_vectors"]
        await_inserts(rows)
        second = session.run(inputs)

    assert defaults == 60
    assert_answers(first, small_model.expected(nothing, inputs))
    assert_answers(second, small_model.expected(version[1], inputs))


def test_async_inserts_wait_below_the_threshold(version: tuple[Path, small_model.Arrays]) -> None:
    """A cold cache answers with rows, not with default vectors."""
    inputs = small_model.random_inputs(30, np.random.default_rng(0))
    with InferenceSession.open(
        version[0], persistent_store=url_of(version[0]), insert_mode="async", hit_rate_threshold=0.9
    ) as session:
        assert_answers(session.run(inputs), small_model.expected(version[1], inputs))
