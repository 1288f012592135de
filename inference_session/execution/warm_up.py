"""Generated requests that a session answers before it serves: the first runs of a size take longer than later ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from inference_session.device.host import HOST
from inference_session.errors import HotrowError, ModelFormatError, UnavailableError
from inference_session.execution.fast_path import FastPath
from inference_session.execution.full_path import FullPath
from inference_session.execution.phases import ignore_phase
from inference_session.execution.replicas import Replica
from inference_session.model_spec import SESSION_FILE, ModelSpec
from inference_session.requests.batch import Request, RequestLayout
from inference_session.requests.outputs import Answer, JoinedAnswer
from inference_session.requests.ranking_layout import RankingLayout
from inference_session.tables.base import HotKeys
from inference_session.version_directory.version import VersionDirectory

_BATCHES = ((1, 1), (1, 1), (1, 64), (4, 1), (16, 1), (8, 64), (16, 1), (8, 64), (1, 64), (1, 1))
"""For each batch, the number of requests, and of samples in each. The first batch prepares kernels and network."""

_GPU_BATCHES = ((1, 8), (1, 32), (1, 128), (1, 256), (1, 1024))
"""Batches that a GPU records as CUDA graphs as well."""

_RANKING_SIZES = ((1, 100), (1, 500), (1, 1000), (4, 250))
"""For each batch, the number of contexts, and of candidates of each."""

_GPU_RANKING_SIZES = tuple((contexts, length) for length in (100, 250, 500, 1000) for contexts in (1, 4, 16))
"""The same on a GPU, which records them as CUDA graphs: smaller batches are filled up to these."""


class GeneratedBatch(NamedTuple):
    """A batch of equal requests."""

    request: Request
    num_requests: int
    ranking: tuple[int, int] | None = None
    """Contexts, and candidates of each; None: the request repeats the context, or the model has none."""


def generated_batches(spec: ModelSpec, layout: RequestLayout, *, on_gpu: bool) -> Iterator[GeneratedBatch]:
    """Batches to warm up with on a device; the first is the smallest."""
    for num_requests, num_samples in (*_BATCHES, *(_GPU_BATCHES if on_gpu else ())):
        yield GeneratedBatch(layout.generated(num_samples), num_requests if spec.joins_requests else 1)
    if isinstance(layout, RankingLayout):
        for size in _GPU_RANKING_SIZES if on_gpu and spec.is_divided else _RANKING_SIZES:
            yield GeneratedBatch(layout.generated_ranking(*size), 1, size)


@dataclass(frozen=True)
class WarmUp:
    """The warm-up of a session: generated batches are answered, and rows loaded, before a request needs them."""

    version: VersionDirectory
    layout: RequestLayout
    """Of the model's requests."""
    fast_path: FastPath
    full_path: FullPath
    """The ways in which requests may be answered."""
    hot_keys: HotKeys
    """The rows that a cache loads."""
    seconds: float
    """How long it takes on a device at most after the first batch, which is always answered."""

    def run(self, replica: Replica) -> None:
        """Warm a device up, in its thread.

        Raises:
            ModelFormatError: an answer is not what session.json says.
        """
        spec = replica.network.spec
        batches = generated_batches(spec, self.layout, on_gpu=replica.device is not HOST)
        self._answer(replica, next(batches))  # without a time limit: kernels and network must be ready
        deadline = time.monotonic() + self.seconds
        if self.seconds:
            with suppress(UnavailableError):  # if a store is down, some rows, or none, are enough
                replica.network.reader.warm_up(self.hot_keys, deadline)
        ranked = []
        for batch in batches:
            if time.monotonic() < deadline:
                self._answer(replica, batch)
                ranked += [batch.ranking] if batch.ranking else []
        for network in {replica.network, replica.ranking}:
            network.dense.end_warm_up()
        if isinstance(self.layout, RankingLayout) and spec.is_divided and replica.ranking.dense.replays:
            self.layout.replayed = tuple(ranked)

    def _answer(self, replica: Replica, batch: GeneratedBatch) -> None:
        """Answer a batch in each way in which requests may be answered, and compare an answer with session.json."""
        answers: list[Answer] = []
        # Zeros may be an invalid request, and a store may be down; a failed warm-up batch affects no request.
        with suppress(HotrowError):
            checked = [self.layout.check(batch.request)] * batch.num_requests
            # The first runs of a shape bind it; the last one runs as requests will.
            for _ in range(2 if replica.network.reader.is_launched else 1):
                answers = self.full_path.answer_group(replica, checked, ignore_phase)
            number, outputs = batch.num_requests, batch.request.outputs
            if arrays := self.fast_path.arrays_of([batch.request] * number):
                for _ in range(2):
                    self.fast_path.run(arrays, number, outputs, ignore_phase, JoinedAnswer.copied, replica=replica)
        if answers and self.layout.has_network:
            if difference := self.layout.outputs.difference(answers[0]):
                raise ModelFormatError(f"{self.version.path / SESSION_FILE}: {difference}")
            self.layout.outputs.learn_sizes(answers[0])
