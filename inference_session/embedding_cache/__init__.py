"""The hottest rows of all tables of a model, within a budget of bytes."""

from __future__ import annotations

from collections.abc import Mapping

from numpy.typing import ArrayLike

from inference_session.device.discovery import require_gpu
from inference_session.embedding_cache.base import EmbeddingCache, LookupResult
from inference_session.model_spec import VectorType

__all__ = ["EmbeddingCache", "LookupResult", "create_embedding_cache"]


def create_embedding_cache(
    dims: Mapping[str, int],
    device: str = "cpu",
    *,
    cache_bytes: int,
    dtype: VectorType = "float32",
    backing: Mapping[str, tuple[ArrayLike, ArrayLike]] | None = None,
    num_rows: Mapping[str, int] | None = None,
    num_threads: int = 1,
) -> EmbeddingCache:
    """A cache for tables of these embedding_dims, by name.

    Args:
        dims: embedding_dim of each table.
        device: `cpu`, or `cuda:N` for the GPU of number N, where arrays in and out are CuPy's.
        cache_bytes: upper bound on all memory that the cache allocates; 0 caches nothing.
        dtype: how rows are held; look-ups answer float32 all the same.
        backing: keys int64 [n] and vectors float32 [n, embedding_dim] by table, rows in host memory (pinned, for a GPU)
            that misses are served from; the index over their keys is not part of cache_bytes.
        num_rows: rows that tables have in all, as far as known, so that none is given more than it can use.
        num_threads: threads over which a large look-up on the CPU is split.

    Raises:
        ConfigurationError: a value is not allowed, cache_bytes too small for the tables, or there is no such GPU.
    """
    # Imported here because the parameter server, which the caches build on, imports the kernels of this package.
    from inference_session.embedding_cache.backed import BackedCache
    from inference_session.embedding_cache.cpu import CpuEmbeddingCache
    from inference_session.embedding_cache.null import NullEmbeddingCache

    if device != "cpu":
        device_id = require_gpu(device)
        from inference_session.embedding_cache.gpu import GpuEmbeddingCache

        return GpuEmbeddingCache(
            dims, cache_bytes, device_id=device_id, dtype=dtype, backing=backing, num_rows=num_rows
        )
    cache: EmbeddingCache
    if cache_bytes == 0:
        cache = NullEmbeddingCache(dims)
    else:
        cache = CpuEmbeddingCache(dims, cache_bytes, dtype=dtype, num_rows=num_rows, num_threads=num_threads)
    return cache if backing is None else BackedCache(cache, backing)
