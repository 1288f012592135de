"""The note on which incarnation of the volatile store has all rows."""

from __future__ import annotations

from inference_session.parameter_server.known_incarnation import NOTE_TABLE, KnownIncarnation
from tests.testing.memory_store import MemoryStore


def test_only_what_others_have_noted_is_news() -> None:
    """Once; and a note that was never made is none."""
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


def test_without_a_persistent_store_nothing_is_known() -> None:
    """Nor is that an error."""
    known = KnownIncarnation()
    known.save("first")
    known.save_that_writes_are_missing()
    assert known.read() is None
    assert not known.misses_writes
