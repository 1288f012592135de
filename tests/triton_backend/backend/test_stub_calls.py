"""What the stub calls gives the same answers in less time."""

from __future__ import annotations

import builtins
import ctypes

import pytest

from triton_backend.backend.stub_calls import shorten_calls


@pytest.fixture(autouse=True)
def shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests run without it."""
    monkeypatch.delitem(vars(builtins.__spec__), "_initializing", raising=False)
    shorten_calls()


def test_modules_are_imported_as_before() -> None:
    """By the function that the stub calls, which needs no attribute of `builtins` that is absent."""
    assert builtins.__spec__._initializing is False  # type: ignore[attr-defined]
    load = ctypes.pythonapi.PyImport_ImportModule
    load.restype = ctypes.py_object
    for name in ("builtins", "json", "inference_session.errors"):
        assert load(name.encode()).__name__ == name
