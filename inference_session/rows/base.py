"""The rows of a model, wherever they are: what look-ups, updates and swaps may ask of them."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import StoreError
from inference_session.kernels.records import SEGMENT
from inference_session.parameter_server.base import Rows
from inference_session.rows.hot_keys import HotKeys

_NOTHING_HELD = contextlib.nullcontext()


class RowSource(ABC):
    """The rows of all tables of a model. Thread-safe."""

    by_column = False
    """Whether matrices of keys should be staged column by column: each look-up reads neighbours then."""

    @abstractmethod
    def look_up(self, segments: NDArray[np.void], num_keys: NDArray[np.int64], num_unknown: NDArray[np.int64]) -> None:
        """Answer SEGMENT records of so many keys each; num_unknown[s] receives the keys of segment s that were answered
        with their table's default vector.

        Tables are counted in the order of the model's spec. Whoever filled the segments vouches for every address.
        """

    def request(self) -> contextlib.AbstractContextManager[None]:
        """What a request holds from its look-up to its predictions: a GPU, where the rows are on one."""
        return _NOTHING_HELD

    def empty(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """An array that `look_up` may write vectors to."""
        return np.empty(shape, np.float32)

    def stage(self, array: NDArray[Any]) -> NDArray[Any]:
        """The contiguous array where `look_up` can read it, until the request ends."""
        return array

    def counts(self, num_segments: int) -> NDArray[np.int64]:
        """Zeros that `look_up` may count in."""
        return np.zeros(num_segments, np.int64)

    def settled(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Counts of a look-up once it is done, for use after the request."""
        return counts

    def update(self, table: int, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:  # noqa: ARG002
        """Write rows, keys int64 [n] and vectors float32 [n, embedding_dim]; look-ups that begin later answer them.

        Raises:
            StoreError: there is no store that takes writes.
            UnavailableError: a store cannot take them at present.
        """
        raise StoreError(
            "rows in table files are never changed; set volatile_store or persistent_store, or update_stream"
        )

    def erase(self, table: int, keys: NDArray[np.int64]) -> None:  # noqa: ARG002
        """Drop rows, as `update` writes them: their keys are answered with the default vector, whatever is in files."""
        raise StoreError(
            "rows in table files are never erased; set volatile_store or persistent_store, or update_stream"
        )

    def forget(self, table: int, keys: NDArray[np.int64]) -> None:  # noqa: B027
        """Have look-ups that begin later read these rows anew, which another process has changed in the stores."""

    @property
    def is_durable(self) -> bool:
        """Whether what `update` has written outlives this process: whether `save_note` works."""
        return False

    def note(self, table: int) -> str | None:  # noqa: ARG002
        """The text kept beside the table's rows where they are durable; None: there is none."""
        return None

    def save_note(self, table: int, text: str) -> None:
        """Keep a text beside the table's rows, once what has been written before it is durable; errors of `update`."""
        raise StoreError(f"a note on table {table} cannot be kept: no persistent store takes writes ({text!r})")

    def refresh(self) -> None:  # noqa: B027
        """Read again what is cached, where anything is."""

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Hold back all changes that this process makes to rows; look-ups go on."""
        yield

    @abstractmethod
    def scan(self, table: int) -> Iterator[Rows]:
        """All rows of a table in batches, as look-ups answer them; a row may come more than once.

        Raises:
            UnavailableError: a store is down.
        """

    def hot_keys(self) -> HotKeys:
        """Which cached rows are hot; nothing where nothing is cached."""
        return {}

    def warm_up(self, hot_keys: HotKeys, deadline: float) -> None:  # noqa: B027
        """Have rows at hand before a request wants them: these where there is a cache. Ends at `deadline`, a value of
        time.monotonic(), at the latest.
        """

    def forget_lookups(self) -> None:  # noqa: B027
        """Count look-ups of the cache from 0 again."""

    def stats(self) -> dict[str, Any]:
        """What there is to say of the cache (`cache`) and the tiers (`tiers`)."""
        return {"cache": {}, "tiers": {}}

    @abstractmethod
    def close(self) -> None:
        """Give up what is held open. May be called more than once."""

    def fetch(self, table: int, keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        """The vectors of one table: keys int64 [n] to `out`, float32 [n, embedding_dim], both contiguous."""
        segment = np.zeros(1, SEGMENT)
        segment["table"], segment["keys_address"] = table, keys.ctypes.data
        segment["key_bytes"] = segment["key_stride"] = segment["row_stride"] = 8
        segment["num_rows"], segment["keys_per_row"] = len(keys), 1
        segment["output_address"], segment["output_stride"] = out.ctypes.data, out.strides[0]
        self.look_up(segment, np.array([len(keys)]), self.counts(1))
