"""Folders and servers that the pages assume."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inference_session.errors import HotrowError
from tests.testing.broker import Broker
from tests.testing.servers import RedisServer
from triton_backend.launcher.installation import find_installation


@pytest.fixture(scope="session")
def tritonserver() -> None:
    """Skip where there is no tritonserver for this Python."""
    try:
        find_installation()
    except HotrowError as error:
        pytest.skip(str(error))


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
