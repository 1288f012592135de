"""Errors that lead back to themselves, and so keep all that the frames hold which they passed."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from inference_session.errors import HotrowError


@contextlib.contextmanager
def no_error_is_kept() -> Iterator[None]:
    """AssertionError if one of hotrow's errors is garbage at the end, which only the garbage collector frees."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kept = [found for found in gc.garbage if isinstance(found, HotrowError)]
        assert [(type(error).__name__, str(error)) for error in kept] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
