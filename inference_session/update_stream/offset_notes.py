"""How far a table's updates have been applied, kept in the table's note beside its rows.

    {"offsets": {topic: {partition: offset of the next message}}}

Whatever else a note says, such as how far a push has come, stays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def read_offsets(note: str | None, topic: str) -> dict[int, int]:
    """By partition of a topic, the offset up to which a note says that it is applied; {} where it says nothing."""
    topics = _parse(note).get("offsets")
    offsets = topics.get(topic) if isinstance(topics, dict) else None
    found = offsets.items() if isinstance(offsets, dict) else ()
    return {int(name): offset for name, offset in found if name.isdecimal() and type(offset) is int and offset >= 0}


def with_offsets(note: str | None, offsets: Mapping[str, Mapping[int, int]]) -> str:
    """The note with these offsets, by topic and partition, in place of those it had."""
    return json.dumps({**_parse(note), "offsets": offsets})


def _parse(note: str | None) -> dict[str, Any]:
    """{} where the note is none of ours."""
    try:
        parsed = json.loads(note or "{}")
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
