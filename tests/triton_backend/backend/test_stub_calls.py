"""What the stub calls gives the same answers in less time."""

from __future__ import annotations

import asyncio
import builtins
import ctypes
from collections.abc import Coroutine
from typing import Any

import pytest

from triton_backend.backend.stub_calls import shorten_calls


class ListOfSteps(list[int], Coroutine[Any, Any, Any]):
    """A list that is a coroutine, too."""

    def send(self, value: object) -> Any:
        return value

    def throw(self, *error: Any) -> Any:
        raise error[0]

    def close(self) -> None:
        self.clear()

    def __await__(self) -> Any:
        return iter(self)


async def steps() -> None:
    """A function that makes coroutines."""


@pytest.fixture(autouse=True)
def shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests run without it."""
    monkeypatch.setattr(asyncio, "iscoroutine", asyncio.iscoroutine)
    monkeypatch.delitem(vars(builtins.__spec__), "_initializing", raising=False)
    shorten_calls()


def test_coroutines_are_told_from_others() -> None:
    """Lists are none, which is what `execute` returns."""
    coroutine = steps()
    given = [[], [1], None, (), 5, steps, coroutine, ListOfSteps()]
    assert [value for value in given if asyncio.iscoroutine(value)] == [coroutine, ListOfSteps()]
    coroutine.close()
    assert asyncio.run(asyncio.wait_for(steps(), 60)) is None


def test_modules_are_imported_as_before() -> None:
    """By the function that the stub calls, which needs no attribute of `builtins` that is absent."""
    assert builtins.__spec__._initializing is False  # type: ignore[attr-defined]
    load = ctypes.pythonapi.PyImport_ImportModule
    load.restype = ctypes.py_object
    for name in ("builtins", "json", "inference_session.errors"):
        assert load(name.encode()).__name__ == name
