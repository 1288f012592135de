"""Dumps: the rows that are served at one moment, whole or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_session import InferenceSession
from inference_session.errors import ConfigurationError, SessionClosedError, StoreError, UnavailableError
from inference_session.model_source import Copy
from inference_session.parameter_server.base import EmbeddingStore, FetchRequest
from inference_session.parameter_server.create import create_store
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.server import ParameterServer
from inference_session.parameter_server.tier import Tier
from inference_session.rows.dump import dump
from inference_session.rows.files import changing_rows
from inference_session.tables.base import RowBatch
from inference_session.tables.table_file import TableFile
from inference_session.version_directory import manifest
from inference_session.version_directory.session_file import read_spec
from tests.testing import small_model
from tests.testing.command_line import hotrow
from tests.testing.hadoop import Hdfs
from tests.testing.memory_store import MemoryStore
from tests.testing.model_settings import settings_text
from tests.testing.server_calls import fetch_any
from tests.testing.servers import PATIENCE_MS, RedisServer
from tests.testing.stored_model import DIMS
from tests.testing.wrapper_store import WrapperStore

Table = dict[int, list[float]]


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A version directory."""
    small_model.write(tmp_path / "model" / "1")
    return tmp_path / "model" / "1"


@pytest.fixture
def redis_url() -> Iterator[str]:
    """A Redis of the test's own."""
    with RedisServer() as server:
        yield server.url


def read(folder: Path, dim: int) -> Table:
    """A sparse folder as HugeCTR reads it."""
    keys = np.fromfile(folder / "key", "<i8")
    vectors = np.fromfile(folder / "emb_vector", "<f4").reshape(len(keys), dim)
    assert len(set(keys.tolist())) == len(keys)
    assert sorted(path.name for path in folder.iterdir()) == ["emb_vector", "key"]
    return dict(zip(keys.tolist(), vectors.tolist(), strict=True))


def read_all(folder: Path) -> dict[str, Table]:
    """All tables of a dump."""
    assert {path.name for path in folder.iterdir()} == set(DIMS)
    return {table: read(folder / table, dim) for table, dim in DIMS.items()}


def of_files(version: Path) -> dict[str, Table]:
    """What the small model's files hold."""
    tables: dict[str, Any] = small_model.random_tables(0)
    keys = {table: tables.get(f"{table}/key", np.arange(len(tables[table]))) for table in DIMS}
    vectors = {table: tables[table].astype(np.float32).tolist() for table in DIMS}
    return {table: dict(zip(keys[table].tolist(), vectors[table], strict=True)) for table in DIMS}


def rows(*keys: int, dim: int = 2, value: float = 1.5) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    return np.array(keys, np.int64), np.full((len(keys), dim), value, np.float32)


def test_files_are_dumped_as_they_are(version: Path, tmp_path: Path) -> None:
    """Without stores the dump is the files: float32, with keys where they were row numbers."""
    with InferenceSession.open(version) as session:
        report = session.dump(tmp_path / "to" / "dump")
    assert read_all(tmp_path / "to" / "dump") == of_files(version)
    assert report.num_rows == {"user_weight": 50, "code": 40, "hashed": 30}
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["dump"]


def test_all_tiers_and_updates_are_in_a_dump(version: Path, tmp_path: Path, redis_url: str) -> None:
    """Rows of Redis come before those of RocksDB, and these before the files'; new keys are there as well."""
    expected = of_files(version)
    first, second, third = list(expected["hashed"])[:3]
    with create_store(f"rocksdb://{tmp_path}/db", Namespace("model", "1"), DIMS, writable=True) as store:
        store.insert("hashed", *rows(first, second, 77, value=1))
    with create_store(redis_url, Namespace("model", "1"), DIMS, timeout_ms=PATIENCE_MS) as store:
        store.insert("hashed", *rows(second, 78, value=2))
    expected["hashed"] |= {first: [1, 1], second: [2, 2], 77: [1, 1], 78: [2, 2]}
    stores = {"volatile_store": redis_url, "persistent_store": f"rocksdb://{tmp_path}/db"}

    with InferenceSession.open(version, **stores, store_timeout_ms=PATIENCE_MS) as session:
        session.dump(tmp_path / "dump")
        assert read_all(tmp_path / "dump") == expected

    arguments = [part for name, url in stores.items() for part in (f"--{name.replace('_', '-')}", url)]
    said = hotrow("dump", version, "--to", tmp_path / "again", *arguments)
    assert read_all(tmp_path / "again") == expected
    assert "hashed: 32 rows" in said
    assert third in expected["hashed"]


def test_the_command_goes_by_config_pbtxt(version: Path, tmp_path: Path) -> None:
    """Stores are those that the model is served with, and their rows stay as they are."""
    with create_store(f"rocksdb://{tmp_path}/db", Namespace("model"), DIMS, writable=True) as store:
        store.insert("hashed", *rows(77))
    settings = {"persistent_store": f"rocksdb://{tmp_path}/db", "store_namespace": "shared"}
    (version.parent / "config.pbtxt").write_text(f'backend: "hotrow"\n{settings_text(settings)}')

    hotrow("dump", version, "--to", tmp_path / "dump")

    assert read(tmp_path / "dump" / "hashed", 2)[77] == [1.5, 1.5]


def test_a_dump_goes_to_hdfs(version: Path, tmp_path: Path, hdfs: Hdfs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dump to HDFS, read back from there, is the same; nothing stays in the cache folder."""
    monkeypatch.setenv("HOTROW_CACHE_DIR", str(tmp_path / "cache"))
    hotrow("dump", version, "--to", f"{hdfs.url}/dumps/one")
    with Copy(f"{hdfs.url}/dumps/one", tmp_path / "back") as copy:
        copy.run()
    assert read_all(tmp_path / "back") == of_files(version)
    assert not list((tmp_path / "cache" / "sources").iterdir())


def test_a_target_that_exists_is_refused(version: Path, tmp_path: Path) -> None:
    """Nothing is written over."""
    (tmp_path / "dump").mkdir()
    with InferenceSession.open(version) as session, pytest.raises(ConfigurationError, match="dump: already exists"):
        session.dump(tmp_path / "dump")
    assert not list((tmp_path / "dump").iterdir())
    with pytest.raises(SessionClosedError):
        session.dump(tmp_path / "other")


def test_rows_changed_in_memory_are_dumped(version: Path, tmp_path: Path) -> None:
    """For a model without stores, the dump has the rows as its update stream changed them, without erased ones."""
    expected = of_files(version)
    first, second = list(expected["hashed"])[:2]
    spec = read_spec(version)
    files = [TableFile.open(version / "tables" / table.folder, table) for table in spec.tables]
    source = changing_rows(files)
    source.writer.update("hashed", *rows(first, 77, value=4))
    source.writer.erase("hashed", np.array([second, 77, 79]))
    source.writer.update(spec.tables[0].folder, *rows(7, dim=4, value=3))
    source.writer.erase(spec.tables[0].folder, np.array([9]))

    dump(source, spec, tmp_path / "dump")
    source.close()

    expected["hashed"][first] = [4, 4]
    expected["user_weight"][7] = [3, 3, 3, 3]
    del expected["hashed"][second], expected["user_weight"][9]
    assert read_all(tmp_path / "dump") == expected


def test_the_command_does_not_miss_updates_in_memory(version: Path, tmp_path: Path) -> None:
    """If only a server's memory has the updates, the command says so instead of dumping the rows before them."""
    (version.parent / "config.pbtxt").write_text(settings_text({"update_stream": "kafka://127.0.0.1:9092"}))
    with pytest.raises(ConfigurationError, match="in the memory of the process that serves it"):
        hotrow("dump", version, "--to", tmp_path / "dump")


class _HookedStore(WrapperStore):
    """Calls back in the middle of a scan, and may give every row twice."""

    def __init__(self, store: EmbeddingStore) -> None:
        super().__init__(store)
        self.amid_scan = lambda: None

    def scan(self, table: str) -> Iterator[RowBatch]:
        for keys, vectors in self.store.scan(table):
            for begin in range(0, len(keys), 7):
                yield keys[begin : begin + 7], vectors[begin : begin + 7]
                self.amid_scan()
            yield keys, vectors


@pytest.fixture
def server() -> Iterator[ParameterServer]:
    """Two tiers that can be written to, with 50 rows of value 0."""
    volatile, persistent = _HookedStore(MemoryStore({"t": 3})), _HookedStore(MemoryStore({"t": 3}))
    server = ParameterServer([Tier("volatile", volatile, volatile=True), Tier("persistent", persistent)])
    server.insert("t", *rows(*range(50), dim=3, value=0))
    volatile.erase("t", np.arange(10, 50))
    yield server
    server.close()


def scanned(server: ParameterServer) -> dict[int, set[float]]:
    """All values of every key that a scan gives."""
    found: dict[int, set[float]] = {}
    for keys, vectors in server.scan("t"):
        for key, vector in zip(keys.tolist(), vectors.tolist(), strict=True):
            found.setdefault(key, set()).update(vector)
    return found


def test_updates_wait_for_a_scan_and_reads_do_not(server: ParameterServer) -> None:
    """An update during a frozen scan is in none of its rows, and is applied when the scan has ended."""
    volatile = server.tiers[0].store
    assert isinstance(volatile, _HookedStore)
    writers: list[threading.Thread] = []

    def write() -> None:
        if not writers:
            writers.append(threading.Thread(target=server.insert, args=("t", *rows(*range(60), dim=3, value=1))))
            writers[0].start()
            out = np.empty((60, 3), np.float32)
            request = FetchRequest("t", np.arange(60), out)
            assert fetch_any(server, [request])[0].sum() == 50
            assert not out[:50].any()

    volatile.amid_scan = write
    with server.frozen():
        assert scanned(server) == {key: {0.0} for key in range(50)}
    writers[0].join()
    assert scanned(server) == {key: {1.0} for key in range(60)}


def test_a_tier_that_is_down_fails_the_scan(server: ParameterServer) -> None:
    """Rows are never left out without a message: while a tier is down there is no dump."""
    server.tiers[0].health.failure = "gone"
    with pytest.raises(UnavailableError, match="volatile: gone"):
        scanned(server)


def test_closing_ends_a_scan(server: ParameterServer) -> None:
    """A server that is closed amid a scan does not wait for its end."""
    scan = server.scan("t")
    next(scan)
    server.close()
    with pytest.raises((SessionClosedError, StoreError)):
        list(scan)


def test_rows_that_come_twice_are_dumped_once(version: Path, tmp_path: Path) -> None:
    """If a table file has equal keys, the last row is served, and only that row is dumped."""
    spec = read_spec(version)
    folder = version / "tables" / "hashed"
    keys = np.fromfile(folder / "key", "<i8")
    keys[:20] = keys[10]
    keys.tofile(folder / "key")
    vectors = np.fromfile(folder / "emb_vector", "<f4").reshape(30, 2)
    (folder / "index").unlink(missing_ok=True)
    manifest.write_manifest(version)
    with InferenceSession.open(version) as session:
        report = session.dump(tmp_path / "dump")
        assert session.lookup("hashed", keys[:1]).tolist() == [vectors[19].tolist()]
    assert report.num_rows["hashed"] == 11
    assert read(tmp_path / "dump" / "hashed", spec.table("hashed").embedding_dim) == dict(
        zip(keys[19:].tolist(), vectors[19:].tolist(), strict=True)
    )
