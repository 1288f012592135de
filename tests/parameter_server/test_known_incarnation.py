"""The note on which incarnation of the volatile store has all rows."""

from __future__ import annotations

import threading
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor

from inference_session.parameter_server.known_incarnation import NOTE_TABLE, KnownIncarnation
from tests.testing.memory_store import MemoryStore
from tests.testing.servers import PATIENCE_S


def test_only_what_others_have_noted_is_news() -> None:
    """It is reported once; a missing note is not reported."""
    store = MemoryStore({NOTE_TABLE: 1})
    one, other = KnownIncarnation(store), KnownIncarnation(store)
    assert one.read() is None
    one.save("first")
    assert one.read() is None
    assert other.read() == "first"
    assert other.read() is None
    other.save_that_writes_are_missing()
    assert not one.misses_writes
    assert one.read() is not None
    assert one.misses_writes
    one.save("second")
    assert not one.misses_writes
    assert other.read() == "second"


def test_a_note_that_is_written_while_it_is_read_is_no_news() -> None:
    """Otherwise a reader that has seen the earlier note would take its own process for another one."""
    reading, writing = threading.Event(), threading.Event()

    class SlowStore(MemoryStore):
        """Gives what it held when the reader asked, after the writer has begun."""

        is_slow = False

        def note(self, table: str) -> str | None:
            text = super().note(table)
            if self.is_slow:
                reading.set()
                assert writing.wait(PATIENCE_S)
            return text

    store = SlowStore({NOTE_TABLE: 1})
    known = KnownIncarnation(store)
    known.save("first")
    store.is_slow = True
    with ThreadPoolExecutor() as threads:
        read = threads.submit(known.read)
        assert reading.wait(PATIENCE_S)
        saved = threads.submit(known.save_that_writes_are_missing)
        futures.wait([saved], 0.1)  # if nothing held it up, it has ended by now
        writing.set()
        assert read.result() is None
        saved.result()
    assert known.misses_writes
    assert known.read() is None


def test_what_is_noted_over_is_news_still() -> None:
    """Also where both say the same: the rows that others missed are not the ones that this process missed."""
    store = MemoryStore({NOTE_TABLE: 1})
    KnownIncarnation(store).save_that_writes_are_missing()
    for save in (lambda known: known.save("first"), KnownIncarnation.save_that_writes_are_missing):
        KnownIncarnation(store).save_that_writes_are_missing()
        known = KnownIncarnation(store)
        save(known)
        assert known.read() is not None
        assert known.read() is None


def test_a_note_that_no_caller_has_read_is_not_replaced() -> None:
    """Else a session that is opened then would take a Redis for complete which misses another process's writes."""
    store = MemoryStore({NOTE_TABLE: 1})
    known = KnownIncarnation(store)
    assert known.save("first")
    KnownIncarnation(store).save_that_writes_are_missing()

    assert not known.save("second")
    assert KnownIncarnation(store).read() == "misses writes"
    assert known.read() == "misses writes"
    assert known.save("second")
    assert KnownIncarnation(store).read() == "second"


def test_without_a_persistent_store_nothing_is_known() -> None:
    """Nor is that an error."""
    known = KnownIncarnation()
    known.save("first")
    known.save_that_writes_are_missing()
    assert known.read() is None
    assert not known.misses_writes
