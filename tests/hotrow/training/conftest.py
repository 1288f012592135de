"""A broker for all tests that leave it running."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.testing.broker import Broker

# These import PyTorch as they are collected.
collect_ignore = [] if find_spec("torch") else ["hugectr"]


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    """One broker for all tests that leave it as it is."""
    with Broker() as broker:
        yield broker
