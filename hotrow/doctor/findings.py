"""What the checks of `hotrow doctor` find."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    level: Level
    """`problem`: models will not be served. `warning`: they will, but something will fail or be slow."""
    message: str
    fix: str = ""
