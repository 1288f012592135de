"""Compares what a ranking request takes by the divided network and by the whole one, with the context repeated.

Rewrites save multiply-adds and may add passes over memory and small operators, so only a run tells which is faster.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from inference_session.dense_engine.network_file import NetworkFile
from inference_session.dense_engine.onnx import OnnxEngine
from inference_session.errors import HotrowError
from inference_session.importers.onnx.probe import Recipe
from inference_session.importers.onnx.replay import Replay
from inference_session.model_spec import (
    BLOCK_CONTEXT,
    DENSE_FILE,
    KEYS_FILE,
    RANKING_FILE,
    RANKING_KEYS_FILE,
    ROW_CONTEXT,
    ModelSpec,
    NamedArrays,
    RankingSpec,
)

NUM_CANDIDATES = 500
_OPEN_SIZE = 50
"""The assumed value of a size that the model leaves open, e.g. the number of clicks."""
_SECONDS_PER_KEY = 1e-8
"""The assumed processor time of a look-up per key."""
_ROUNDS = 5
_LEAST_SECONDS = 2e-4
"""A request that takes less is not measured: a difference would be that of the measurement."""
_LEAST_RATIO = 1.05
"""Times that differ by less are taken as equal, for the same reason. Equal networks are divided: contexts of a divided
one are not repeated, and can be kept.
"""


class Times(NamedTuple):
    """Processor seconds of a request of one context."""

    divided: float
    whole: float

    @property
    def are_worse(self) -> bool:
        """Whether dividing the network makes such requests slower."""
        return self.whole > _LEAST_SECONDS and self.divided > _LEAST_RATIO * self.whole


def measure(draft: Path, spec: ModelSpec, ranking: RankingSpec, recipe: Recipe) -> Times | None:
    """The times of the networks in a draft; None: the networks refuse the generated request.

    Args:
        spec: of the model, with the look-ups of the whole network; its inputs say which are the context's.
        ranking: of the divided network.
    """
    sizes = {tensor.name: 1 if tensor.context else NUM_CANDIDATES for tensor in spec.inputs}
    request = recipe.arrays(0, sizes, _OPEN_SIZE)
    repeated = {
        tensor.name: np.repeat(request[tensor.name], NUM_CANDIDATES, axis=0) if tensor.context else request[tensor.name]
        for tensor in spec.inputs
    }
    contexts = {ROW_CONTEXT: np.zeros(NUM_CANDIDATES, np.int64), BLOCK_CONTEXT: np.zeros(1, np.int64)}
    divided_spec = replace(spec, lookups=ranking.lookups)
    try:
        runs = (
            _Run(draft, divided_spec, (RANKING_FILE, RANKING_KEYS_FILE), {**request, **contexts}),
            _Run(draft, spec, (DENSE_FILE, KEYS_FILE), repeated),
        )
        seconds = [[run.seconds() for run in runs] for _ in range(_ROUNDS + 1)][1:]
    except (HotrowError, ValueError, IndexError):
        return None
    return Times(*(min(found) for found in zip(*seconds, strict=True)))


class _Run:
    """One network, and the values that it reads for a request."""

    def __init__(self, draft: Path, spec: ModelSpec, files: tuple[str, str], arrays: NamedArrays) -> None:
        self._dense = OnnxEngine(NetworkFile(draft / files[0]), num_threads=1)
        values = Replay(draft, spec, dense_file=files[0], keys_file=files[1]).feeds(arrays)
        self._feeds = {name: values[name] for name in self._dense.input_names}
        self._outputs = sorted(self._dense.output_names)
        self._lookup_seconds = _SECONDS_PER_KEY * sum(math.prod(values[each.keys].shape) for each in spec.lookups)

    def seconds(self) -> float:
        """Processor time of the network, which runs in this thread, and of its look-ups."""
        begin = time.thread_time()
        self._dense.run(self._feeds, self._outputs)
        return time.thread_time() - begin + self._lookup_seconds
