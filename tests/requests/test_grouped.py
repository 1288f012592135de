"""Requests in groups: which are computed together, and which answer or error each gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from inference_session.errors import HotrowError, InvalidRequestError
from inference_session.requests.batch import CheckedRequest, Request
from inference_session.requests.grouped import GroupedRequests


class Layout:
    """Requests that carry one array; those of three elements are malformed, and those of context can be repeated."""

    batched = True

    @property
    def outputs(self) -> Layout:
        return self

    def of_no_samples(self, wanted: Sequence[str]) -> dict[str, Any]:
        return {name: np.empty(0) for name in wanted}

    def repeated(self, requests: Sequence[CheckedRequest]) -> list[CheckedRequest] | None:
        if any(request.num_candidates is None for request in requests):
            return None
        return [request._replace(num_candidates=None) for request in requests]

    def check(self, request: Request) -> CheckedRequest:
        array = request.inputs["x"]
        if array.size == 3:
            raise InvalidRequestError("three")
        counts = np.ones(1, np.int64) if "context" in request.inputs else None
        return CheckedRequest({"x": array}, ["y"], len(array), array.shape[1:], counts)


def grouped(shapes: Sequence[tuple[int, ...]], *, may_join: bool = True) -> GroupedRequests:
    requests = [Request({"x": np.zeros(shape)}) for shape in shapes]
    layout: Any = Layout()
    return GroupedRequests(requests, layout, may_join=may_join)


def test_requests_of_one_shape_are_one_group() -> None:
    """In their order; a malformed one is in none, and has its error."""
    requests = grouped([(1, 2), (2, 1), (5, 2), (3, 1), (2, 2)])
    found = [list(group.positions) for group in requests]
    assert found == [[0, 2, 4], [1]]
    assert isinstance(requests.answers[3], InvalidRequestError)


def test_requests_that_must_not_be_joined_come_alone() -> None:
    """Whatever their shapes are."""
    assert [list(group.positions) for group in grouped([(1,), (1,)], may_join=False)] == [[0], [1]]


@pytest.mark.parametrize("num_requests", [1, 4])
def test_where_a_group_fails_each_is_computed_alone(num_requests: int) -> None:
    """So that only the request at fault gets the error."""
    requests, tried = grouped([(i + 4, 1) for i in range(num_requests)]), []
    for group in requests:
        tried.append(list(group.positions))
        if 0 in group.positions:
            requests.fail(group, HotrowError("bad"))
        else:
            requests.succeed(group, [{"y": request.inputs["x"]} for request in group.requests])
    alone = [[i] for i in range(num_requests)]
    assert tried == (alone if num_requests == 1 else [list(range(num_requests)), *alone])
    assert str(requests.answers[0]) == "bad"
    assert requests.num_failed == 1
    assert [len(answer["y"]) for answer in requests.answers[1:]] == [i + 4 for i in range(1, num_requests)]  # type: ignore[index]


def test_requests_without_samples_are_answered_at_once() -> None:
    """Where none of a group has any; one that has may be computed with them."""
    requests = grouped([(0, 1), (0, 2), (0, 1), (4, 2)])
    assert [list(group.positions) for group in requests] == [[1, 3]]
    assert [len(requests.answers[i]["y"]) for i in (0, 2)] == [0, 0]  # type: ignore[index]


@pytest.mark.parametrize(("error", "forms"), [(InvalidRequestError("shape"), 2), (HotrowError("store"), 1)])
def test_what_a_divided_network_refuses_is_tried_with_the_context_repeated(error: HotrowError, forms: int) -> None:
    """Only where the error is about the request; other errors are its answer."""
    layout: Any = Layout()
    inputs = {"x": np.zeros((1, 1)), "context": np.zeros(1)}
    requests = GroupedRequests([Request(inputs)], layout, may_join=True)
    tried = []
    for group in requests:
        tried.append(group.requests[0].num_candidates is None)
        requests.fail(group, error)
    assert tried == [False, True][:forms]
    assert requests.answers == [error]
