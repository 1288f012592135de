"""Checks after all faults have healed: every row is its last write, in answers and in each store that has it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import UnavailableError
from inference_session.parameter_server.base import EmbeddingStore
from tests.campaign.contents import TABLES, Table
from tests.campaign.expectations import Content, Expectations, Writer, WrongAnswerError
from tests.campaign.rows import decode
from tests.campaign.stores import Stores
from tests.campaign.target import Target, rows_of
from tests.campaign.writers import RowWriter
from tests.testing.servers import PATIENCE_S, wait_until


def settle(expectations: Expectations, serving: Content, target: Target, stores: Stores, writer: RowWriter) -> None:
    """Wait until the target has recovered, then compare every row. No fault may be active.

    Raises:
        WrongAnswerError: a row is not what it should be.
    """
    wait_until(target.is_well, "all tiers to be well again")
    with writer.lock:
        if stores.is_redis_alone:
            _write_again(expectations, serving, writer)
        _write_doubtful(expectations, serving, writer)
        writer.flush()
        if expectations.writer is Writer.STREAM:
            await_none(lambda: differing(expectations, serving, target))
        wait_until(lambda: _is_refreshed(target), "the cache to be read again from all stores")
        expectations.lift("stream behind")
        expectations.lift("Redis alone")
        expectations.raise_to(serving.version, expectations.begun(serving.version))
        raise_any(differing(expectations, serving, target))
        # hotrow may not have noticed yet that a store came back older; the store's rows are not answered meanwhile.
        await_none(lambda: wrong_in_stores(expectations, serving, stores))
        wait_until(target.is_well, "all tiers to be well again")


def _is_refreshed(target: Target) -> bool:
    try:
        target.refresh()
    except UnavailableError:  # a store that came back older, as was just noticed
        return False
    return True


def await_none(find: Callable[[], list[str]]) -> None:
    """Wait until nothing is wrong; raise what is wrong after `PATIENCE_S`."""
    end = time.monotonic() + PATIENCE_S
    while (wrong := find()) and time.monotonic() < end:
        time.sleep(0.1)
    raise_any(wrong)


def raise_any(wrong: list[str]) -> None:
    """Raise the findings, if any."""
    if wrong:
        raise WrongAnswerError("when all was well again: asked: " + "\n".join(wrong[:5]))


def _write_again(expectations: Expectations, serving: Content, writer: RowWriter) -> None:
    """Rows that only Redis had, and lost, are gone until they are written again (use-stores.md)."""
    for table in TABLES:
        written = np.flatnonzero(expectations.history(serving.version, table).begun)
        if expectations.writer is Writer.STREAM:
            writer.write(serving, table, written, delete=False)
        else:
            expectations.doubt(serving.version, table, written)


def _write_doubtful(expectations: Expectations, serving: Content, writer: RowWriter) -> None:
    for table in TABLES:
        history = expectations.history(serving.version, table)
        if history.unsure.any():
            wait_until(lambda t=table, h=history: _is_written(serving, t, writer, h.unsure), "doubtful rows")  # type: ignore[misc]


def _is_written(serving: Content, table: Table, writer: RowWriter, unsure: NDArray[np.bool_]) -> bool:
    writer.write(serving, table, np.flatnonzero(unsure), delete=False)
    return not unsure.any()


def differing(expectations: Expectations, serving: Content, target: Target) -> list[str]:
    """Rows that are served wrongly while no write is under way, as texts; of those whose last
    write failed nothing is known.
    """
    rows = rows_of(target)
    return [text for table in TABLES for text in _compared(expectations, serving, table, rows[table.name])]


def _compared(
    expectations: Expectations, serving: Content, table: Table, vectors: NDArray[np.float32]
) -> Iterator[str]:
    whole, _, numbers = decode(table.number, np.arange(len(vectors)), vectors)
    unsure = expectations.history(serving.version, table).unsure
    for key, wanted in expectations.settled_rows(serving.version, table):
        found = int(numbers[key]) if whole[key] else None
        if unsure[key]:
            continue
        if found not in wanted or (found is None and not (vectors[key] == table.default).all()):
            yield f"{table.name}, position {key}\nfound: {vectors[key].tolist()} ({found})\nallowed: {wanted}"


def wrong_in_stores(expectations: Expectations, serving: Content, stores: Stores) -> list[str]:
    """Rows that the stores hold wrongly, as a new reader of them finds, as texts."""
    settings = stores.settings(serving.version)
    wrong: list[str] = []
    for name in ("volatile_store", "persistent_store"):
        if name in settings:
            with stores.open(settings[name], serving.version) as store:
                for table in TABLES:
                    wrong += _wrong_in(expectations, serving, store, table, may_lack=name == "volatile_store")
    return wrong


def _wrong_in(
    expectations: Expectations, serving: Content, store: EmbeddingStore, table: Table, *, may_lack: bool
) -> Iterator[str]:
    """Old rows in a store, rows of deleted keys, and rows that it lacks, unless it may lack some."""
    vectors = np.zeros((len(table.keys), table.spec.embedding_dim), np.float32)
    found = store.fetch(table.name, table.keys, vectors)
    whole, _, numbers = decode(table.number, np.arange(len(vectors)), vectors)
    history = expectations.history(serving.version, table)
    for key, newest in enumerate(history.begun.tolist()):
        is_missing = history.is_missing(key, newest)
        is_right = not is_missing and bool(whole[key]) and int(numbers[key]) == newest
        if not is_right if found[key] else not (is_missing or may_lack):
            yield (
                f"{store!r} for {table.name}, position {key}\n"
                f"found: {vectors[key].tolist() if found[key] else 'nothing'}\n"
                f"allowed: {'nothing' if is_missing else f'write {newest}'}"
            )
