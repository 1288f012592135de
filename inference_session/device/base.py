"""The contract of a device: where look-ups run and vectors lie, and the one place where the host waits for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
        """What is held while a session is made and warmed up."""
        return nullcontext()

    @abstractmethod
    def request(self) -> AbstractContextManager[None]:
        """What a request holds from its keys to its predictions; on leaving, all that it launched has ended.

        Raises:
            UnavailableError: the device has failed, or has too little memory for this request.
        """

    def held(self) -> AbstractContextManager[None]:
        """As `request`, for launches on memory that is known: none is taken from the device."""
        return self.request()

    @abstractmethod
    def empty(self, shape: tuple[int, ...]) -> Any:
        """A float32 array on the device, for look-ups to write to and the network to read."""

    @abstractmethod
    def counts(self, num_counts: int) -> NDArray[np.int64]:
        """Zeros that a look-up may count in, and that the host reads after `wait`."""

    @abstractmethod
    def stage(self, array: NDArray[Any]) -> NDArray[Any]:
        """The contiguous array where a look-up can read it."""

    @abstractmethod
    def output(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        """An array of that shape for look-ups to write to and the host to read after `wait`; `array`, or another."""

    @abstractmethod
    def wait(self) -> None:
        """Return when all that was launched has ended; UnavailableError where the device has failed."""
