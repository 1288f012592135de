"""How long-running work reports its progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[int], None]
"""Called with how much was done since the last call: bytes, rows or files, as the work says."""
