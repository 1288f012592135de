"""The way of a batch from its keys to the network's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.dense_engine import DenseEngine
from inference_session.execution.lookup_plan import LookupPlan
from inference_session.execution.stages import Mark
from inference_session.requests.batch import JoinedBatch
from inference_session.requests.outputs import Answer
from inference_session.rows import RowSource


class Computed(NamedTuple):
    """What became of a batch."""

    outputs: Answer
    num_keys: NDArray[np.int64]
    """Keys per look-up."""
    num_unknown: NDArray[np.int64]
    """Keys per look-up that were answered with the default vector."""


class Forward:
    """Look-up, then network."""

    def __init__(self, plan: LookupPlan, rows: RowSource, dense: DenseEngine) -> None:
        self._plan = plan
        self._rows = rows
        self._dense = dense

    def run(self, batch: JoinedBatch, outputs: Sequence[str], mark: Mark) -> Computed:
        """Compute these outputs of the network; raises what the look-up and `DenseEngine.run` do."""
        with self._rows.request():
            looked_up = self._plan.run(batch)
            batch.add(looked_up.vectors)
            mark("network")
            results = self._dense.run(self._network_inputs(batch), outputs)
            num_unknown = self._rows.settled(looked_up.num_unknown)
        return Computed(dict(zip(outputs, results, strict=True)), looked_up.num_keys, num_unknown)

    def _network_inputs(self, batch: JoinedBatch) -> dict[str, NDArray[Any]]:
        return {name: batch.array(name) for name in self._dense.input_names}
