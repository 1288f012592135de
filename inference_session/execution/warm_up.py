"""Made-up requests that a session answers before it serves: the first runs of a size take longer than later ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from inference_session.model_spec import ModelSpec
from inference_session.requests.batch import Request, RequestLayout
from inference_session.requests.ranking_layout import RankingLayout

_BATCHES = ((1, 1), (1, 1), (1, 64), (4, 1), (16, 1), (8, 64), (16, 1), (8, 64), (1, 64), (1, 1))
"""Requests and samples of each. The first batch prepares kernels and network."""

_GPU_BATCHES = ((1, 8), (1, 32), (1, 128), (1, 256), (1, 1024))
"""Batches that a GPU records as CUDA graphs as well."""

_RANKING_SIZES = ((1, 100), (1, 500), (1, 1000), (4, 250))
"""Contexts and candidates of each."""

_GPU_RANKING_SIZES = tuple((contexts, length) for length in (100, 250, 500, 1000) for contexts in (1, 4, 16))
"""The same on a GPU, which records them as CUDA graphs: smaller batches are filled up to these."""


class MadeUpBatch(NamedTuple):
    """A batch of equal requests."""

    request: Request
    num_requests: int
    ranking: tuple[int, int] | None = None
    """Contexts, and candidates of each; None: the request repeats the context, or the model has none."""


def made_up_batches(spec: ModelSpec, layout: RequestLayout, *, on_gpu: bool) -> Iterator[MadeUpBatch]:
    """Batches to warm up with on a device; the first is the smallest."""
    for num_requests, num_samples in (*_BATCHES, *(_GPU_BATCHES if on_gpu else ())):
        yield MadeUpBatch(layout.made_up(num_samples), num_requests if spec.joins_requests else 1)
    if isinstance(layout, RankingLayout):
        for size in _GPU_RANKING_SIZES if on_gpu and spec.is_divided else _RANKING_SIZES:
            yield MadeUpBatch(layout.made_up_ranking(*size), 1, size)
