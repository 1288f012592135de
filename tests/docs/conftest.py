"""Folders and servers that the pages assume."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.testing.broker import Broker
from tests.testing.servers import RedisServer


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """An empty Redis."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def broker() -> Iterator[Broker]:
    """An empty broker."""
    with Broker() as broker:
        yield broker
