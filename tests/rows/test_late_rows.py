"""Rows that a look-up does not wait for."""

from __future__ import annotations

import threading

import numpy as np

from inference_session.embedding_cache.cpu import CpuEmbeddingCache
from inference_session.errors import StoreError
from inference_session.kernels.records import Lookup, key_segments
from inference_session.model_spec import TableSpec
from inference_session.parameter_server.server import ParameterServer
from inference_session.parameter_server.tier import Tier
from inference_session.rows.stored import StoredRows
from tests.testing.memory_store import MemoryStore
from tests.testing.servers import wait_until
from tests.testing.wrapper_store import FaultStore


def test_a_fetch_that_fails_harms_no_other_look_ups_rows() -> None:
    """Three look-ups wait; the store refuses the fetch of the second one."""
    store = MemoryStore({"t": 2})
    store.insert("t", np.arange(9), np.arange(18, dtype=np.float32).reshape(9, 2))
    may_fetch, num_fetches = threading.Event(), 0

    def fault(verb: str) -> Exception | None:
        nonlocal num_fetches
        if verb != "fetch_many":
            return None
        may_fetch.wait()
        num_fetches += 1
        return StoreError("a page that cannot be read") if num_fetches == 2 else None

    cache = CpuEmbeddingCache({"t": 2}, 1 << 16)
    server = ParameterServer([Tier("memory", FaultStore(store, fault))], on_store_failure="error")
    rows = StoredRows([TableSpec("t", "t", 9, 2, keys="stored")], [cache], server, async_from=0.0)
    try:
        for asked in ([1, 2], [3, 4], [5, 6]):
            keys, output = np.array(asked), np.empty((2, 2), np.float32)
            rows.readers[0].look_up(Lookup(key_segments([keys], [output]), np.array([2]), np.zeros(1, np.int64)))
            assert not output.any()  # the default vector
        may_fetch.set()
        wait_until(lambda: sorted(cache.dump("t").tolist()) == [1, 2, 5, 6], "the other look-ups' rows")
    finally:
        may_fetch.set()
        rows.close()
