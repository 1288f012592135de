"""What a target of fuzzing is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from inference_session.errors import HotrowError


@dataclass(frozen=True)
class Target:
    """A reader of foreign bytes."""

    prepare: Callable[[Path], list[Path]]
    """Writes sound files into an empty folder; returns those to be damaged, one at a time."""
    read: Callable[[Path], object]
    """Reads what is in the folder, all of it."""
    errors: tuple[type[Exception], ...] = (HotrowError,)
    """What may come out."""
