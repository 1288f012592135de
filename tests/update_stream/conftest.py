"""A broker for all tests that leave it running, and small models of their own names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.testing import small_model
from tests.testing.broker import Broker


class SmallVersion(NamedTuple):
    """The small model in a version directory."""

    directory: Path
    tables: small_model.Arrays

    @property
    def model(self) -> str:
        """Its name."""
        return self.directory.parent.name

    def topic(self, table: str, prefix: str = "hps_et") -> str:
        """The topic of a table."""
        return f"{prefix}.{self.model}.{table}"


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    """One broker for all tests that leave it as it is."""
    with Broker() as broker:
        yield broker


@pytest.fixture
def small(tmp_path: Path, request: pytest.FixtureRequest) -> SmallVersion:
    """The small model under the test's own name, so that topics are its own as well."""
    directory = tmp_path / "repository" / request.node.name.replace("[", "_").replace("]", "") / "1"
    return SmallVersion(directory, small_model.write(directory))
