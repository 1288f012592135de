"""The null cache against the contract."""

from __future__ import annotations

from inference_session.embedding_cache import EmbeddingCache, create_embedding_cache
from inference_session.embedding_cache.null import NullEmbeddingCache
from tests.embedding_cache.contract import AMPLE_BYTES, EmbeddingCacheContract


class TestNullEmbeddingCache(EmbeddingCacheContract):
    """It keeps every promise but that of holding rows."""

    holds_rows = False

    def create(self, dims: dict[str, int], cache_bytes: int = AMPLE_BYTES) -> EmbeddingCache:
        return NullEmbeddingCache(dims)

    def test_no_budget_gives_a_null_cache(self) -> None:
        """cache_bytes=0 is how a model is served without a cache."""
        assert isinstance(create_embedding_cache({"t": 4}, cache_bytes=0), NullEmbeddingCache)
