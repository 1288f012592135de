"""A broker for all tests that leave it running, and the devices that models train on."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.testing.broker import Broker

# These import PyTorch as they are collected.
collect_ignore = [] if find_spec("torch") else ["hugectr"]


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    """One broker for all tests that do not stop it."""
    with Broker() as broker:
        yield broker


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the model of a test trains."""
    import torch

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    return str(request.param)
