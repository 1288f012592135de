"""What the parts of this package tell one another about a model in training."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Restored(NamedTuple):
    """A model's state that has been brought back."""

    moment: datetime
    """When it was saved."""
    unconfirmed: dict[str, NDArray[np.int64]]
    """Keys of rows that had been touched then, and that the brokers had not confirmed, by the folder of their table."""


_exporting = threading.local()
_restored: weakref.WeakKeyDictionary[Any, Restored] = weakref.WeakKeyDictionary()
_publishers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def is_exporting() -> bool:
    """Whether this thread runs a model in order to export it: what it reads then is not touched by training."""
    return getattr(_exporting, "active", False)


@contextmanager
def exporting() -> Iterator[None]:
    """Run a model in order to export it."""
    _exporting.active = True
    try:
        yield
    finally:
        _exporting.active = False


def note_restored(model: Any, restored: Restored) -> None:
    """A model has gone back to what it was at a moment: rows published since are not its own any more."""
    _restored[model] = restored


def take_restored(model: Any) -> Restored | None:
    """What was noted, once."""
    return _restored.pop(model, None)


def note_publisher(model: Any, publisher: Any) -> None:
    """A model's rows are published from now on."""
    _publishers[model] = publisher


def publisher_of(model: Any) -> Any:
    """What publishes a model's rows; None where nothing does."""
    return _publishers.get(model)
