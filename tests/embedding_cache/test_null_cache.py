"""The null cache against the contract."""

from __future__ import annotations

from inference_session.embedding_cache.base import EmbeddingCache
from inference_session.embedding_cache.null import NullEmbeddingCache
from tests.testing.cache_contract import AMPLE_BYTES, EmbeddingCacheContract


class TestNullEmbeddingCache(EmbeddingCacheContract):
    """It keeps every promise but that of holding rows."""

    holds_rows = False

    def create(self, dims: dict[str, int], cache_bytes: int = AMPLE_BYTES) -> EmbeddingCache:
        return NullEmbeddingCache(dims)
