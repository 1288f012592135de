"""Several requests: checked one by one, grouped where their shapes allow, and answered in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from inference_session.errors import HotrowError, InvalidRequestError
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

    def __init__(self, requests: Sequence[Request], layout: RequestLayout, *, may_join: bool) -> None:
        self.answers: list[Answer | HotrowError] = [_UNANSWERED] * len(requests)
        groups: dict[Hashable, tuple[list[int], list[CheckedRequest]]] = {}
        for i, request in enumerate(requests):
            try:
                checked = _checked(request, layout)
            except HotrowError as error:
                self.answers[i] = error
                continue
            positions, members = groups.setdefault(checked.shapes if may_join else i, ([], []))
            positions.append(i)
            members.append(checked)
        self._waiting = deque(Group(*group) for group in groups.values())

    @property
    def num_failed(self) -> int:
        """Requests whose answer is an error."""
        return sum(isinstance(answer, HotrowError) for answer in self.answers)

    def __iter__(self) -> Iterator[Group]:
        while self._waiting:
            yield self._waiting.popleft()

    def answer(self, group: Group, answers: Sequence[Answer]) -> None:
        """The answers of a group, in the order of its requests."""
        for position, answer in zip(group.positions, answers, strict=True):
            self.answers[position] = answer

    def fail(self, group: Group, error: HotrowError) -> None:
        """Note that a group failed; its requests may be answered one by one."""
        if len(group.requests) == 1:
            self.answers[group.positions[0]] = error
            return
        pairs = zip(group.positions, group.requests, strict=True)
        self._waiting.extendleft(reversed([Group([position], [request]) for position, request in pairs]))


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
