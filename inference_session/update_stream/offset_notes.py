"""How far a table's updates have been applied, kept in the table's note next to its rows.

    {"offsets": {topic: {partition: offset of the next message}},
     "topics": {topic: {partition: {"id": the topic's id, "last": [offset, fingerprint]}}}}

`id` and `last` are present where they are known; notes of older versions of hotrow have only offsets. Other fields of a
note, such as how far a push has come, are kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from inference_session.platform.json_records import own_fields
from inference_session.update_stream.positions import AppliedPosition, LastMessage, Partition


def read_applied(note: str | None, topic: str) -> dict[int, AppliedPosition]:
    """How far a note says that each partition of a topic is applied; {} if it says nothing."""
    parsed = own_fields(note)
    offsets, identities = (_dict(_dict(parsed.get(name)).get(topic)) for name in ("offsets", "topics"))
    return {
        int(name): _applied(offset, _dict(identities.get(name)))
        for name, offset in offsets.items()
        if name.isdecimal() and _is_offset(offset)
    }


def is_of_a_push(note: str | None) -> bool:
    """Whether a push has written the note since updates were noted in it, so that the table's rows are the push's."""
    return not {"offsets", "topics"} & own_fields(note).keys()


def is_push_unfinished(note: str | None) -> bool:
    """Whether a push is running or was interrupted: the rest of it will overwrite what updates write now."""
    parsed = own_fields(note)
    rows, of = parsed.get("rows"), parsed.get("of")
    return isinstance(rows, int) and isinstance(of, int) and rows < of


def with_applied(note: str | None, applied: Mapping[Partition, AppliedPosition | None]) -> str:
    """The note, changed to say how far these partitions are applied (None: nothing is)."""
    parsed = own_fields(note)
    offsets, identities = ({**_dict(parsed.get(name))} for name in ("offsets", "topics"))
    for (topic, partition), one in applied.items():
        name = str(partition)
        for by_topic in (offsets, identities):
            by_topic[topic] = {other: held for other, held in _dict(by_topic.get(topic)).items() if other != name}
        if one is not None:
            offsets[topic][name] = one.offset
            identities[topic][name] = {"id": one.topic_id, **({} if one.last is None else {"last": [*one.last]})}
    return json.dumps({**parsed, "offsets": offsets, "topics": identities})


def _applied(offset: int, identity: Mapping[str, Any]) -> AppliedPosition:
    topic_id, last = identity.get("id"), identity.get("last")
    is_last = isinstance(last, list) and len(last) == 2 and _is_offset(last[0]) and isinstance(last[1], str)
    return AppliedPosition(
        offset,
        topic_id if isinstance(topic_id, str) else "",
        LastMessage(*last) if isinstance(last, list) and is_last and last[0] < offset else None,
    )


def _is_offset(value: object) -> bool:
    return type(value) is int and value >= 0


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
