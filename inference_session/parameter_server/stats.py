"""What a parameter server counts; docs/reference/statistics.md defines each number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TierStats:
    """State and counts of one tier."""

    failure: str | None
    """Why it is left out at the moment; None: it is in use."""
    hits: int
    misses: int
    skipped: int
    failures: int
    outages: int
    promoted: int
    touched: int
    malformed: int


@dataclass(frozen=True)
class ServerStats:
    """Counts since the server was made."""

    degraded_keys: int
    """Keys not found while a tier was out."""
    dropped_promotions: int
    tiers: Mapping[str, TierStats]
    """By name."""
