"""Stores that wrap a store: they add what a call needs around it, so that no store has switches for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from inference_session.parameter_server.base import EmbeddingStore, FetchRequest
from inference_session.tables.base import RowBatch
from inference_session.tables.ordered_updates import OrderedUpdates, Outcome

Result = TypeVar("Result")


class WrapperStore(EmbeddingStore):
    """Forwards every call to another store, through `around`, which is what subclasses change."""

    def __init__(self, store: EmbeddingStore) -> None:
        self.store = store

    def around(self, verb: str, call: Callable[[], Result]) -> Result:
        """Make a call; `verb` is the method's name."""
        return call()

    @property
    def tables(self) -> tuple[str, ...]:
        return self.store.tables

    @property
    def keeps_rows(self) -> bool:
        return self.store.keeps_rows

    @property
    def lags(self) -> bool:
        return self.store.lags

    @property
    def is_shared(self) -> bool:
        return self.lags or self.store.is_shared

    @property
    def num_malformed(self) -> int:
        return self.store.num_malformed

    def embedding_dim(self, table: str) -> int:
        return self.store.embedding_dim(table)

    def num_rows(self, table: str) -> int:
        return self.around("num_rows", lambda: self.store.num_rows(table))

    def fetch(self, table: str, keys: NDArray[np.int64], out: NDArray[np.float32]) -> NDArray[np.bool_]:
        return self.around("fetch", lambda: self.store.fetch(table, keys, out))

    def fetch_many(self, requests: Sequence[FetchRequest]) -> list[NDArray[np.bool_]]:
        return self.around("fetch_many", lambda: self.store.fetch_many(requests))

    def scan(self, table: str) -> Iterator[RowBatch]:
        """See EmbeddingStore. Only its beginning is a call; batches come as they are."""
        return self.around("scan", lambda: self.store.scan(table))

    def prepare_write(self) -> None:
        self.store.prepare_write()

    def insert(self, table: str, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        self.around("insert", lambda: self.store.insert(table, keys, vectors))

    def insert_absent(self, table: str, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        self.around("insert_absent", lambda: self.store.insert_absent(table, keys, vectors))

    def erase(self, table: str, keys: NDArray[np.int64]) -> None:
        self.around("erase", lambda: self.store.erase(table, keys))

    @property
    def orders_updates(self) -> bool:
        return self.store.orders_updates

    def apply(self, table: str, updates: OrderedUpdates) -> Outcome:
        return self.around("apply", lambda: self.store.apply(table, updates))

    def forget_applied(self, table: str) -> None:
        self.around("forget_applied", lambda: self.store.forget_applied(table))

    def clear(self, table: str) -> None:
        self.around("clear", lambda: self.store.clear(table))

    def touch(self, table: str, keys: NDArray[np.int64]) -> None:
        self.around("touch", lambda: self.store.touch(table, keys))

    def check(self) -> None:
        self.around("check", self.store.check)

    def incarnation(self) -> str:
        return self.around("incarnation", self.store.incarnation)

    def trust(self, incarnation: str) -> None:
        self.store.trust(incarnation)

    def refresh(self) -> None:
        self.around("refresh", self.store.refresh)

    def note(self, table: str) -> str | None:
        return self.around("note", lambda: self.store.note(table))

    def set_note(self, table: str, text: str) -> None:
        self.around("set_note", lambda: self.store.set_note(table, text))

    def versions(self) -> set[str]:
        return self.around("versions", self.store.versions)

    def remove_versions(self, versions: Collection[str]) -> int:
        return self.around("remove_versions", lambda: self.store.remove_versions(versions))

    def close(self) -> None:
        """Close the store inside."""
        self.store.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.store!r}>"


class FaultStore(WrapperStore):
    """Calls fail when a test demands it."""

    def __init__(self, store: EmbeddingStore, fault: Callable[[str], Exception | None]) -> None:
        """`fault` gets the verb before each call, and returns an exception to raise in its place, or None."""
        super().__init__(store)
        self.fault = fault

    def around(self, verb: str, call: Callable[[], Result]) -> Result:
        """Raise, or call."""
        error = self.fault(verb)
        if error is not None:
            raise error
        return call()


class HookedStore(WrapperStore):
    """Calls a hook once, between a call of a verb and its return."""

    def __init__(self, store: EmbeddingStore) -> None:
        super().__init__(store)
        self.hooks: dict[str, Callable[[], object]] = {}
        """By verb."""

    def around(self, verb: str, call: Callable[[], Result]) -> Result:
        """Call the store, then the hook."""
        result = call()
        self.hooks.pop(verb, lambda: None)()
        return result
