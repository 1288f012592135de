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
    """Requests that carry one array; those of three elements are malformed."""

    def check(self, request: Request) -> CheckedRequest:
        array = request.inputs["x"]
        if array.size == 3:
            raise InvalidRequestError("three")
        return CheckedRequest({"x": array}, ["y"], len(array), shapes=array.shape[1:])


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
            requests.answer(group, [{"y": request.inputs["x"]} for request in group.requests])
    alone = [[i] for i in range(num_requests)]
    assert tried == (alone if num_requests == 1 else [list(range(num_requests)), *alone])
    assert str(requests.answers[0]) == "bad"
    assert requests.num_failed == 1
    assert [len(answer["y"]) for answer in requests.answers[1:]] == [i + 4 for i in range(1, num_requests)]  # type: ignore[index]
