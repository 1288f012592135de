"""The contract of one tier of the parameter server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Store = TypeVar("Store", bound="EmbeddingStore")


class EmbeddingStore(ABC):
    """Named tables of vectors by int64 key. All methods may be called from any thread.

    A table that the store does not hold is a TableNotFoundError, a store that cannot do what it is asked a StoreError,
    one that has been closed a SessionClosedError.
    """

    @property
    @abstractmethod
    def tables(self) -> tuple[str, ...]:
        """Names of the tables held."""

    @property
    @abstractmethod
    def supports_writes(self) -> bool:
        """Whether `insert` and `erase` work."""

    @abstractmethod
    def embedding_dim(self, table: str) -> int:
        """Number of elements of the table's vectors."""

    @abstractmethod
    def num_rows(self, table: str) -> int:
        """Number of rows the table holds."""

    @abstractmethod
    def fetch(self, table: str, keys: NDArray[np.int64], out: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Write the vectors of keys, int64[n], to the rows of `out`, float32[n, embedding_dim]; returns found[n].

        Rows of keys that are not found stay as they are.
        """

    @abstractmethod
    def insert(self, table: str, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Add rows, replacing those whose keys are held; of equal keys in one call the last wins."""

    @abstractmethod
    def erase(self, table: str, keys: NDArray[np.int64]) -> None:
        """Drop the rows of these keys; keys that are not held are no error."""

    @abstractmethod
    def close(self) -> None:
        """Give up what the store holds open. May be called more than once."""

    def __enter__(self: Store) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
