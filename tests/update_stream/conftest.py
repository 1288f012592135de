"""A broker for all tests that leave it running, and small models with unique names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testing import small_model
from tests.testing.broker import Broker
from tests.testing.small_version import SmallVersion


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    """One broker for all tests that leave it unchanged."""
    with Broker() as broker:
        yield broker


@pytest.fixture
def small(tmp_path: Path, request: pytest.FixtureRequest) -> SmallVersion:
    """The small model under the test's own name, so that topics are its own as well."""
    directory = tmp_path / "repository" / request.node.name.replace("[", "_").replace("]", "") / "1"
    return SmallVersion(directory, small_model.write(directory))
