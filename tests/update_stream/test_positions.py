"""How far partitions are applied, and when that is not trusted, against logs written out by hand."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_session.update_stream.positions import AppliedPosition, LastMessage, Partition, Positions

ONE: Partition = ("topic", 0)
MAX_STEPS = 50


class Log(NamedTuple):
    """A partition as a broker keeps it."""

    topic_id: str
    messages: dict[int, str]
    """Fingerprint by offset, without those that were removed or compacted."""
    begin: int
    """Where its oldest message is: all before were removed."""
    end: int

    @classmethod
    def of(cls, topic_id: str, messages: dict[int, str], begin: int, end: int) -> Log:
        """Of these messages those that are between begin and end."""
        return cls(topic_id, {o: f for o, f in messages.items() if begin <= o < end}, begin, end)

    def first_from(self, offset: int | None) -> tuple[LastMessage | None, int]:
        """What a consumer that begins there (None: at the oldest message) gets first: a message and its offset, or the
        end. IndexError where the broker refuses to read.
        """
        begin = self.begin if offset is None else offset
        if not self.begin <= begin <= self.end:
            raise IndexError(begin)
        found = next(((o, f) for o, f in sorted(self.messages.items()) if o >= begin), None)
        return (None, self.end) if found is None else (LastMessage(*found), found[0])


@st.composite
def logs(draw: st.DrawFn, name: str) -> Log:
    """Messages that are this log's own, some of them dropped; a broker that may give no ids."""
    end = draw(st.integers(0, 6))
    kept = draw(st.sets(st.integers(0, 5)))
    messages = {o: f"{name}{o}" for o in range(end) if o in kept}
    return Log.of(draw(st.sampled_from(["", name])), messages, draw(st.integers(0, end)), end)


def read(positions: Positions, log: Log, missed: list[int]) -> list[str]:
    """Follow a log to its end as the stream does; returns the fingerprints of the messages to be applied.

    The numbers of messages that were removed before they were applied are added to `missed`.
    """
    positions.topic_ids = {"topic": log.topic_id} if log.topic_id else {}
    used: list[str] = []
    begin = positions.assign()[ONE]
    for _ in range(MAX_STEPS):
        try:
            found, offset = log.first_from(begin)
        except IndexError:
            missed.append(positions.miss(ONE, log.begin, log.end)[0])
            begin = positions.assign()[ONE]
            continue
        if positions.is_unproved(ONE):
            positions.examine(ONE, found, offset)
        if not positions.are_assigned:
            begin = positions.assign()[ONE]
            continue
        if found is None:
            positions.reach(ONE, offset)
            return used
        if positions.is_new(ONE, offset):
            used.append(found.fingerprint)
            positions.apply(ONE, found)
        begin = offset + 1
    raise AssertionError(f"never at its end: {log}")


def followed(log: Log) -> Positions:
    positions = Positions()
    positions.topic_ids = {"topic": log.topic_id} if log.topic_id else {}
    positions.follow(ONE, None)
    missed: list[int] = []
    assert read(positions, log, missed) == list(log.messages.values())
    assert not any(missed)
    return positions


@given(logs("old"), logs("new"))
def test_a_topic_made_anew_is_read_from_its_oldest_message(old: Log, new: Log) -> None:
    """Whatever its length, with or without ids, and whatever the broker has dropped."""
    applied = followed(old).applied()[ONE]
    positions = Positions()
    positions.topic_ids = {"topic": new.topic_id} if new.topic_id else {}

    positions.follow(ONE, applied)

    assert read(positions, new, []) == list(new.messages.values())


@given(logs("same"), st.integers(0, 3), st.sets(st.integers(0, 8)), st.integers(0, 8))
def test_a_topic_that_is_still_the_same_goes_on(log: Log, num_more: int, compacted: set[int], removed: int) -> None:
    """Only what is new is applied, unless the broker gives no id and has dropped the last message that was. Messages
    that were removed before they were applied are counted.
    """
    applied = followed(log).applied()[ONE]
    more = {o: f"same{o}" for o in range(log.end, log.end + num_more)}
    left = {o: f for o, f in {**log.messages, **more}.items() if o not in compacted}
    grown = Log.of(log.topic_id, left, max(log.begin, min(removed, log.end + num_more)), log.end + num_more)
    positions = Positions()
    positions.topic_ids = {"topic": log.topic_id} if log.topic_id else {}

    positions.follow(ONE, applied)

    new = [fingerprint for offset, fingerprint in grown.messages.items() if offset >= log.end]
    is_proved = bool(log.topic_id) or (applied and applied.last and applied.last.offset in grown.messages)
    missed: list[int] = []
    assert read(positions, grown, missed) == (new if is_proved or not applied else list(grown.messages.values()))
    is_known = applied is not None and bool(log.topic_id or applied.last)  # else it is read as a topic never seen
    assert sum(missed) == (max(grown.begin - applied.offset, 0) if applied and is_known else 0)


@given(logs("same"), st.integers(0, 3), st.integers(0, 8))
def test_messages_that_are_removed_while_updates_wait(log: Log, num_more: int, removed: int) -> None:
    """Those that are left are applied, each once, and the others are counted."""
    positions = followed(log)
    end = log.end + num_more
    messages = {**log.messages, **{o: f"same{o}" for o in range(log.end, end)}}
    grown = Log.of(log.topic_id, messages, max(log.begin, min(removed, end)), end)
    num_applied = positions.offset(ONE)
    missed: list[int] = []

    assert read(positions, grown, missed) == [f for o, f in grown.messages.items() if o >= num_applied]

    assert sum(missed) == (max(grown.begin - num_applied, 0) if num_applied else 0)


@pytest.mark.parametrize("topic_id", ["", "id"])
def test_offsets_of_before_identities_were_noted_prove_nothing(topic_id: str) -> None:
    """The partition is read again, and the reason is returned."""
    positions = Positions()
    positions.topic_ids = {"topic": topic_id} if topic_id else {}

    assert "neither the topic's id nor a fingerprint" in str(positions.follow(ONE, AppliedPosition(7)))

    assert positions.assign() == {ONE: None}
    assert positions.applied() == {ONE: None}


def test_messages_on_their_way_are_not_used_once_a_partition_begins_elsewhere() -> None:
    """Until the client library knows the new place, messages are from the old one, and are ignored."""
    positions = followed(Log("id", {0: "a", 1: "b"}, 0, 2))
    positions.suspect(ONE)

    assert not positions.is_unproved(ONE)
    assert not positions.is_new(ONE, 2)
    positions.apply(ONE, LastMessage(2, "c"))
    positions.reach(ONE, 9)

    assert positions.offset(ONE) == 2
    assert positions.assign() == {ONE: 1}
    assert positions.is_unproved(ONE)


def test_a_partition_that_comes_back_is_remembered() -> None:
    """Its position is kept, also for the note, but it is no longer followed."""
    positions = followed(Log("id", {0: "a", 1: "b"}, 0, 2))
    applied = positions.applied()[ONE]

    positions.leave(ONE)

    assert positions.topics == frozenset()
    assert positions.left(ONE) == applied
    assert positions.applied() == {ONE: applied}
    assert positions.assign() == {}
    assert positions.follow(ONE, positions.left(ONE)) is None
    assert positions.left(ONE) is None


def test_a_partition_of_which_nothing_was_applied_is_known_when_it_comes_back() -> None:
    """Its topic has not grown."""
    positions = Positions()
    assert not positions.is_known(ONE)
    positions.follow(ONE, None)
    positions.leave(ONE)
    assert positions.is_known(ONE)
    assert positions.left(ONE) is None


def test_what_another_process_has_applied_is_of_the_same_topic() -> None:
    """Or says nothing; where both know no id, an equal offset must have the same message."""
    wanted = AppliedPosition(5, "id", LastMessage(4, "x"))

    assert wanted.is_within(AppliedPosition(5, "id", LastMessage(4, "x")))
    assert wanted.is_within(AppliedPosition(9))
    assert not wanted.is_within(None)
    assert not wanted.is_within(AppliedPosition(4, "id", LastMessage(3, "w")))
    assert not wanted.is_within(AppliedPosition(9, "other"))
    assert not wanted.is_within(AppliedPosition(5, "", LastMessage(4, "y")))
