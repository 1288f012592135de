"""How far updates have been applied, in a note that other processes also write."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_session.update_stream.offset_notes import is_of_a_push, is_push_unfinished, read_applied, with_applied
from inference_session.update_stream.positions import AppliedPosition, LastMessage, Partition

LAST = st.builds(LastMessage, st.integers(0, 2**62), st.text())
PARTITIONS = st.tuples(st.text(), st.integers(0, 1000))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.sampled_from(["offsets", "topics", "t", "0", "id", "last"]), inner)
    ),
)
NOTES = JSON.map(json.dumps) | st.text() | st.none()


@st.composite
def applied(draw: st.DrawFn) -> AppliedPosition:
    last = draw(st.none() | LAST)
    begin = 0 if last is None else last.offset + 1
    return AppliedPosition(draw(st.integers(begin, 2**63 - 1)), draw(st.text()), last)


@given(st.dictionaries(PARTITIONS, applied()), NOTES)
def test_what_is_written_is_read(written: dict[Partition, AppliedPosition], note: str | None) -> None:
    """Whatever the note was before."""
    text = with_applied(note, written)

    for (topic, partition), one in written.items():
        assert read_applied(text, topic)[partition] == one


@given(NOTES, st.sampled_from(["t", "0", ""]))
def test_foreign_notes_say_nothing(note: str | None, topic: str) -> None:
    """A note that somebody else wrote is no error, and never a negative offset."""
    assert all(one.offset >= 0 for one in read_applied(note, topic).values())


def test_the_rest_of_a_note_stays() -> None:
    """How far a push has come, and partitions that are not followed now, are not forgotten for an update."""
    note = with_applied(
        '{"source": "a", "rows": 3, "offsets": {"old": {"0": 1}, "t": {"0": 4, "2": 3}}}',
        {
            ("t", 2): AppliedPosition(5, "id", LastMessage(4, "ab")),
            ("t", 0): None,
        },
    )

    assert json.loads(note) == {
        "source": "a",
        "rows": 3,
        "offsets": {"old": {"0": 1}, "t": {"2": 5}},
        "topics": {"t": {"2": {"id": "id", "last": [4, "ab"]}}},
    }


def test_notes_of_before_identities_are_read() -> None:
    """They are read as offsets without proof."""
    assert read_applied('{"offsets": {"t": {"0": 4}}}', "t") == {0: AppliedPosition(4)}


@pytest.mark.parametrize("offset", [-1, "5", 5.0, True, None])
def test_offsets_are_whole_numbers(offset: object) -> None:
    """Anything else counts as no note, so that all is read again."""
    assert read_applied(json.dumps({"offsets": {"t": {"0": offset, "1": 7}}}), "t") == {1: AppliedPosition(7)}


@pytest.mark.parametrize("last", [None, [], [3], [3, 4], ["3", "x"], [7, "x"], {"3": "x"}])
def test_a_last_message_that_cannot_be_one_proves_nothing(last: object) -> None:
    """It lies before the offset, and has a fingerprint."""
    note = {"offsets": {"t": {"0": 7}}, "topics": {"t": {"0": {"id": 5, "last": last}}}}

    assert read_applied(json.dumps(note), "t") == {0: AppliedPosition(7)}


@pytest.mark.parametrize("rows", [3, 7])
def test_the_note_of_a_push_is_known(rows: int) -> None:
    """Until updates are noted in it; one that is not finished has rows to write yet."""
    note = json.dumps({"source": "a", "rows": rows, "of": 7})

    assert is_of_a_push(note)
    assert is_of_a_push(None)
    assert not is_of_a_push(with_applied(note, {("t", 0): None}))
    assert is_push_unfinished(note) == (rows < 7)
    assert not is_push_unfinished(None)
