"""How the tests are distributed over processes (tests/conftest.py)."""

from __future__ import annotations

import pytest

from tests.testing import shared_servers


def test_processes_of_pytest_xdist_get_whole_groups(request: pytest.FixtureRequest) -> None:
    """It adds the group of a test to its name. Without groups, each process would start the servers of each file."""
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@tests/test_groups.py")


def test_a_shared_server_ends_with_the_last_test_that_shares_it() -> None:
    """Not with the process, which may have minutes of other tests left."""
    ended: list[str] = []
    shared_servers.expect_tests(["own", "own"])
    with shared_servers.until_last_test("own") as stack:
        stack.callback(ended.append, "own")
        shared_servers.count_test("own")
        assert ended == []
        shared_servers.count_test("own")
        assert ended == ["own"]
    assert ended == ["own"]
