"""A store that calls a test's hook after a fetch or an insertion."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from inference_session.parameter_server.base import FetchRequest
from tests.testing.wrapper_store import WrapperStore


class HookedStore(WrapperStore):
    """Calls a hook once, between a fetch, or an insertion, and its return."""

    hook: Callable[[], None] | None = None
    insertion_hook: Callable[[], None] | None = None

    def insert(self, table: str, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        super().insert(table, keys, vectors)
        if self.insertion_hook is not None:
            hook, self.insertion_hook = self.insertion_hook, None
            hook()

    def fetch_many(self, requests: Sequence[FetchRequest]) -> list[NDArray[np.bool_]]:
        found = super().fetch_many(requests)
        if self.hook is not None:
            hook, self.hook = self.hook, None
            hook()
        return found
