"""A broker for all tests that leave it running."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.testing.broker import Broker


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    """One broker for all tests that leave it as it is."""
    with Broker() as broker:
        yield broker
