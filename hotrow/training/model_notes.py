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
    """When it was saved; what was published since then may be of lost steps."""
    unconfirmed: dict[str, NDArray[np.int64]]
    """Keys of rows that were touched but not yet confirmed by the brokers then, by the folder of their table."""


_exporting = threading.local()
RESTORED: weakref.WeakKeyDictionary[Any, RestoredState] = weakref.WeakKeyDictionary()
"""By unwrapped model that was restored, until what was published since the saved state is taken back."""
PUBLISHERS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""By unwrapped model, the publisher of its rows."""


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
