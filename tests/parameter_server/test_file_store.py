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


def test_rows_erased_while_others_look_for_erased_ones_stay_erased(tmp_path: Path) -> None:
    """The first erasure of a table, while the background work still finds that nothing is erased in it."""
    memory = HookedStore(MemoryStore({"t": 2, "t" + ERASED_SUFFIX: 1}))
    store = table_files(tmp_path, {"t": (KEYS, np.ones((3, 2), np.float32))}, memory)

    memory.hooks["num_rows"] = lambda: store.erase("t", np.array([1]))
    store.refresh()

    assert store.fetch("t", KEYS, np.empty((3, 2), np.float32)).tolist() == [True, False, True]


class SharedStore(MemoryStore):
    """That others write to."""

    is_shared = True


def test_a_row_that_another_follower_of_a_stream_erased_first_stays_erased(tmp_path: Path) -> None:
    """Before this process has applied the message, and has learned that any row of the table is erased."""
    memory = SharedStore({"t": 2, "t" + ERASED_SUFFIX: 1})
    store = table_files(tmp_path, {"t": (KEYS, np.ones((3, 2), np.float32))}, memory, follows_stream=True)

    memory.insert("t" + ERASED_SUFFIX, KEYS[1:2], np.ones((1, 1), np.float32))

    assert store.fetch("t", KEYS, np.empty((3, 2), np.float32)).tolist() == [True, False, True]


def test_a_store_that_is_out_is_not_asked(tmp_path: Path) -> None:
    """Each look-up would wait for it."""
    asked = HookedStore(SharedStore({"t": 2, "t" + ERASED_SUFFIX: 1}))
    asked.hooks["fetch"] = lambda: pytest.fail("asked")
    rows = {"t": (KEYS, np.ones((3, 2), np.float32))}
    store = table_files(tmp_path, rows, asked, follows_stream=True, is_out=lambda: True)

    assert store.fetch("t", KEYS, np.empty((3, 2), np.float32)).all()
