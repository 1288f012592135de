"""The stages of a batch, for traces of when each began."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

Stage: TypeAlias = Literal["check", "look-up", "network", "answer"]
"""`check`: requests are read and looked at. `look-up`: keys are computed, and vectors fetched. `network`: the dense
network runs. `answer`: its outputs are split by request."""
OnStage: TypeAlias = Callable[[Stage], object]
"""Called with each stage as it begins. A batch that fails is computed again, request by request."""


ignore_stage: OnStage = id
"""Does nothing. It is a built-in function because each request calls it several times."""
