"""The key graph on the processor: a step on the way from the arrays of requests to their look-up (forms.py)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.dense_engine.base import BoundRun
from inference_session.dense_engine.onnx import OnnxEngine
from inference_session.execution.staging.forms import ArrayForm, Memory, enter_results, given_inputs
from inference_session.kernels.cpu.requests.staging import NOT_STAGED, STAGED

MAX_PLANS = 1024
MAX_BYTES = 64 << 20
"""The most bytes that are kept for good: of inputs and vectors, whose larger batches gain little, and of results."""


class _Plan(NamedTuple):
    """The key graph, bound to batches of one shape."""

    run: BoundRun
    records: NDArray[np.uint8]
    """The bytes of the INPUT records of its results."""
    shapes: bytes
    """Of its results, as one value."""


def are_full(runs: Collection[BoundRun | None]) -> bool:
    """Whether these runs, one of each plan, are too many or keep too much: then all plans are dropped."""
    return len(runs) >= MAX_PLANS or sum(run.result_bytes for run in runs if run is not None) > MAX_BYTES


class HostKeyGraph:
    """Computes the keys of batches, into memory that the look-up reads. For one thread."""

    def __init__(
        self, graph: OnnxEngine, names: Sequence[str], form: ArrayForm, memory: Memory, open_sizes: NDArray[np.int64]
    ) -> None:
        """Describe where a batch is.

        Args:
            graph: computes the keys.
            names: its results, in the order of their INPUT records.
            form: of the requests.
            memory: where compiled code copies the graph's inputs.
            open_sizes: the sizes of the batch that is staged.
        """
        self._graph, self._names, self._form, self._memory, self._open_sizes = graph, names, form, memory, open_sizes
        self._records = form.inputs[len(form.dtypes) :].view(np.uint8)
        self._plans: dict[bytes, _Plan | None] = {}
        """By the open sizes of a batch. None: `run_many` takes such requests."""
        self._last: _Plan | None = None
        """The one that the records describe."""
        self.shapes = b""
        """What tells the shapes of the keys apart that were computed last: they may follow from values."""

    def compute(self, _items: int, _num_requests: int) -> int:
        """Compute the keys of the batch whose inputs have been copied; a StagingStep.

        InvalidRequestError: the graph refuses these values.
        """
        sizes = self._open_sizes.tobytes()
        plan = self._plans[sizes] if sizes in self._plans else self._plan(sizes)
        if plan is None:
            return NOT_STAGED
        if plan is not self._last:
            self._records[:] = plan.records
            self._last, self.shapes = plan, plan.shapes
        if plan.run.run() is not plan.run.results:  # values decide on the shapes
            self._plans[sizes] = None
            return NOT_STAGED
        return STAGED

    def forget(self) -> None:
        """Drop all plans: the memory that they read is replaced."""
        self._plans.clear()

    def _plan(self, sizes: bytes) -> _Plan | None:
        """The graph bound to the memory of batches of these sizes, the first of which is there."""
        if are_full([plan and plan.run for plan in self._plans.values()]):
            self.forget()
        self._last, plan = None, None
        inputs = given_inputs(self._form, self._memory, self._open_sizes, self._graph.input_names)
        run = self._graph.bind(inputs, self._names)
        if run is not None:
            run.run()  # the first run shows the shapes
            if run.results is not None and enter_results(self._form, run.results, self._open_sizes):
                shapes = repr([array.shape for array in run.results]).encode()
                plan = _Plan(run, self._records.copy(), shapes)
        self._plans[sizes] = plan
        return plan
