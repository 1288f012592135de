"""Several requests: checked one by one, grouped where their shapes allow, and answered in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from inference_session.errors import HotrowError, InvalidRequestError, UnknownKeyError, without_frames
from inference_session.requests.batch import CheckedRequest, Request, RequestLayout
from inference_session.requests.caller_arrays import check_arguments
from inference_session.requests.outputs import Answer


class Group(NamedTuple):
    """Requests that are computed together."""

    positions: Sequence[int]
    requests: Sequence[CheckedRequest]


class GroupedRequests:
    """The groups of several requests, and their answers.

    An answer that cannot be given is an error in its place. A malformed request is in no group. Where a group fails,
    its requests are tried again one by one, so that only the request at fault gets the error.
    """

    def __init__(
        self, requests: Sequence[Request], layout: RequestLayout, *, may_join: bool, on_gpu: bool = False
    ) -> None:
        """Check the requests, and group those that may be computed together.

        Args:
            requests: in the order of `answers`.
            layout: of the model's requests.
            may_join: whether requests of equal shapes share a group.
            on_gpu: whether inputs are in a caller's memory on a GPU. Such batches have plans of their own, because
                other batches of their shapes are copied from the host.
        """
        self.answers: list[Answer | HotrowError] = [_UNANSWERED] * len(requests)
        self._layout = layout
        groups: dict[Hashable, tuple[list[int], list[CheckedRequest]]] = {}
        for i, request in enumerate(requests):
            try:
                checked = _checked(request, layout)
            except HotrowError as error:
                self.answers[i] = without_frames(error)
                continue
            if on_gpu:
                checked = checked._replace(shapes=("on GPU", checked.shapes))
            positions, members = groups.setdefault(checked.shapes if may_join else i, ([], []))
            positions.append(i)
            members.append(checked)
        self._waiting = deque(Group(*group) for group in groups.values())

    @property
    def num_failed(self) -> int:
        """Requests whose answer is an error."""
        return sum(isinstance(answer, HotrowError) for answer in self.answers)

    def __iter__(self) -> Iterator[Group]:
        """The groups to be computed; call `succeed` or `fail` with each. Those without samples are answered here."""
        while self._waiting:
            group = self._waiting.popleft()
            if not self._layout.batched or any(request.num_samples for request in group.requests):
                yield group
            else:
                outputs = self._layout.outputs
                self.succeed(group, [outputs.of_no_samples(request.outputs) for request in group.requests])

    def succeed(self, group: Group, answers: Sequence[Answer]) -> None:
        """Keep the answers of a group, which are in the order of its requests."""
        for position, answer in zip(group.positions, answers, strict=True):
            self.answers[position] = answer

    def fail(self, group: Group, error: HotrowError) -> None:
        """Note that a group failed: it is tried again in another form if there is one, else request by request."""
        if (whole := self._for_whole_network(group, error)) is not None:
            self._waiting.appendleft(whole)
        elif len(group.requests) == 1:
            self.answers[group.positions[0]] = without_frames(error)
        else:
            pairs = zip(group.positions, group.requests, strict=True)
            self._waiting.extendleft(reversed([Group([position], [request]) for position, request in pairs]))

    def _for_whole_network(self, group: Group, error: HotrowError) -> Group | None:
        """The group in the form that the whole network computes; None if there is no other form.

        A divided network refuses some shapes that the whole one computes, such as those of an empty history.
        """
        if isinstance(error, UnknownKeyError) or not isinstance(error, InvalidRequestError):
            return None
        requests = self._layout.repeated(group.requests)
        return None if requests is None else Group(group.positions, requests)


def _checked(request: Request, layout: RequestLayout) -> CheckedRequest:
    try:
        return layout.check(request)
    except (AttributeError, TypeError):  # a Python caller gave other values than arrays
        check_arguments(*request)
        for name, value in request.inputs.items():
            if not isinstance(value, np.ndarray):
                raise InvalidRequestError(
                    f"input {name!r} is of type {type(value).__name__}, expected an array of NumPy"
                ) from None
        raise


_UNANSWERED = HotrowError("the request has not been answered")
