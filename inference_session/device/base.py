"""The contract of a device: where look-ups run and vectors lie, and the one place where the host waits for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import InvalidRequestError


class UsedMemory(NamedTuple):
    """How much of a device's memory a request has taken."""

    number: int
    """Of the memory: requests at the same time have others."""
    pinned: tuple[int, int]
    device: tuple[int, int]
    """See Arena.position."""


class Columns(ABC):
    """The last columns of a matrix on the device, which the host fills: some with values, those behind with zeros."""

    arrays: list[NDArray[np.float32]]
    """Where the host writes the values, [rows, columns] each, side by side."""
    upload: Callable[[], object] | None = None
    """Starts to copy `arrays`, and zeros, into the matrix; None: they are a part of it, and the zeros are there."""

    @abstractmethod
    def fill(self, arrays: Sequence[Any]) -> None:
        """Write these values into the matrix, float32 as `arrays`, on the host or on the device."""


class Device(ABC):
    """The memory of a processor or a GPU, and the order of what runs there.

    `empty`, `counts`, `stage` and `output` give memory that is a request's until `request` ends.
    """

    name: str
    """`cpu`, or `cuda:N`."""
    reads_by_column = False
    """Whether matrices of keys are staged column by column: the look-ups of one column read neighbours then."""

    @property
    def failure(self) -> str | None:
        """Why the device cannot be used any more; None: it can."""
        return None

    def opening(self) -> AbstractContextManager[object]:
        """A context for opening and warming up a session."""
        return nullcontext()

    @abstractmethod
    def request(self) -> AbstractContextManager[None]:
        """A context for one request, from its keys to its predictions; at its end, all launched work has ended.

        Raises:
            UnavailableError: the device has failed, or has too little memory for this request.
        """

    def held(self) -> AbstractContextManager[None]:
        """As `request`, for launches on preallocated memory: none is taken from the device."""
        return self.request()

    def used(self) -> UsedMemory | None:
        """How much memory the request has taken, for `skip`; None: the device does not use it again."""
        return None

    def skip(self, used: UsedMemory | None) -> None:  # noqa: B027  only devices that reuse memory have something to do
        """Leave alone the memory that another request has taken; call it before this one takes any."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
        """An array on the device, for look-ups to write to and the network to read."""

    @abstractmethod
    def columns(self, matrix: Any, first: int, widths: Sequence[int]) -> Columns:
        """The columns from `first` on of a matrix that `empty` made: this many for each array, then zeros."""

    @abstractmethod
    def column_copy(self, source: Any, matrix: Any, first: int) -> Callable[[], object]:
        """What copies one matrix that `empty` made into the columns of another, from `first` on; it may be repeated."""

    @abstractmethod
    def counts(self, num_counts: int) -> NDArray[np.int64]:
        """Zeros, int64 [num_counts], that a look-up may count in, and that the host reads after `wait`."""

    @abstractmethod
    def stage(self, array: NDArray[Any]) -> NDArray[Any]:
        """The array, of the same shape and contiguous, where a look-up can read it."""

    @abstractmethod
    def stage_keys(self, parts: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
        """Keys of any shapes as int64 [keys], where a look-up can read them; a single array may stay where it is."""

    def given(self, array: Any) -> Any:  # noqa: ARG002
        """An array that a caller has, contiguous on this GPU; what is launched from now on finds it filled.

        Raises:
            InvalidRequestError: it lies elsewhere.
        """
        raise InvalidRequestError(f"this session computes on {self.name}: it cannot read arrays on a GPU")

    @abstractmethod
    def output(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        """An array of that shape for look-ups to write to and the host to read after `wait`; `array`, or another."""

    @abstractmethod
    def wait(self) -> None:
        """Return when all that was launched has ended; UnavailableError where the device has failed."""
