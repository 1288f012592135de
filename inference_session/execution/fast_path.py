"""The fast path: requests whose arrays match the model's inputs exactly are answered without Python per input or table.

Compiled code reads and checks the arrays: staging/host.py on the processor, staging/cuda.py on a GPU. It takes no
other requests. They go through `InferenceSession.run_many`, which also says what is wrong with a malformed one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import HotrowError
from inference_session.execution.model import Model
from inference_session.execution.phases import OnPhase, ignore_phase
from inference_session.execution.replicas import Replica
from inference_session.execution.staging.base import Arrays, StagedBatch, Staging
from inference_session.requests.batch import Request
from inference_session.requests.outputs import Answer, JoinedAnswer
from inference_session.requests.ranking_layout import gives_one_context, split_by_context
from inference_session.stats import SessionStats

if TYPE_CHECKING:
    from inference_session.sizing.key_recorder import KeyRecorder

_NAMES = (NoneType, list, tuple)
"""Types of the outputs that a request asks for. NumPy compares arrays of names one by one, and an iterator could not be
read again.
"""
_NOT_BY_NAME = (LookupError, TypeError, ValueError, AttributeError)
"""What reading inputs raises where one is absent, or they are not by name: arrays raise errors of many types."""


class FastPath:
    """Answers such requests of one session, and counts them. Safe to use from several threads.

    Its methods return None where a request has to go through `run_many`. Nothing has been counted then.
    """

    def __init__(self, model: Model, stats: SessionStats, recorder: KeyRecorder | None) -> None:
        """Answer on the model's devices.

        Args:
            model: what computes the answers.
            stats: where requests are counted.
            recorder: gets the keys that are looked up; None: nobody asked for them.
        """
        spec = model.spec
        self._spec, self._layout, self._replicas, self._stats = spec, model.layout, model.replicas, stats
        self._recorder, self._rejects_unknown = recorder, model.rejects_unknown  # `run_many` raises the error
        self._joins_requests, self._ranks = spec.joins_requests, spec.ranking is not None
        self._is_plain = not model.rejects_unknown and recorder is None and not self._ranks
        self._input_names = tuple(tensor.name for tensor in spec.inputs)
        replicas = model.replicas.all
        self._only_replica = replicas[0] if len(replicas) == 1 else None

    def answer_one(self, inputs: Mapping[str, Any], outputs: Sequence[str] | None) -> Answer | None:
        """As `answer`, for one request."""
        if self._ranks:  # inputs may be given once for several candidates
            answers = self.answer([Request(inputs, outputs)], ignore_phase)
            return answers[0] if answers else None
        try:
            arrays = list(map(inputs.__getitem__, self._input_names))
            is_by_name = len(inputs) == len(arrays) and isinstance(outputs, _NAMES)
        except _NOT_BY_NAME:
            return None
        # Arrays on a GPU are no NumPy arrays: to be refused by compiled code, they would wait for the device.
        if not is_by_name or not arrays or type(arrays[0]) is not np.ndarray:
            return None
        answer: Answer | None = self._run(arrays, 1, outputs, ignore_phase, JoinedAnswer.copied_answer)
        return answer

    def answer(self, requests: Sequence[Request], on_phase: OnPhase) -> list[Answer] | None:
        """The answers to requests that all ask for the same outputs."""
        arrays, num = self.arrays_of(requests), len(requests)
        if not arrays and num == 1 and self._spec.is_divided:
            return self._answer_by_context(requests[0], on_phase)
        if not arrays or type(arrays[0]) is not np.ndarray:  # see `answer_one`
            return None
        answers: list[Answer] | None = self._run(
            arrays, num, requests[0].outputs, on_phase, JoinedAnswer.copied_answers
        )
        return answers

    def _run(
        self,
        arrays: Arrays,
        num_requests: int,
        outputs: Collection[str] | None,
        on_phase: OnPhase,
        finish: Callable[[JoinedAnswer], Any],
    ) -> Any:
        """As `run`, also for arrays that have been pickled: these have dtype objects of their own, while compiled code
        knows a type by the object that NumPy keeps.
        """
        found = self.run(arrays, num_requests, outputs, on_phase, finish)
        if found is None:
            known = [_with_known_type(array) for array in arrays]
            if any(new is not old for new, old in zip(known, arrays, strict=True)):
                return self.run(known, num_requests, outputs, on_phase, finish)
        return found

    def _answer_by_context(self, request: Request, on_phase: OnPhase) -> list[Answer] | None:
        """The answer to a request of several contexts, as if each of them were a request."""
        arrays = split_by_context(self._spec, request.inputs, self._layout.max_elements)
        if not arrays or not isinstance(request.outputs, _NAMES):
            return None
        num_parts = len(arrays) // len(self._input_names)
        answer = self.run(arrays, num_parts, request.outputs, on_phase, JoinedAnswer.copied_answer, num_requests=1)
        return None if answer is None else [answer]

    def arrays_of(self, requests: Sequence[Request]) -> Arrays | None:
        """The arrays of these requests, as `run` takes them; None also where they ask for different outputs."""
        arrays: Arrays = []
        names = self._input_names
        for request in requests:
            outputs = request.outputs
            if not isinstance(outputs, _NAMES) or outputs != requests[0].outputs:
                return None
            try:
                num_inputs = len(request.inputs)
                if num_inputs != len(names) and not (
                    self._spec.ranking and gives_one_context(self._spec, request.inputs)
                ):
                    return None
                arrays.extend(map(request.inputs.__getitem__, names))
            except _NOT_BY_NAME:
                return None
        return arrays

    def run(
        self,
        arrays: Arrays,
        num_parts: int,
        outputs: Collection[str] | None = None,
        on_phase: OnPhase = ignore_phase,
        finish: Callable[[JoinedAnswer], Any] = JoinedAnswer.copied,
        *,
        num_requests: int = 0,
        replica: Replica | None = None,
    ) -> Any:
        """What `finish` makes of the answer to requests, whose arrays the next batch writes over; None: see the class.

        `arrays` has those of each part in the order of the model's inputs: a part is a request, or one context of the
        only request. `outputs`: what each request asks for; None: all. `on_phase`: see `run_many`. `num_requests`: 0:
        as many as parts. `replica`: the device; None: any.
        """
        replica = replica or self._only_replica
        if replica is None:
            run = partial(self.run, arrays, num_parts, outputs, on_phase, num_requests=num_requests)
            return self._run_on_any(finish, run)
        pool = replica.staging_pool
        if pool is None or (num_parts > 1 and not self._joins_requests):
            return None
        on_phase("look-up")
        try:
            staging = pool.free.pop()
        except IndexError:
            staging = pool.new()
        num_requests = num_requests or num_parts
        held, answer = staging.held, None
        try:
            if held is None:
                joined = self._computed(staging, arrays, num_parts, outputs, num_requests, on_phase=on_phase)
            else:
                with held:
                    joined = self._computed(staging, arrays, num_parts, outputs, num_requests, on_phase=on_phase)
            if joined is not None:
                on_phase("answer")
                answer = finish(joined)
        except HotrowError:
            pass
        pool.free.append(staging)  # not after Ctrl-C, or an error of another kind, which may leave it half changed
        return answer

    def _computed(
        self,
        staging: Staging,
        arrays: Arrays,
        num_parts: int,
        outputs: Collection[str] | None,
        num_requests: int,
        *,
        on_phase: OnPhase,
    ) -> JoinedAnswer | None:
        """The answer to a batch, which is counted, in the staging's memory."""
        batch = staging.fill(arrays, num_parts, outputs)
        if batch is None:
            return None
        batch.look_up()
        on_phase("network")
        results = batch.run.run()
        if batch.output_rows is not None:
            results = [array[batch.output_rows] for array in results]
        last = batch.answer
        # Most batches of a case have their results in the same arrays: the answer is the same then.
        joined = last[1] if last is not None and last[0] is results else self._joined(batch, results)
        if not (self._is_plain or self._may_answer(batch)):
            return None
        count = batch.count or self._counter(batch)
        count(num_requests)
        return joined

    def _may_answer(self, batch: StagedBatch) -> bool:
        """Whether a batch that has been computed may be answered; if so, records it, and counts its contexts."""
        if self._rejects_unknown and batch.lookup.num_unknown.any():
            return False
        if self._recorder is not None:
            self._recorder.record(batch.lookup)
        if self._ranks:
            self._stats.count_contexts(batch.num_contexts, batch.num_samples, 0)
        return True

    def _counter(self, batch: StagedBatch) -> Callable[[int], object]:
        """What counts a batch, kept in it where all look-ups of its case have the same places."""
        places = batch.lookup.places
        count = partial(self._stats.count_staged, batch.num_samples, *(places or batch.lookup.find_places()))
        batch.count = count if places else None
        return count

    def _run_on_any(self, finish: Callable[[JoinedAnswer], Any], run: Callable[..., JoinedAnswer | None]) -> Any:
        try:
            joined = self._replicas.run(lambda replica: run(replica=replica))
        except HotrowError:
            return None
        return None if joined is None else finish(joined)  # in the caller's thread, not the device's

    def _joined(self, batch: StagedBatch, results: Sequence[NDArray[Any]]) -> JoinedAnswer:
        """The answer to a batch, kept in it where the next one's results will be in the same arrays."""
        joined = self._layout.outputs.joined(results, batch.wanted, batch.counts, batch.num_samples)
        # Predictions of several labels are no result, but made of some: each batch has its own.
        is_results = {*map(id, joined.arrays)} <= {*map(id, results)}
        batch.answer = (results, joined) if is_results and results is batch.run.results else None
        return joined


def _with_known_type(array: Any) -> Any:
    """A view with the dtype object that NumPy keeps for its type; the array itself if it has that, or no numbers."""
    if type(array) is not np.ndarray or array.dtype.kind not in "biufc":
        return array
    known = np.dtype(array.dtype.type)
    return array if array.dtype is known or array.dtype != known else array.view(known)
