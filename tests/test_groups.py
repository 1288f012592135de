"""How the tests are distributed over processes (tests/conftest.py)."""

from __future__ import annotations

import pytest


def test_processes_of_pytest_xdist_get_whole_groups(request: pytest.FixtureRequest) -> None:
    """It adds the group of a test to its name. Without groups, each process would start the servers of each file."""
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@tests/test_groups.py")
