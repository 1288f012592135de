"""Files below a store that remembers which of their rows were erased; most of it is tested with real stores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from inference_session.parameter_server.base import ERASED_SUFFIX
from tests.testing.memory_store import MemoryStore
from tests.testing.table_files import table_files
from tests.testing.wrapper_store import WrapperStore

KEYS = np.arange(3)


class CountedStore(WrapperStore):
    """Calls a function once, after the rows of a table are counted and before the number is returned."""

    hook: Callable[[], None] | None = None

    def num_rows(self, table: str) -> int:
        found = super().num_rows(table)
        if self.hook is not None:
            hook, self.hook = self.hook, None
            hook()
        return found


def test_rows_erased_while_others_look_for_erased_ones_stay_erased(tmp_path: Path) -> None:
    """The first erasure of a table, while the background work still finds that nothing is erased in it."""
    memory = CountedStore(MemoryStore({"t": 2, "t" + ERASED_SUFFIX: 1}))
    store = table_files(tmp_path, {"t": (KEYS, np.ones((3, 2), np.float32))}, memory)

    memory.hook = lambda: store.erase("t", np.array([1]))
    store.refresh()

    assert store.fetch("t", KEYS, np.empty((3, 2), np.float32)).tolist() == [True, False, True]
