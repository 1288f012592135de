"""Progress of long work on a terminal. Where stderr is none, nothing is shown, and rich is not loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

Advance = Callable[[int], None]
"""To be called with the amount done since the last call."""


def byte_progress(title: str, total_bytes: int | None = None) -> AbstractContextManager[Advance]:
    """A bar; yields the function to call with the bytes done since the last call."""
    return _shown("bytes_bar", title, total_bytes)


def row_progress(title: str, total_rows: int) -> AbstractContextManager[Advance]:
    """A bar; yields the function to call with the rows done since the last call."""
    return _shown("rows_bar", title, total_rows)


def key_progress(title: str, total_keys: int | None = None) -> AbstractContextManager[Advance]:
    """A bar; yields the function to call with the keys done since the last call."""
    return _shown("keys_bar", title, total_keys)


def waiting(title: str) -> AbstractContextManager[Any]:
    """An activity indicator, with the elapsed time."""
    return _shown("activity", title)


def _shown(kind: str, *arguments: Any) -> AbstractContextManager[Any]:
    """What progress_bars.py has under this name."""
    if not sys.stderr.isatty():
        return nullcontext(_ignore)
    bar: AbstractContextManager[Any] = getattr(import_module("hotrow.progress_bars"), kind)(*arguments)
    return bar


def _ignore(amount: int) -> None:
    """Shows nothing."""
