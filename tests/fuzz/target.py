"""What a target of fuzzing is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from inference_session.errors import HotrowError


@dataclass(frozen=True)
class Target:
    """A reader of untrusted bytes."""

    prepare: Callable[[Path], list[Path]]
    """Writes valid files into an empty folder; returns those to be damaged, one at a time."""
    read: Callable[[Path], object]
    """Reads all files of the folder."""
    errors: tuple[type[Exception], ...] = (HotrowError,)
    """The errors that it may raise."""
