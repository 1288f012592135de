"""The full path: any requests are checked one by one, grouped by shape, and answered a group at a time.

fast_path.py answers most requests in less time; those that it does not take come here. Both give the same answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from inference_session.errors import HotrowError
from inference_session.execution.model import Model
from inference_session.execution.network import Network, RunResult
from inference_session.execution.phases import OnPhase, ignore_phase
from inference_session.execution.replicas import Replica
from inference_session.model_spec import CANDIDATES
from inference_session.requests.batch import CheckedRequest, JoinedBatch, Request
from inference_session.requests.caller_arrays import inputs_with_gpu, may_stay_on_gpu
from inference_session.requests.grouped import GroupedRequests
from inference_session.requests.outputs import Answer
from inference_session.stats import SessionStats

if TYPE_CHECKING:
    from inference_session.execution.kept_contexts import KeptContexts
    from inference_session.sizing.key_recorder import KeyRecorder


class FullPath:
    """Answers the requests of one session, and counts them. Safe to use from several threads."""

    def __init__(self, model: Model, stats: SessionStats, recorder: KeyRecorder | None) -> None:
        """Answer on the model's devices; arguments as of FastPath."""
        self._model, self._stats, self._recorder = model, stats, recorder
        self.input_types = {tensor.name: np.dtype(tensor.dtype) for tensor in model.spec.inputs}
        """The type of each input that a request may have."""
        if model.spec.ranking is not None:
            self.input_types[CANDIDATES] = np.dtype(np.int32)

    def answer(self, requests: Sequence[Request], on_phase: OnPhase) -> list[Answer | HotrowError]:
        """See InferenceSession.run_many."""
        spec, layout = self._model.spec, self._model.layout
        return self._answer_groups(GroupedRequests(requests, layout, may_join=spec.joins_requests), on_phase)

    def answer_from_gpu(self, inputs: Mapping[str, ArrayLike], outputs: Sequence[str] | None) -> Answer | HotrowError:
        """The answer to a request of which some inputs are on a GPU; it is not joined with others."""
        take = self._model.replicas.all[0].device.given if self._reads_gpu_inputs else None
        try:
            arrays = inputs_with_gpu(inputs, self.input_types, take)
        except HotrowError:
            self._stats.count_requests(1, 1)
            raise
        requests = GroupedRequests([Request(arrays, outputs)], self._model.layout, may_join=False, on_gpu=True)
        return self._answer_groups(requests, ignore_phase)[0]

    def _answer_groups(self, requests: GroupedRequests, on_phase: OnPhase) -> list[Answer | HotrowError]:
        """Compute the groups one after the other, each on the device that has the least to do."""
        run = self._model.replicas.run
        for group in requests:
            try:
                requests.succeed(group, run(lambda replica: self.answer_group(replica, group.requests, on_phase)))  # noqa: B023
            except HotrowError as error:  # noqa: PERF203  no other group is affected
                requests.fail(group, error)
        self._stats.count_requests(len(requests.answers), requests.num_failed)
        return requests.answers

    def answer_group(self, replica: Replica, requests: Sequence[CheckedRequest], on_phase: OnPhase) -> list[Answer]:
        """The answers to requests of equal shapes, computed as one batch on a device.

        Raises what the look-up and the network raise.
        """
        on_phase("look-up")
        layout, kept = self._model.layout, self._model.kept_contexts
        batch = layout.join(requests)
        is_ranking, num_reused = requests[0].num_candidates is not None, 0
        network = replica.ranking if is_ranking else replica.network
        if kept is not None and is_ranking:
            num_reused = self._fill_in_contexts(kept, batch, requests)
            network = kept.candidates
        outputs = self._run(network, batch, layout.computed(requests), on_phase).outputs
        on_phase("answer")
        self._count(requests, num_reused)
        return layout.split(batch.in_order(outputs), requests)

    def _run(
        self, network: Network, batch: JoinedBatch, wanted: Sequence[str], on_phase: OnPhase = ignore_phase
    ) -> RunResult:
        """Look the keys of a batch up, and run a network over their vectors."""
        plan = network.plan(batch, wanted)
        with plan.held():
            lookup = plan.fill(batch)
            network.reader.look_up(lookup)
            if self._recorder is not None:
                self._recorder.record(lookup)
            on_phase("network")
            outputs = plan.run_network(batch)
            num_unknown = plan.num_unknown(lookup)
        if self._model.rejects_unknown:
            network.refuse_unknown(num_unknown)
        self._stats.count_keys(network.tables, lookup.num_keys, num_unknown)
        return RunResult(outputs, num_unknown)

    def _fill_in_contexts(self, kept: KeptContexts, batch: JoinedBatch, requests: Sequence[CheckedRequest]) -> int:
        """Add to the batch the kept, or computed, results of its contexts; returns how many were kept."""
        wanted = kept.find(requests)
        num_known = sum(key in wanted.found for key in wanted.keys)
        if wanted.missing:
            missing = kept.batch_of(wanted)
            kept.add(wanted, missing, self._run(kept.contexts, missing, kept.values))
        kept.fill(batch, wanted)
        return num_known

    def _count(self, requests: Sequence[CheckedRequest], num_reused: int) -> None:
        num_samples = sum(request.num_samples for request in requests)
        self._stats.count_batch(num_samples)
        if self._model.spec.ranking is not None:
            num_contexts = sum(request.num_contexts for request in requests)
            self._stats.count_contexts(num_contexts, num_samples, num_reused)

    @property
    def _reads_gpu_inputs(self) -> bool:
        """Whether inputs on the session's one GPU are read there: nothing on the host reads keys."""
        model = self._model
        if len(model.replicas.all) > 1:
            return False
        return (
            model.rows.readers[0].is_launched and self._recorder is None and may_stay_on_gpu(model.spec, model.layout)
        )
