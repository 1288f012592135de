"""Made-up requests that a session answers before it serves: the first runs of a size take longer than later ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from inference_session.device.host import HOST
from inference_session.errors import UnavailableError
from inference_session.execution.replicas import Replica
from inference_session.model_spec import ModelSpec
from inference_session.requests.batch import Request, RequestLayout
from inference_session.requests.ranking_layout import RankingLayout
from inference_session.rows.hot_keys import HotKeys

_BATCHES = ((1, 1), (1, 1), (1, 64), (4, 1), (16, 1), (8, 64), (16, 1), (8, 64), (1, 64), (1, 1))
"""For each batch, the number of requests, and of samples in each. The first batch prepares kernels and network."""

_GPU_BATCHES = ((1, 8), (1, 32), (1, 128), (1, 256), (1, 1024))
"""Batches that a GPU records as CUDA graphs as well."""

_RANKING_SIZES = ((1, 100), (1, 500), (1, 1000), (4, 250))
"""For each batch, the number of contexts, and of candidates of each."""

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


def warm_up(
    replica: Replica,
    layout: RequestLayout,
    hot_keys: HotKeys,
    seconds: float,
    answer: Callable[[MadeUpBatch], None],
) -> None:
    """Answer made-up batches on a device, and load rows before a request needs them.

    Args:
        replica: the device's; runs in its thread.
        layout: of the model's requests.
        hot_keys: the rows that a cache loads.
        seconds: how long it takes at most after the first batch, which is always answered.
        answer: answers a batch on the device.
    """
    spec = replica.network.spec
    batches = made_up_batches(spec, layout, on_gpu=replica.device is not HOST)
    answer(next(batches))  # without a time limit: kernels and network must be ready
    deadline = time.monotonic() + seconds
    if seconds:
        with suppress(UnavailableError):  # if a store is down, some rows, or none, are enough
            replica.network.rows.warm_up(hot_keys, deadline)
    ranked = []
    for batch in batches:
        if time.monotonic() < deadline:
            answer(batch)
            ranked += [batch.ranking] if batch.ranking else []
    for network in {replica.network, replica.ranking}:
        network.dense.end_warm_up()
    if isinstance(layout, RankingLayout) and spec.is_divided and replica.ranking.dense.replays:
        layout.replayed = tuple(ranked)
