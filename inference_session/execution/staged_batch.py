"""The contract of the fast path on a device (fast_path.py): the arrays of requests become a batch.

    staging = model.take()                                         # memory for one batch
    with staging.held:                                             # the device, where there is one to hold
        batch = staging.fill(arrays, num_requests, outputs)        # None: `run_many` must answer these requests
        batch.look_up()                                            # vectors go where the network reads them
        results = batch.run.run()
    model.give_back(staging)                                       # once the results have been used: they may be in it

host_staging.py fulfils it on the processor, gathered_model.py on a GPU, ranking_staging.py for requests of either kind
to a model with context inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from inference_session.dense_engine.base import BoundRun
from inference_session.kernels.records import Lookup
from inference_session.requests.outputs import JoinedAnswer

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
    """The number of samples of each request. The next batch overwrites it, and what the look-up leads to."""
    num_samples: int
    """The samples of all requests."""
    num_contexts: int
    """The contexts of all requests; in a model without contexts, each sample counts as one."""
    output_rows: NDArray[np.int64] | None = None
    """The row of each sample in the outputs. None: row i is that of sample i."""
    answer: tuple[object, object, JoinedAnswer] | None = None
    """The last answer, after the results and the requested outputs that it was made of."""


class Staging(Protocol):
    """Memory for one batch at a time."""

    @property
    def held(self) -> AbstractContextManager[object]:
        """A context for the batch, from `fill` until its results are on the host."""

    def fill(self, arrays: Arrays, num_requests: int, outputs: tuple[str, ...]) -> StagedBatch | None:
        """The look-up of a batch, and the run of the network that computes these outputs.

        The caller keeps the arrays alive until both have run. None: the arrays are not as the inputs describe them.
        """


OwnStaging = TypeVar("OwnStaging", bound=Staging)
"""The kind of memory that a StagedModel gives, and takes back."""


class StagedModel(Protocol[OwnStaging]):
    """The fast path of a model on one device. Safe to use from several threads, each with its own Staging."""

    def take(self) -> OwnStaging:
        """Memory for one batch."""

    def give_back(self, staging: OwnStaging) -> None:
        """Return what `take` gave, so that another batch may use it."""


AnyStagedModel: TypeAlias = "StagedModel[Any]"
"""One whose callers do not know which kind of memory it gives."""
