"""The stages of a batch, for callers that want to know when each began."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

Stage: TypeAlias = Literal["check", "look-up", "network", "answer"]
"""`check`: requests are read and looked at. `look-up`: keys are computed, and vectors fetched. `network`: the dense
network runs. `answer`: its outputs are split by request."""
Mark: TypeAlias = Callable[[Stage], object]
"""Told each stage as it begins. A batch that fails is computed again request by request, and marked again."""


unmarked: Mark = id
"""Does nothing: no caller wants to know. A built-in function, because requests call it several times."""
