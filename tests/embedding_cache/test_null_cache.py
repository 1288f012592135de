"""The null cache against the contract."""

from __future__ import annotations

import sys
import threading

import numpy as np

from inference_session.embedding_cache.base import EmbeddingCache
from inference_session.embedding_cache.null import NullEmbeddingCache
from inference_session.kernels.records import Lookup, key_segments
from tests.testing.cache_contract import AMPLE_BYTES, EmbeddingCacheContract


class TestNullEmbeddingCache(EmbeddingCacheContract):
    """It keeps the whole contract, except that it holds no rows."""

    holds_rows = False

    def create(self, dims: dict[str, int], cache_bytes: int = AMPLE_BYTES) -> EmbeddingCache:
        return NullEmbeddingCache(dims)


def test_no_key_counts_as_a_hit_for_a_moment() -> None:
    """A counter that has been reported must not fall. Threads take turns as often as they can."""
    interval_s = sys.getswitchinterval()
    cache = NullEmbeddingCache({"t": 4})
    keys, out = np.arange(3), np.zeros((3, 4), np.float32)
    ending = threading.Event()

    def look_up() -> None:
        while not ending.is_set():
            cache.look_up(Lookup(key_segments([keys], [out]), np.array([3]), np.zeros(1, np.int64)))

    threads = [threading.Thread(target=look_up) for _ in range(2)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        hits = {cache.stats().hits for _ in range(3000)}
    finally:
        sys.setswitchinterval(interval_s)
        ending.set()
        for thread in threads:
            thread.join()

    assert hits == {0}
