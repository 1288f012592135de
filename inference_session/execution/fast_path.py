"""The fast path: requests whose arrays match the model's inputs exactly are answered without Python per input or table.

Compiled code reads and checks the arrays: host_staging.py on the processor, gathered_model.py on a GPU. It takes no
other requests. They go through `InferenceSession.run_many`, which also says what is wrong with a malformed one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import HotrowError
from inference_session.execution.model import Model
from inference_session.execution.replicas import Replica
from inference_session.execution.staged_batch import Arrays, StagedBatch, Staging
from inference_session.execution.stages import Mark
from inference_session.requests.batch import Request
from inference_session.requests.outputs import Answer, JoinedAnswer, RequestedOutputs
from inference_session.requests.ranking_layout import gives_one_context, split_by_context
from inference_session.stats import SessionStats

if TYPE_CHECKING:
    from inference_session.sizing.key_recorder import KeyRecorder


class FastPath:
    """Answers such requests of one session, and counts them. Safe to use from several threads.

    Its methods return None where a request has to go through `run_many`. Nothing has been counted then.
    """

    def __init__(
        self, model: Model, stats: SessionStats, *, recorder: KeyRecorder | None, rejects_unknown: bool
    ) -> None:
        """Answer on the model's devices.

        Args:
            model: what computes the answers.
            stats: where requests are counted.
            recorder: gets the keys that are looked up; None: nobody asked for them.
            rejects_unknown: whether unknown keys are an error, which `run_many` raises.
        """
        spec = model.spec
        self._spec, self._layout, self._replicas, self._stats = spec, model.layout, model.replicas, stats
        self._recorder, self._rejects_unknown = recorder, rejects_unknown
        self._joins_requests, self._ranks = spec.joins_requests, spec.ranking is not None
        self._input_names = tuple(tensor.name for tensor in spec.inputs)

    def answer(self, requests: Sequence[Request], mark: Mark) -> list[Answer] | None:
        """The answers to requests that all ask for the same outputs."""
        arrays, num_parts = self.arrays_of(requests), len(requests)
        if not arrays and len(requests) == 1 and self._spec.is_divided:
            arrays = split_by_context(self._spec, requests[0].inputs, self._layout.max_elements)
            num_parts = len(arrays or ()) // len(self._input_names)
        # Arrays on a GPU are no NumPy arrays: to be refused by compiled code, they would wait for the device.
        if not arrays or type(arrays[0]) is not np.ndarray:
            return None
        answers: list[Answer] | None = self.run(
            arrays, num_parts, requests[0].outputs, mark, num_requests=len(requests), finish=JoinedAnswer.copied_answers
        )
        return answers

    def arrays_of(self, requests: Sequence[Request]) -> Arrays | None:
        """The arrays of these requests, as `run` takes them; None also where they ask for different outputs."""
        arrays: Arrays = []
        names = self._input_names
        for request in requests:
            outputs = request.outputs
            # NumPy compares arrays of names one by one, and an iterator could not be read again.
            if not isinstance(outputs, (NoneType, list, tuple)) or outputs != requests[0].outputs:
                return None
            try:
                num_inputs = len(request.inputs)
                if num_inputs != len(names) and not (
                    self._spec.ranking and gives_one_context(self._spec, request.inputs)
                ):
                    return None
                arrays.extend(map(request.inputs.__getitem__, names))
            except (KeyError, TypeError, AttributeError):  # an input is absent, or the inputs are not by name
                return None
        return arrays

    def run(
        self,
        arrays: Arrays,
        num_parts: int,
        outputs: Collection[str] | None,
        mark: Mark,
        *,
        num_requests: int,
        finish: Callable[[JoinedAnswer], Any],
    ) -> Any:
        """See InferenceSession.run_arrays.

        The arrays are in `num_parts` parts: one for each request, or for each context of the only request.
        """
        if num_parts > 1 and not self._joins_requests:
            return None
        replicas = self._replicas.all
        try:
            if len(replicas) == 1:
                return self.run_on(
                    replicas[0], arrays, num_parts, outputs, mark, num_requests=num_requests, finish=finish
                )
            # A lambda would move the arguments of every request into cells.
            task = partial(
                self.run_on,
                arrays=arrays,
                num_parts=num_parts,
                outputs=outputs,
                mark=mark,
                num_requests=num_requests,
            )
            joined = self._replicas.run(task)
            return None if joined is None else finish(joined)  # in the caller's thread, not the device's
        except HotrowError:
            return None

    def run_on(
        self,
        replica: Replica,
        arrays: Arrays,
        num_parts: int,
        outputs: Collection[str] | None,
        mark: Mark,
        *,
        num_requests: int,
        finish: Callable[[JoinedAnswer], Any] = JoinedAnswer.copied,
    ) -> Any:
        """As `run`, on one device; raises what the look-up and the network raise."""
        model = replica.staged
        if model is None:
            return None
        mark("look-up")
        staging: Staging = model.take()
        try:
            wanted = self._layout.outputs.wanted(outputs)
            with staging.held:
                batch = staging.fill(arrays, num_parts, wanted.computed)
                if batch is None:
                    return None
                batch.look_up()
                mark("network")
                results = batch.run.run()
                if batch.output_rows is not None:
                    results = [array[batch.output_rows] for array in results]
                if self._rejects_unknown and batch.lookup.num_unknown.any():
                    return None
                if self._recorder is not None:
                    self._recorder.record(batch.lookup)
                self._stats.count_staged(batch.lookup, num_requests, batch.num_samples)
                if self._ranks:
                    self._stats.count_contexts(batch.num_contexts, batch.num_samples, 0)
            mark("answer")
            last = batch.answer
            if last is None or last[0] is not results or last[1] is not wanted:
                joined = self._joined(batch, results, wanted)
            else:  # most batches of a case have their results in the same arrays: the answer is the same then
                joined = last[2]
            if num_requests != num_parts:
                joined = joined._replace(counts=np.array([batch.num_samples]))
            return finish(joined)
        finally:
            model.give_back(staging)

    def _joined(self, batch: StagedBatch, results: Sequence[NDArray[Any]], wanted: RequestedOutputs) -> JoinedAnswer:
        """The answer to a batch, kept in it where the next one's results will be in the same arrays."""
        joined = self._layout.outputs.joined(results, wanted, batch.counts, batch.num_samples)
        # Predictions of several labels are no result, but made of some: each batch has its own.
        is_results = {*map(id, joined.arrays)} <= {*map(id, results)}
        batch.answer = (results, wanted, joined) if is_results and results is batch.run.results else None
        return joined
