"""The current GPU of a thread, kept while Python collects garbage.

Python collects garbage in the middle of any call of any thread. A destructor that it runs may make the GPU of its
object the thread's current one, and leave it so. The rest of a request to another GPU would then go to the wrong GPU,
past its stream.
"""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

from cupy_backends.cuda.api import driver

_before = threading.local()


def keep_during_collections() -> None:
    """Let no thread's CUDA context change by a collection of garbage, from now on. May be called often."""
    if _keep not in gc.callbacks:
        gc.callbacks.append(_keep)


def _stop() -> None:
    """In a forked process the driver answers nothing but errors, and Python would print one at each collection."""
    if _keep in gc.callbacks:
        gc.callbacks.remove(_keep)


os.register_at_fork(after_in_child=_stop)


def _keep(phase: str, info: dict[str, Any]) -> None:  # noqa: ARG001  the form of `gc.callbacks`
    if phase == "start":
        _before.context = driver.ctxGetCurrent()
    elif hasattr(_before, "context") and driver.ctxGetCurrent() != _before.context:
        driver.ctxSetCurrent(_before.context)
