"""The stores' contract on memory, on table files, and on wrappers around them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from inference_session.errors import StoreError, UnavailableError
from inference_session.model_spec import TABLES_FOLDER, ModelSpec, TableSpec
from inference_session.parameter_server.base import EmbeddingStore
from inference_session.parameter_server.file_store import TableFileStore
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.rocksdb.store import RocksDbStore
from inference_session.tables.table_file import write_table
from inference_session.version_directory import manifest
from inference_session.version_directory.version import VersionDirectory
from tests.testing.faulty_stores import FaultStore, LatencyStore
from tests.testing.memory_store import MemoryStore
from tests.testing.store_contract import DIMS, ReadContract, StoreContract, fetch, keys_of, random_vectors
from tests.testing.wrapper_store import WrapperStore


class MemoryContract(StoreContract):
    """Access that bypasses the store: its dictionaries."""

    memory: MemoryStore

    def put(self, table: str, key: int, row: bytes) -> None:
        self.memory.rows[table][key] = np.frombuffer(row, np.float32)

    def get(self, table: str, key: int) -> bytes | None:
        row = self.memory.rows[table].get(key)
        return None if row is None else row.tobytes()


class TestMemory(MemoryContract):
    """The specification agrees with itself."""

    @pytest.fixture
    def store(self) -> MemoryStore:
        self.memory = MemoryStore(DIMS)
        return self.memory


class TestWrapped(MemoryContract):
    """Wrappers around wrappers are as good as the store inside."""

    @pytest.fixture
    def store(self) -> EmbeddingStore:
        self.memory = MemoryStore(DIMS)
        return LatencyStore(FaultStore(self.memory, lambda _: None), 0.01)


class TestTableFiles(ReadContract):
    """Table files are read only."""

    @pytest.fixture
    def filled(self, tmp_path: Path) -> Iterator[TableFileStore]:
        for table, (keys, vectors) in self.ROWS.items():
            write_table(tmp_path / TABLES_FOLDER / table, [vectors], keys=[keys])
        specs = tuple(TableSpec(t, t, len(self.ROWS[t][0]), dim) for t, dim in DIMS.items())
        manifest.write_manifest(tmp_path)
        with TableFileStore(VersionDirectory(tmp_path, ModelSpec((), (), specs, ()))) as store:
            yield store

    def test_writes_are_refused(self, filled: TableFileStore) -> None:
        """A store that takes no writes says so beforehand, and refuses a write that is tried anyway."""
        assert not filled.supports_writes
        for call in (
            lambda: filled.insert("user", keys_of(1), random_vectors(1, 4)),
            lambda: filled.erase("user", keys_of(1)),
            lambda: filled.clear("user"),
            lambda: filled.note("user"),
            lambda: filled.set_note("user", "x"),
        ):
            with pytest.raises(StoreError):
                call()
        filled.check()
        filled.refresh()


def test_faults_come_when_they_are_told_to() -> None:
    """The chosen call fails, and does not reach the wrapped store."""
    plan = iter([None, UnavailableError("down"), None])
    store = FaultStore(MemoryStore(DIMS), lambda _: next(plan))
    store.insert("odd", keys_of(1), np.ones((1, 1), np.float32))
    with pytest.raises(UnavailableError, match="down"):
        store.insert("odd", keys_of(2), np.ones((1, 1), np.float32))
    assert fetch(store, "odd", keys_of(1, 2))[0].tolist() == [True, False]


def test_wrappers_forward_everything() -> None:
    """No method of the contract is left to its default by a wrapper."""
    methods = {name for name in vars(EmbeddingStore) if not name.startswith("_")}
    assert methods <= set(vars(WrapperStore))


def test_wrappers_compose_with_a_real_store(tmp_path: Path) -> None:
    """A database behind random faults ends up with what was inserted, if one tries again."""
    rng = random.Random(3)
    inside = RocksDbStore(tmp_path, Namespace("ctr", "1"), DIMS, writable=True)
    with FaultStore(inside, lambda _: UnavailableError("down") if rng.random() < 0.5 else None) as store:
        vectors = random_vectors(50, 4)
        for i in range(50):
            while True:
                try:
                    store.insert("user", np.array([i]), vectors[i : i + 1])
                    break
                except UnavailableError:
                    continue
        assert inside.num_rows("user") == 50
