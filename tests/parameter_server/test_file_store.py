"""Files below a store that remembers which of their rows were erased; most of it is tested with real stores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inference_session.parameter_server.base import ERASED_SUFFIX
from tests.testing.memory_store import MemoryStore
from tests.testing.table_files import table_files
from tests.testing.wrapper_store import HookedStore

KEYS = np.arange(3)


@pytest.fixture
def memory() -> HookedStore:
    return HookedStore(MemoryStore({"t": 2, "t" + ERASED_SUFFIX: 1}))


def test_rows_erased_while_others_look_for_erased_ones_stay_erased(tmp_path: Path, memory: HookedStore) -> None:
    """The first erasure of a table, while the background work still finds that nothing is erased in it."""
    store = table_files(tmp_path, {"t": (KEYS, np.ones((3, 2), np.float32))}, memory)

    memory.hooks["num_rows"] = lambda: store.erase("t", np.array([1]))
    store.refresh()

    assert store.fetch("t", KEYS, np.empty((3, 2), np.float32)).tolist() == [True, False, True]


def test_a_row_that_another_process_erased_first_stays_erased(tmp_path: Path, memory: HookedStore) -> None:
    """Before this process has learned that any row of the table is erased."""
    store = table_files(tmp_path, {"t": (KEYS, np.ones((3, 2), np.float32))}, memory, lambda: True)

    memory.insert("t" + ERASED_SUFFIX, KEYS[1:2], np.ones((1, 1), np.float32))

    assert store.fetch("t", KEYS, np.empty((3, 2), np.float32)).tolist() == [True, False, True]


def test_the_store_is_not_asked_where_nothing_is_erased(tmp_path: Path, memory: HookedStore) -> None:
    """It is only where others may be first."""
    memory.hooks["fetch"] = lambda: pytest.fail("asked")
    store = table_files(tmp_path, {"t": (KEYS, np.ones((3, 2), np.float32))}, memory)

    assert store.fetch("t", KEYS, np.empty((3, 2), np.float32)).all()
