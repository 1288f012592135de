"""The fast path of a model with context inputs: requests that repeat the context, and requests that give it once.

Each kind has its own network, and so its own Staging (base.py). Which kind a batch is, its arrays show.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager

import numpy as np

from inference_session.device.base import Device
from inference_session.device.host import HOST
from inference_session.execution.staging.base import Arrays, StagedBatch, Staging, StagingPool
from inference_session.model_spec import ModelSpec
from inference_session.requests.ranking_layout import exceeds


class RankingStaging:
    """Memory for a batch of either kind."""

    def __init__(self, spec: ModelSpec, device: Device, repeating: Staging | None, ranking: Staging | None) -> None:
        """Stage requests in these; None: `run_many` takes requests of that kind.

        Args:
            spec: the model.
            device: of the rows.
            repeating: for requests that repeat the context for each candidate.
            ranking: for requests of one context each.
        """
        self._device = device
        self._repeating, self._ranking = repeating, ranking
        is_context = [tensor.context for tensor in spec.inputs]
        self._context_input, self._candidate_input = is_context.index(True), is_context.index(False)
        self._largest_value = spec.ranking.largest_input if spec.ranking else None

    @property
    def held(self) -> AbstractContextManager[object] | None:
        """See Staging."""
        return None if self._device is HOST else self._device.held()

    def fill(self, arrays: Arrays, num_requests: int, outputs: Collection[str] | None) -> StagedBatch | None:
        """See Staging."""
        staging = self._staging_of(arrays)
        return None if staging is None else staging.fill(arrays, num_requests, outputs)

    def _staging_of(self, arrays: Arrays) -> Staging | None:
        """The memory for requests of the first one's kind, which refuses others that differ from it."""
        try:
            num_contexts, num_samples = len(arrays[self._context_input]), len(arrays[self._candidate_input])
        except (IndexError, TypeError):
            return None
        if num_contexts == num_samples:
            return self._repeating
        return None if self._needs_whole_network(arrays) else self._ranking

    def _needs_whole_network(self, arrays: Arrays) -> bool:
        """Whether a request has values beyond those for which the divided network is as exact as the whole one."""
        largest = self._largest_value
        return largest is not None and any(type(a) is np.ndarray and exceeds(a, largest) for a in arrays)


def join_pools(
    spec: ModelSpec, device: Device, repeating: StagingPool | None, ranking: StagingPool | None
) -> StagingPool:
    """What stages requests of both kinds; see RankingStaging."""

    def new() -> RankingStaging:
        return RankingStaging(spec, device, *(None if pool is None else pool.new() for pool in (repeating, ranking)))

    return StagingPool(new)
