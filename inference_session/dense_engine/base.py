"""The contract of a dense engine: the neural part of a model, run on arrays by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from inference_session.model_spec import NamedArrays


class ConcatOperands(NamedTuple):
    """Inputs of a network, float32 with `width` elements for each sample, that may become columns of one input."""

    vectors: Mapping[str, int | None]
    """Written by look-ups, in this order. None: keys are computed, so what the network declares is not certain."""
    given: Mapping[str, int]
    """Given by requests."""


class GivenColumns(NamedTuple):
    """An input of requests, float32 with `width` elements for each sample, that is some columns of a concat input."""

    name: str
    width: int


class ConcatInput(NamedTuple):
    """An input of the network, float32 [samples, width], that look-ups and requests fill together.

    The vectors of look-ups come first, then what requests give, then zeros.
    """

    name: str
    vectors: tuple[str, ...]
    """The inputs of the original network that the vectors would be."""
    first_given: int
    """The column behind the vectors."""
    given: tuple[GivenColumns, ...]
    width: int


class BoundRun(ABC):
    """A run of the network over fixed memory; it may be repeated with new values there."""

    inputs: NamedArrays
    """The memory of each input, where the host writes it; inputs that the device itself writes are not among them."""

    results: list[NDArray[Any]] | None = None
    """The list that the next run returns, with new values in the same arrays; None: each run returns another."""

    result_bytes = 0
    """Of the arrays in `results`."""

    @abstractmethod
    def run(self) -> list[np.ndarray[Any, Any]]:
        """The outputs that were bound, in their order; see DenseEngine.run. The next run may write over them."""


class PreparedRuns(Protocol):
    """What an engine keeps of its runs over inputs of certain shapes. Only the engine that made it looks into it."""

    def __len__(self) -> int:
        """How many runs it keeps something of."""


class DenseEngine(ABC):
    """A loaded network. Safe to run from several threads at once."""

    input_names: frozenset[str]
    """The inputs that `run` wants, exactly."""
    output_names: frozenset[str]
    """The outputs that it can compute."""
    narrow_inputs: frozenset[str] = frozenset()
    """Inputs that it takes in float16."""
    input_types: Mapping[str, str] = MappingProxyType({})
    """The types of inputs that it checks, as NumPy calls them."""
    concat_inputs: tuple[ConcatInput, ...] = ()
    """Inputs of which look-ups fill some columns only. `run` and `bind` fill the others, from the given inputs, which
    are among `input_names`.
    """
    replays = False
    """Whether batches of the sizes that it was warmed up with are replayed, in less time of the host than others."""

    def prepare(self) -> PreparedRuns | None:
        """Where `run` may keep what it has prepared for inputs whose shapes never change; None: it keeps nothing."""
        return None

    @abstractmethod
    def run(
        self, inputs: NamedArrays, outputs: Sequence[str], prepared: PreparedRuns | None = None
    ) -> list[np.ndarray[Any, Any]]:
        """The outputs of those names, in that order. Inputs are read in place, not copied.

        `prepared`: the result of `prepare` for inputs of these shapes; None: nothing is kept.

        Raises:
            InvalidRequestError: the network refused these values (a row number outside a small table that
                stayed in it, shapes that do not fit each other).
        """

    def may_bind(self, outputs: Sequence[str]) -> bool:  # noqa: ARG002
        """Whether `bind` is worth trying for these outputs: not before their shapes are known."""
        return False

    def bind(self, inputs: NamedArrays, outputs: Sequence[str]) -> BoundRun | None:  # noqa: ARG002
        """A run over the memory that these inputs, arrays [samples, …] by name, are in now, or are put in by this call.

        None: this engine, or this network, cannot do that.
        """
        return None

    def end_warm_up(self) -> None:  # noqa: B027  most engines have nothing to end
        """The session serves from now on: prepare nothing more at the cost of a request."""

    @abstractmethod
    def close(self) -> None:
        """Free the network; it must not be running. May be called twice."""
