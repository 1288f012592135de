"""The stores' contract on memory, on table files, and on wrappers around them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from inference_session.errors import StoreError, UnavailableError
from inference_session.parameter_server.base import ERASED_SUFFIX, EmbeddingStore
from inference_session.parameter_server.file_store import TableFileStore
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.rocksdb.store import RocksDbStore
from tests.testing.memory_store import MemoryStore
from tests.testing.store_contract import DIMS, ReadContract, StoreContract, fetch, keys_of, random_vectors
from tests.testing.table_files import table_files
from tests.testing.wrapper_store import FaultStore, HookedStore, WrapperStore


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
        return HookedStore(FaultStore(self.memory, lambda _: None))


class TestTableFiles(ReadContract):
    """Table files never change; rows can be erased all the same."""

    @pytest.fixture
    def filled(self, tmp_path: Path) -> Iterator[TableFileStore]:
        with table_files(tmp_path, self.ROWS, MemoryStore({table + ERASED_SUFFIX: 1 for table in DIMS})) as store:
            yield store

    def test_rows_are_erased_and_not_added(self, filled: TableFileStore) -> None:
        """Erased rows are found no more, by look-ups and scans; the store above keeps those that are inserted."""
        keys = self.ROWS["user"][0]
        filled.insert("user", keys_of(10**15), random_vectors(1, 4))
        filled.erase("user", np.concatenate([keys[:3], keys_of(10**15)]))
        assert not filled.keeps_rows
        expected = [*np.isin(keys, keys[:3], invert=True).tolist(), False]
        assert fetch(filled, "user", np.concatenate([keys, keys_of(10**15)]))[0].tolist() == expected
        assert {*np.concatenate([part for part, _ in filled.scan("user")]).tolist()} == {*keys[3:].tolist()}

    def test_other_writes_are_refused(self, filled: TableFileStore) -> None:
        """What files cannot do is an error."""
        for call in (
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
