"""Notes about models in training that the parts of this package share."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class RestoredState(NamedTuple):
    """A model's state that has been brought back."""

    moment: datetime
    """When it was saved."""
    unconfirmed: dict[str, NDArray[np.int64]]
    """Keys of rows that were touched but not yet confirmed by the brokers then, by the folder of their table."""


_exporting = threading.local()
_restored: weakref.WeakKeyDictionary[Any, RestoredState] = weakref.WeakKeyDictionary()
_publishers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def is_exporting() -> bool:
    """Whether this thread runs a model in order to export it: rows read by such a run do not count as touched."""
    return getattr(_exporting, "active", False)


@contextmanager
def exporting() -> Iterator[None]:
    """Run a model in order to export it."""
    _exporting.active = True
    try:
        yield
    finally:
        _exporting.active = False


def note_restored(model: Any, restored: RestoredState) -> None:
    """Note that a model was restored to an earlier state: rows published since then are no longer its rows."""
    _restored[model] = restored


def take_restored(model: Any) -> RestoredState | None:
    """The note of `note_restored`, which is then forgotten."""
    return _restored.pop(model, None)


def note_publisher(model: Any, publisher: Any) -> None:
    """Note that a model's rows are published from now on."""
    _publishers[model] = publisher


def publisher_of(model: Any) -> Any:
    """The publisher of a model's rows; None if it has none."""
    return _publishers.get(model)
