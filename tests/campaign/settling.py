"""When all is well again: every row is its last write, in what is answered and in each store that has it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from inference_session.parameter_server.base import EmbeddingStore
from tests.campaign.contents import TABLES, Table
from tests.campaign.expectations import Content, Expectations, Writer, WrongAnswerError
from tests.campaign.rows import decode
from tests.campaign.stores import Stores
from tests.campaign.target import Target, rows_of
from tests.campaign.writers import RowWriter
from tests.testing.servers import wait_until


def settle(expectations: Expectations, serving: Content, target: Target, stores: Stores, writer: RowWriter) -> None:
    """Wait until all is well, then compare every row. No fault may be active.

    Raises:
        WrongAnswerError: a row is not what it should be.
    """
    wait_until(target.is_well, "all tiers to be well again")
    with writer.lock:
        _write_doubtful(expectations, serving, writer)
        writer.flush()
        if expectations.writer is Writer.STREAM:
            wait_until(lambda: not differing(expectations, serving, target), "all updates to be served")
        target.refresh()
        expectations.lift("stream behind")
        expectations.raise_to(serving.version, expectations.begun(serving.version))
        wrong = differing(expectations, serving, target)
        if wrong:
            raise WrongAnswerError("when all was well again: asked: " + "\n".join(wrong[:5]))
        _check_stores(expectations, serving, stores)


def _write_doubtful(expectations: Expectations, serving: Content, writer: RowWriter) -> None:
    for table in TABLES:
        history = expectations.history(serving.version, table)
        if history.unsure.any():
            wait_until(lambda t=table, h=history: _is_written(serving, t, writer, h.unsure), "doubtful rows")  # type: ignore[misc]


def _is_written(serving: Content, table: Table, writer: RowWriter, unsure: NDArray[np.bool_]) -> bool:
    writer.write(serving, table, np.flatnonzero(unsure), delete=False)
    return not unsure.any()


def differing(expectations: Expectations, serving: Content, target: Target) -> list[str]:
    """Rows that are served otherwise than they should be when no write is under way, as texts."""
    rows = rows_of(target)
    return [text for table in TABLES for text in _compared(expectations, serving, table, rows[table.name])]


def _compared(
    expectations: Expectations, serving: Content, table: Table, vectors: NDArray[np.float32]
) -> Iterator[str]:
    whole, _, numbers = decode(table.number, np.arange(len(vectors)), vectors)
    for key, wanted in expectations.settled_rows(serving.version, table):
        found = int(numbers[key]) if whole[key] else None
        if found not in wanted or (found is None and not (vectors[key] == table.default).all()):
            yield f"{table.name}, position {key}\nfound: {vectors[key].tolist()} ({found})\nallowed: {wanted}"


def _check_stores(expectations: Expectations, serving: Content, stores: Stores) -> None:
    settings = stores.settings(serving.version)
    for name in ("volatile_store", "persistent_store"):
        if name in settings:
            with stores.open(settings[name], serving.version) as store:
                for table in TABLES:
                    _check_store(expectations, serving, store, table, may_lack=name == "volatile_store")


def _check_store(
    expectations: Expectations, serving: Content, store: EmbeddingStore, table: Table, *, may_lack: bool
) -> None:
    """No old row in it, and none of a deleted key; all others, unless it may lack some."""
    vectors = np.zeros((len(table.keys), table.spec.embedding_dim), np.float32)
    found = store.fetch(table.name, table.keys, vectors)
    whole, _, numbers = decode(table.number, np.arange(len(vectors)), vectors)
    history = expectations.history(serving.version, table)
    for key, newest in enumerate(history.begun.tolist()):
        is_missing = history.is_missing(key, newest)
        is_right = not is_missing and bool(whole[key]) and int(numbers[key]) == newest
        if not is_right if found[key] else not (is_missing or may_lack):
            raise WrongAnswerError(
                f"asked: {store!r} for {table.name}, position {key}, when all was well again\n"
                f"found: {vectors[key].tolist() if found[key] else 'nothing'}\n"
                f"allowed: {'nothing' if is_missing else f'write {newest}'}"
            )
