"""The contract of a dense engine: the neural part of a model, run on arrays by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class DenseEngine(ABC):
    """A loaded network. Safe to run from several threads at once."""

    input_names: frozenset[str]
    """The inputs that `run` wants, exactly."""

    @abstractmethod
    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> list[np.ndarray[Any, Any]]:
        """The outputs of those names, in that order. Inputs are read in place, not copied.

        Raises:
            InvalidRequestError: the network refused these values (a row number outside a small table that
                stayed in it, shapes that do not fit each other).
        """

    def end_warm_up(self) -> None:  # noqa: B027  most engines have nothing to end
        """The session serves from now on: prepare nothing more at the cost of a request."""

    @abstractmethod
    def close(self) -> None:
        """Free the network; it must not be running. May be called twice."""
