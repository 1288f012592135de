"""Sessions over several devices: caches over one parameter server, and changes of files' rows.

The devices stand in for GPUs; where there are two GPUs, the same tests run there: `make test PYTEST_ARGS="-m gpu"`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_session import InferenceSession
from inference_session.device.discovery import unusable, unusable_for_sessions
from inference_session.embedding_cache.base import EmbeddingCache
from inference_session.embedding_cache.stats import CacheStats
from inference_session.errors import ConfigurationError, UnavailableError
from inference_session.model_spec import TableSpec
from inference_session.parameter_server.create import create_store
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.server import ParameterServer
from inference_session.parameter_server.tier import Tier
from inference_session.rows.base import look_up_keys
from inference_session.rows.hot_keys import interleaved, read_hot_keys
from inference_session.rows.stored import StoredRows
from tests.testing import small_model
from tests.testing.memory_store import MemoryStore
from tests.testing.server_calls import await_inserts
from tests.testing.servers import PATIENCE_S, wait_until
from tests.testing.several_devices import StandIn, StandInCache, stand_in
from tests.testing.stored_model import (
    DIMS,
    HASHED_DEFAULT,
    assert_answers,
    assert_updates_are_read_back,
    url_of,
    write_stored,
)
from tests.testing.wrapper_store import HookedStore

CACHE_BYTES = 1 << 20
NO_PAIR = unusable_for_sessions(0) or unusable(1)


@pytest.fixture(
    params=[
        "stand-ins",
        pytest.param("GPUs", marks=[pytest.mark.gpu, pytest.mark.skipif(NO_PAIR is not None, reason=str(NO_PAIR))]),
    ]
)
def devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two."""
    if request.param == "stand-ins":
        stand_in(monkeypatch)
    return str(request.param)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """Two, which may be broken."""
    return stand_in(monkeypatch)


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, small_model.Arrays]:
    """The small model, whose rows are in a RocksDB alone, and its tables."""
    return write_stored(tmp_path)


@pytest.fixture
def stored(devices: str, written: tuple[Path, small_model.Arrays]) -> Iterator[InferenceSession]:
    """A session over that store, with a cache on each device."""
    with open_stored(written[0]) as session:
        yield session


def open_stored(directory: Path, **settings: Any) -> InferenceSession:
    settings = {"cache_bytes": CACHE_BYTES, "persistent_store": url_of(directory), **settings}
    return InferenceSession.open(directory, device="cuda:0,1", **settings)


def rows_on_each(session: InferenceSession, table: str, keys: Any) -> list[NDArray[np.float32]]:
    """What each device answers."""
    spec, asked = session.spec.table(table), np.asarray(keys, np.int64)
    answers = []
    for reader in session.rows.readers:
        answers.append(np.empty((len(asked), spec.embedding_dim), np.float32))
        look_up_keys(reader, session.spec.tables.index(spec), asked, answers[-1])
    return answers


def on_each_device(session: InferenceSession, table: str, keys: Any) -> list[NDArray[np.float32]]:
    """The same, of caches over stores: then they have the rows."""
    answers = rows_on_each(session, table, keys)
    await_inserts(session.rows)
    return answers


def cache_counts(session: InferenceSession) -> list[CacheStats]:
    """The counts of each device's cache."""
    assert isinstance(session.rows, StoredRows)
    return [cache.stats() for cache in session.rows.caches]


def test_requests_are_answered_by_all_devices(
    stored: InferenceSession, written: tuple[Path, small_model.Arrays]
) -> None:
    """In turns, each from its own cache."""
    for seed in range(10):
        inputs = small_model.random_inputs(seed, np.random.default_rng(seed))
        assert_answers(stored.run(inputs), small_model.expected(written[1], inputs))
        await_inserts(stored.rows)
    counts = cache_counts(stored)
    assert all(each.rows > 0 and each.hits > 0 for each in counts)


def test_counts_add_up_over_the_caches(stored: InferenceSession) -> None:
    """Keys, rows, bytes and capacities are those of all devices; tiers are counted once."""
    (before,) = stored.stats()["tiers"].values()
    for _ in range(4):
        stored.lookup("hashed", np.arange(1, 8))
        await_inserts(stored.rows)
    stats, parts = stored.stats(), cache_counts(stored)
    assert stats["cache"]["hits"] == stats["cache"]["tables"]["hashed"]["hits"] == 14
    assert stats["cache"]["misses"] == next(iter(stats["tiers"].values()))["hits"] - before["hits"] == 14
    for name in ("rows", "capacity", "inserts", "bytes", "cache_bytes"):
        assert stats["cache"][name] == sum(getattr(part, name) for part in parts) > 0
    assert stats["cache"]["cache_bytes"] == 2 * CACHE_BYTES


def test_a_change_is_seen_on_each_device(stored: InferenceSession, written: tuple[Path, small_model.Arrays]) -> None:
    """Rows that are cached on both devices, on one or on none, updated, erased and new, by either of their numbers."""
    first, second = written[1]["hashed/key"][:2].tolist()
    on_each_device(stored, "hashed", [first, second])
    on_each_device(stored, "code", [39, -1, 5])
    look_up_keys(stored.rows.readers[1], 1, np.array([-3]), np.empty((1, 3), np.float32))
    await_inserts(stored.rows)

    stored.update("code", [39, 37], np.array([[1, 2, 3], [4, 5, 6]], np.float32))
    stored.update("hashed", [10**15, second], np.array([[7, 8], [9, 10]], np.float32))
    stored.erase("hashed", [first])

    for _ in range(2):
        for answer in on_each_device(stored, "code", [39, -1, 37, -3]):
            np.testing.assert_array_equal(answer, [[1, 2, 3]] * 2 + [[4, 5, 6]] * 2)
        for answer in on_each_device(stored, "hashed", [10**15, second, first]):
            np.testing.assert_array_equal(answer, [[7, 8], [9, 10], HASHED_DEFAULT])


def test_a_refresh_reaches_each_device(stored: InferenceSession, written: tuple[Path, small_model.Arrays]) -> None:
    """What another process has changed in the store, whichever devices have cached it."""
    first, second, third = written[1]["hashed/key"][:3].tolist()
    for reader, keys in zip(stored.rows.readers, ([first, second], [second, third]), strict=True):
        look_up_keys(reader, 2, np.array(keys), np.empty((2, 2), np.float32))
    await_inserts(stored.rows)
    with create_store(url_of(written[0]), Namespace("small", "1"), DIMS, writable=True) as store:
        store.insert("hashed", np.array([first, second]), np.array([[1, 1], [2, 2]], np.float32))
        store.erase("hashed", np.array([third]))

    stored.refresh()

    for answer in on_each_device(stored, "hashed", [first, second, third]):
        np.testing.assert_array_equal(answer, [[1, 1], [2, 2], HASHED_DEFAULT])


def test_updates_under_requests_are_never_lost(
    stored: InferenceSession, written: tuple[Path, small_model.Arrays]
) -> None:
    """While requests cache rows on both devices, each update is read back from both; no row is answered half."""
    assert_updates_are_read_back(stored, lambda keys: on_each_device(stored, "user.weight", keys), num_updates=100)


def test_the_next_session_starts_with_what_was_hot_on_any_device(
    devices: str,
    written: tuple[Path, small_model.Arrays],
    tmp_path: Path,
) -> None:
    """Both devices begin with the hot rows of both."""
    settings = {"state_dir": str(tmp_path), "warm_up_s": PATIENCE_S}
    keys = written[1]["hashed/key"][:4]
    with open_stored(written[0], **settings) as session:
        for reader, part in zip(session.rows.readers, (keys[:2], keys[2:]), strict=True):
            look_up_keys(reader, 2, part, np.empty((2, 2), np.float32))
        await_inserts(session.rows)
        session.run(small_model.random_inputs(1, np.random.default_rng(0), num_items=0))
    assert np.isin(keys, read_hot_keys(tmp_path / "small.hot_keys")["hashed"]).all()
    with open_stored(written[0], **settings) as session:
        misses = session.stats()["cache"]["misses"]
        for answer in on_each_device(session, "hashed", keys):
            np.testing.assert_array_equal(answer, written[1]["hashed"][:4])
        assert session.stats()["cache"]["misses"] == misses


def test_hot_keys_of_caches_take_turns() -> None:
    """The hottest of each first, and none twice."""
    parts = [np.array([5, 3, 1]), np.array([3, 2]), np.empty(0, np.int64)]
    assert interleaved(parts).tolist() == [5, 3, 2, 1]
    assert interleaved(parts[:1]) is parts[0]


def test_all_rows_are_dumped_once(stored: InferenceSession, tmp_path: Path) -> None:
    """With changes applied."""
    on_each_device(stored, "hashed", [10**15])
    stored.update("hashed", [10**15], np.array([[7, 8]], np.float32))
    report = stored.dump(tmp_path / "dumped")
    assert report.num_rows == {"user_weight": 50, "code": 40, "hashed": 31}


def caches_on(devices: str, spec: TableSpec) -> list[EmbeddingCache]:
    """One on each device."""
    dims = {spec.folder: spec.embedding_dim}
    if devices == "GPUs":
        from inference_session.device.cuda import CudaDevice
        from inference_session.embedding_cache.gpu import GpuEmbeddingCache

        return [GpuEmbeddingCache(dims, 1 << 16, CudaDevice(number)) for number in range(2)]
    caches = [StandInCache(dims, 1 << 16) for _ in range(2)]
    for number, cache in enumerate(caches):
        cache.device = StandIn(number)
    return [*caches]


def test_a_row_updated_while_it_is_fetched_is_not_cached(devices: str) -> None:
    """On the device that fetches it, nor does the other device keep an older row."""
    (spec,) = [table for table in small_model.TABLES if table.folder == "user_weight"]
    store = MemoryStore({spec.folder: spec.embedding_dim})
    store.insert(spec.folder, np.arange(50), np.zeros((50, 4), np.float32))
    hooked = HookedStore(store)
    server = ParameterServer([Tier("memory", hooked)])
    rows = StoredRows([spec], caches_on(devices, spec), server)
    out = np.empty((50, 4), np.float32)
    look_up_keys(rows.readers[0], 0, np.arange(10), out[:10])
    await_inserts(rows)
    hooked.hooks["fetch_many"] = lambda: rows.writer.update(
        spec.folder, np.array([3, 20]), np.full((2, 4), 7, np.float32)
    )
    look_up_keys(rows.readers[1], 0, np.arange(50), out)
    await_inserts(rows)
    for each in rows.readers:
        look_up_keys(each, 0, np.arange(50), out)
        assert out[[3, 20]].tolist() == [[7] * 4] * 2
        assert not out[[2, 21]].any()
    rows.close()


def test_a_failed_device_makes_the_model_unavailable(
    stand_ins: list[StandIn], written: tuple[Path, small_model.Arrays]
) -> None:
    """Requests and changes say which; the store and the other caches have the change. Statistics and closing work."""
    first, stored = int(written[1]["hashed/key"][0]), open_stored(written[0])
    on_each_device(stored, "hashed", [first])
    stand_ins[0].broken = "cuda:0 has failed"
    inputs = small_model.random_inputs(4, np.random.default_rng(0))
    assert stored.failure == "cuda:0 has failed"
    for _ in range(2):
        with pytest.raises(UnavailableError, match="cuda:0 has failed"):
            stored.run(inputs)
        with pytest.raises(UnavailableError, match="cuda:0 has failed"):
            stored.lookup("hashed", [first])
    with pytest.raises(UnavailableError, match="cuda:0 has failed"):
        stored.update("hashed", [first], np.array([[7, 8]], np.float32))
    found = np.empty((1, 2), np.float32)
    look_up_keys(stored.rows.readers[1], 2, np.array([first]), found)
    assert found.tolist() == [[7, 8]]
    assert stored.stats()["cache"]["capacity"] > 0
    stored.close()


def open_changing(directory: Path, **settings: Any) -> InferenceSession:
    """Over files that an update stream may change; its brokers never answer."""
    settings = {"update_stream": "kafka://localhost:1", "catch_up_s": 0, **settings}
    return InferenceSession.open(directory, device="cuda:0,1", **settings)


@pytest.mark.parametrize("shard", ["auto", "rows"])
def test_rows_of_files_change_on_all_devices(devices: str, tmp_path: Path, shard: str) -> None:
    """What an update stream writes over files, copied or sharded, is answered by both; nothing is counted twice."""
    tables = small_model.write(tmp_path / "1")
    with open_changing(tmp_path / "1", shard=shard) as session:
        assert len(session.replicas.all) == 2
        writer, hashed = session.rows.writer, tables["hashed/key"].copy()
        for number in range(1, 8):  # the rows of the devices outgrow their memory
            keys = np.arange(4 * number)
            writer.update("code", keys, np.full((len(keys), 3), number, np.float32))
            tables["code"][keys] = number
            writer.update("hashed", hashed[number : 2 * number], np.full((number, 2), number, np.float32))
            tables["hashed"][number : 2 * number] = number
            for seed in range(4):
                inputs = small_model.random_inputs(20, np.random.default_rng(seed))
                assert_answers(session.run(inputs), small_model.expected(tables, inputs))
        assert session.stats()["updated"]["code"]["rows"] == 28
        for found in rows_on_each(session, "code", [3, -37, 39, -1]):
            np.testing.assert_array_equal(found, tables["code"][[3, 3, 39, 39]])


def test_rows_of_files_are_deleted_on_all_devices(devices: str, tmp_path: Path) -> None:
    """By either of their numbers they are unknown, until they are written again; new keys can be written."""
    tables = small_model.write(tmp_path / "1")
    first, second = tables["hashed/key"][:2].tolist()
    with open_changing(tmp_path / "1") as session:
        writer = session.rows.writer
        writer.update("hashed", np.array([10**15, second]), np.array([[7, 8], [9, 10]], np.float32))
        writer.erase("hashed", np.array([first, second]))
        writer.erase("code", np.array([2, 2, 39]))
        before = session.stats()["tables"]
        for found in rows_on_each(session, "hashed", [first, second, 10**15]):
            np.testing.assert_array_equal(found, [HASHED_DEFAULT, HASHED_DEFAULT, [7, 8]])
        for found in rows_on_each(session, "code", [2, -38, -1, 39, 0]):
            np.testing.assert_array_equal(found, [[0] * 3] * 4 + [tables["code"][0]])
        inputs = small_model.random_inputs(4, np.random.default_rng(0)) | {"codes": np.full((4, 2), 1)}  # doubled
        for _ in range(2):
            session.run(inputs)
        unknown = [each["code"]["default_vectors"] for each in (before, session.stats()["tables"])]
        assert unknown[1] - unknown[0] == 16
        writer.update("code", np.array([2]), np.full((1, 3), 5, np.float32))
        for found in rows_on_each(session, "code", [2, -38, -1]):
            np.testing.assert_array_equal(found, [[5] * 3] * 2 + [[0] * 3])


def test_changes_of_files_under_requests_are_never_lost(devices: str, tmp_path: Path) -> None:
    """While requests read rows on both devices, each change is read back from both; no row is answered half."""
    small_model.write(tmp_path / "1")
    with open_changing(tmp_path / "1", shard="rows") as session:
        session.update = lambda table, keys, vectors: session.rows.writer.update(  # type: ignore[method-assign]
            session.spec.table(table).folder, np.asarray(keys, np.int64), vectors
        )
        assert_updates_are_read_back(session, lambda keys: rows_on_each(session, "user.weight", keys), num_updates=100)


def test_a_device_that_fails_does_not_keep_changes_of_files_from_others(
    stand_ins: list[StandIn], tmp_path: Path
) -> None:
    """The change reports it, the other device has the change, and the model is unavailable."""
    small_model.write(tmp_path / "1")
    with open_changing(tmp_path / "1") as session:
        stand_ins[0].broken = "cuda:0 has failed"
        with pytest.raises(UnavailableError, match="cuda:0 has failed"):
            session.rows.writer.update("code", np.array([4]), np.full((1, 3), 7, np.float32))
        found = np.empty((1, 3), np.float32)
        look_up_keys(session.rows.readers[1], 1, np.array([4]), found)
        assert (found == 7).all()
        with pytest.raises(UnavailableError, match="cuda:0 has failed"):
            session.lookup("code", [4])


def test_files_are_looked_up_in_a_thread_of_each_device(stand_ins: list[StandIn], tmp_path: Path) -> None:
    """Rows that never change: `lookup` and requests take turns, and a failed device stops both."""
    tables = small_model.write(tmp_path / "1")
    with InferenceSession.open(tmp_path / "1", device="cuda:0,1") as session:
        given = [each.num_given for each in session.replicas.all]
        for _ in range(2):
            np.testing.assert_array_equal(session.lookup("user.weight", np.arange(50)), tables["user_weight"])
        assert [each.num_given for each in session.replicas.all] == [count + 1 for count in given]
        stand_ins[1].broken = "cuda:1 has failed"
        wait_until(lambda: session.failure is not None, "the failure to be seen")
        with pytest.raises(UnavailableError, match="cuda:1 has failed"):
            session.lookup("user.weight", [1])


def test_only_rows_of_files_are_sharded(devices: str, tmp_path: Path) -> None:
    """shard=rows is refused where each device has a cache."""
    small_model.write(tmp_path / "1")
    with pytest.raises(ConfigurationError, match="each GPU has its own cache over the stores; leave shard out"):
        InferenceSession.open(tmp_path / "1", device="cuda:0,1", shard="rows", persistent_store="rocksdb:///none")
