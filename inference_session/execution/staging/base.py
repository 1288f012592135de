"""The contract of the fast path on a device (../fast_path.py): the arrays of requests become a batch.

    staging = pool.free.pop()                                      # memory for one batch, or else `pool.new()`
    with staging.held:                                             # the device; None: there is none to hold
        batch = staging.fill(arrays, num_requests, outputs)        # None: `run_many` must answer these requests
        batch.look_up()                                            # vectors go where the network reads them
        results = batch.run.run()
    pool.free.append(staging)                                      # once the results have been used: they may be in it

host.py fulfils it on the processor, cuda.py on a GPU, ranking.py for requests of either kind to a model with context
inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from inference_session.dense_engine.base import BoundRun
from inference_session.kernels.records import Lookup
from inference_session.requests.outputs import JoinedAnswer, RequestedOutputs

Arrays: TypeAlias = "list[NDArray[Any]]"
"""The arrays of several requests: those of the first in the order of the model's inputs, then those of the next."""


@dataclass(slots=True)
class StagedBatch:
    """A batch that has been staged."""

    lookup: Lookup
    look_up: Callable[[], object]
    """Launches or answers the look-up, and copies what only the network reads, if `fill` has not."""
    run: BoundRun
    counts: NDArray[np.int64]
    """The number of samples of each request. The next batch overwrites it, and what the look-up points to."""
    num_samples: int
    """The samples of all requests."""
    num_contexts: int
    """The contexts of all requests; in a model without contexts, each sample counts as one."""
    wanted: RequestedOutputs
    """The outputs that the requests ask for."""
    output_rows: NDArray[np.int64] | None = None
    """The row of each sample in the outputs. None: row i is that of sample i."""
    answer: tuple[object, JoinedAnswer] | None = None
    """The last answer, after the results that it was made of."""
    count: Callable[[int], object] | None = None
    """Counts the batch, given the number of requests; None where no look-up has the places of an earlier one."""


class Staging(Protocol):
    """Memory for one batch at a time."""

    @property
    def held(self) -> AbstractContextManager[object] | None:
        """A context for the batch, from `fill` until its results are on the host; None: it needs none."""

    def fill(self, arrays: Arrays, num_requests: int, outputs: Collection[str] | None) -> StagedBatch | None:
        """The look-up of a batch, and the run of the network for the outputs that its requests ask for (None: all).

        The caller keeps the arrays alive until both have run. None: the arrays are not as the inputs describe them.

        InvalidRequestError: an output is unknown.
        """


class StagingPool:
    """The fast path of a model on one device. Safe to use from several threads: each takes memory of its own."""

    def __init__(self, new: Callable[[], Staging]) -> None:
        self.new = new
        """Makes memory where none is free."""
        self.free: list[Staging] = []
        """Memory that no batch uses. Threads need no lock: Python adds or removes an item in one step."""
