"""The dense engine of a model that has no network: its answer is the vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.dense_engine.base import DenseEngine, PreparedRuns
from inference_session.model_spec import NamedArrays


class VectorEngine(DenseEngine):
    """Every output is the input of that name."""

    def __init__(self, input_names: Sequence[str]) -> None:
        self.input_names = self.output_names = frozenset(input_names)

    def run(
        self,
        inputs: NamedArrays,
        outputs: Sequence[str],
        prepared: PreparedRuns | None = None,  # noqa: ARG002
    ) -> list[np.ndarray[Any, Any]]:
        return [_on_host(inputs[name]) for name in outputs]

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


def _on_host(array: Any) -> NDArray[Any]:
    """The array, or a copy of one that lies on a GPU."""
    return array if isinstance(array, np.ndarray) else array.get()
