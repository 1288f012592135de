"""WriteLog: at least all rows that were written since a moment. KeysByTable: each key added is taken once."""

from __future__ import annotations

import threading
import tracemalloc
from contextlib import ExitStack

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inference_session.parameter_server.write_log import KeysByTable, WriteLog
from tests.testing.interrupts import interrupted

TABLES = st.sampled_from(["user", "item"])
KEYS = st.lists(st.integers(-5, 5) | st.integers(-(2**63), 2**63 - 1), max_size=6).map(
    lambda keys: np.array(keys, np.int64)
)
WRITES = st.lists(st.tuples(TABLES, KEYS) | st.none(), max_size=8)
"""None: any rows."""


@given(writes=WRITES, table=TABLES, asked=KEYS, since=st.integers(0, 8))
def test_the_rows_of_later_writes_are_written(
    writes: list[tuple[str, np.ndarray] | None], table: str, asked: np.ndarray, since: int
) -> None:
    """All rows of the writes after the moment; others only where they share a place with one of these."""
    log, since = WriteLog(), min(since, len(writes))
    for number, write in enumerate(writes):
        assert log.moment == number
        if write is None:
            log.add_all()
        else:
            log.add(*write)

    written = log.written(table, asked, since)

    later = writes[since:]
    slots = {slot for write in later if write is not None for slot in log.slots(*write).tolist()}
    expected = [None in later or slot in slots for slot in log.slots(table, asked).tolist()]
    assert written.tolist() == expected
    keys = {key for write in later if write is not None and write[0] == table for key in write[1].tolist()}
    assert all(is_written for key, is_written in zip(asked.tolist(), written, strict=True) if key in keys)
    assert log.any_written(log.slots(table, asked), since) == any(expected)


def test_few_rows_share_a_place() -> None:
    """After a thousand rows are written, nearly none of a thousand others count as written."""
    log = WriteLog()
    log.add("user", np.arange(1000))
    assert log.written("user", np.arange(1000), 0).all()
    assert log.written("user", np.arange(1000, 2000), 0).sum() < 50
    assert log.written("item", np.arange(1000), 0).sum() < 50


def test_any_number_of_writes_takes_the_same_memory() -> None:
    """Also of those without keys, which an update stream or a client may send as often as it likes."""
    log = WriteLog()
    tracemalloc.start()
    try:
        for keys in (np.empty(0, np.int64), np.arange(3)):
            log.add("user", keys)
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(2000):
                log.add("user", keys)
            assert tracemalloc.get_traced_memory()[0] - before < 2000
    finally:
        tracemalloc.stop()
    assert log.moment == 4002


def test_writers_at_the_same_time_are_all_counted() -> None:
    """The same keys from several threads: the last moment of each place is that of a write, and none is lost."""
    log, keys = WriteLog(), np.arange(64)

    def write() -> None:
        for _ in range(500):
            log.add("user", keys)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.moment == 2000
    assert log.written("user", keys, 1999).all()
    assert not log.written("user", keys, 2000).any()


def test_an_interrupted_write_has_ended() -> None:
    """Else the rows of later writes would count as outdated ever after, and no cache would get them."""
    log = WriteLog()
    for _ in interrupted(lambda _: log.add("user", np.arange(4))):
        pass
    for _ in interrupted(lambda _: log.add_all()):
        pass

    assert log.moment == log.num_begun > 0


@given(steps=st.lists(st.integers(0, 4), max_size=24))
def test_rows_count_as_written_from_the_beginning_of_a_write_to_its_end(steps: list[int]) -> None:
    """Writes that overlap: each key has its own, which begins, and ends, in turns; 4 asks."""
    log, keys = WriteLog(), np.arange(4)
    under_way: dict[int, ExitStack] = {}
    asked: list[tuple[int, set[int]]] = []
    """Moments, and the keys whose writes had not ended, or began later."""
    for step in steps:
        if step == 4:
            asked.append((log.moment, set(under_way)))
        elif step in under_way:
            under_way.pop(step).close()
        else:
            under_way[step] = ExitStack()
            under_way[step].enter_context(log.writing("user", keys[[step]]))
            for _, changing in asked:
                changing.add(step)
        for moment, changing in asked:
            written = set(np.flatnonzero(log.written("user", keys, moment)).tolist())
            assert changing <= written
            assert log.any_since(moment) == bool(written)


@given(adds=st.lists(st.tuples(TABLES, st.none() | KEYS), max_size=12), max_keys=st.integers(1, 5))
def test_what_is_added_is_taken_in_pieces(adds: list[tuple[str, np.ndarray | None]], max_keys: int) -> None:
    """In pieces of the size asked for; a table of which all keys were added comes as a whole."""
    unwritten = KeysByTable(1_000_000)
    for table, keys in adds:
        unwritten.add(table, keys)
    whole = {table for table, keys in adds if keys is None}
    expected = [(t, key) for t, keys in adds if t not in whole and keys is not None for key in keys.tolist()]

    taken: list[tuple[str, int]] = []
    while unwritten:
        table, keys = unwritten.take(max_keys)
        if keys is None:
            whole.remove(table)
        else:
            assert 0 < len(keys) <= max_keys
            taken += [(table, key) for key in keys.tolist()]

    assert sorted(taken) == sorted(expected)
    assert not whole


def test_too_many_keys_become_all_keys() -> None:
    """Different keys: the same keys, added again and again, stay single keys."""
    unwritten = KeysByTable(20)
    for _ in range(50):
        unwritten.add("same", np.arange(5))
        unwritten.add("other", np.arange(3))
    for begin in range(0, 50, 5):
        unwritten.add("many", np.arange(begin, begin + 5))

    listed = {table: None if keys is None else set(keys.tolist()) for table, keys in unwritten.as_dict().items()}
    taken: dict[str, set[int] | None] = {}
    while unwritten:
        table, keys = unwritten.take(1000)
        taken[table] = None if keys is None else set(keys.tolist())
    assert taken == {"same": set(range(5)), "other": set(range(3)), "many": None}
    assert listed == taken
