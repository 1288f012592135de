"""How far updates have been applied, in a note that others write to as well."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_session.update_stream.offset_notes import read_offsets, with_offsets

OFFSETS = st.dictionaries(st.text(), st.dictionaries(st.integers(0, 1000), st.integers(0, 2**63 - 1)))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["offsets", "t", "0"]), inner),
)


@given(OFFSETS, JSON.map(json.dumps) | st.text() | st.none())
def test_what_is_written_is_read(offsets: dict[str, dict[int, int]], note: str | None) -> None:
    """Whatever the note was before."""
    written = with_offsets(note, offsets)

    for topic, partitions in offsets.items():
        assert read_offsets(written, topic) == partitions


@given(JSON.map(json.dumps) | st.text() | st.none(), st.sampled_from(["t", "0", ""]))
def test_foreign_notes_say_nothing(note: str | None, topic: str) -> None:
    """A note that somebody else wrote is no error, and never a negative offset."""
    assert all(offset >= 0 for offset in read_offsets(note, topic).values())


def test_the_rest_of_a_note_stays() -> None:
    """How far a push has come is not forgotten for an update."""
    note = with_offsets('{"source": "a", "rows": 3, "offsets": {"old": {"0": 1}}}', {"t": {2: 5}})

    assert json.loads(note) == {"source": "a", "rows": 3, "offsets": {"t": {"2": 5}}}


@pytest.mark.parametrize("offset", [-1, "5", 5.0, True, None])
def test_offsets_are_whole_numbers(offset: object) -> None:
    """Anything else is as good as none, so that all is read again."""
    assert read_offsets(json.dumps({"offsets": {"t": {"0": offset, "1": 7}}}), "t") == {1: 7}
