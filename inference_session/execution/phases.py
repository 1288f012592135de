"""The phases of a batch, for traces of when each began."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

Phase: TypeAlias = Literal["check", "look-up", "network", "answer"]
"""`check`: requests are read and looked at. `look-up`: keys are computed, and vectors fetched. `network`: the dense
network runs. `answer`: its outputs are split by request."""
OnPhase: TypeAlias = Callable[[Phase], object]
"""Called with each phase as it begins. A batch that fails is computed again, request by request."""


ignore_phase: OnPhase = id
"""Does nothing. It is a built-in function because each request calls it several times."""
