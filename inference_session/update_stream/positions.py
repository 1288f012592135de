"""How far the partitions of a stream are applied, and whether their topics are still the same ones.

A topic that was deleted and created again counts its offsets from 0 again, so an offset proves nothing. Two things do:

    topic id       the broker's own (Kafka 2.8 and later)
    fingerprint    of the last message that was applied, which is read again; brokers may have dropped it since

A partition without a proof is read again from its oldest message. That is always correct, because the
order within a partition stays, while going on from the offset may skip messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Set
from typing import Any, NamedTuple, TypeAlias

Partition: TypeAlias = "tuple[str, int]"
"""A topic, and a partition's number in it."""


def partition_of(message: Any) -> Partition:
    """The partition of a message, or event, of the client library."""
    return message.topic() or "", message.partition() or 0


class LastMessage(NamedTuple):
    """The last message of a partition that was applied."""

    offset: int
    fingerprint: str

    @classmethod
    def of(cls, message: Any) -> LastMessage:
        """The position and fingerprint of a message of the client library."""
        digest = hashlib.blake2b(str(message.timestamp()[1]).encode(), digest_size=12)
        for part in (message.key(), message.value()):
            digest.update(b"-" if part is None else b"%d:" % len(part))
            digest.update(part or b"")
        return cls(message.offset(), digest.hexdigest())


class AppliedPosition(NamedTuple):
    """How far a partition is applied, and by what its topic is recognised."""

    offset: int
    """The offset of the next message."""
    topic_id: str = ""
    """Empty: the broker gives none."""
    last: LastMessage | None = None

    def is_of_another(self, other: AppliedPosition | None) -> bool:
        """Whether the topics differ: one was created again."""
        return other is not None and bool(self.topic_id and other.topic_id) and self.topic_id != other.topic_id

    def is_within(self, other: AppliedPosition | None) -> bool:
        """Whether all that is applied up to the other is applied up to this; a recreated topic is another."""
        if other is None or self.is_of_another(other):
            return False
        return other.offset > self.offset or (other.offset == self.offset and other.last in (None, self.last))

    def doubt(self, topic_id: str) -> str | None:
        """Why this cannot be of the topic with that id, whatever its messages are; None: it may be."""
        if self.topic_id and topic_id and self.topic_id != topic_id:
            return f"its id was {self.topic_id} and is {topic_id}"
        if self.last is None and not (self.topic_id and topic_id):
            return "its saved position has neither the topic's id nor a fingerprint"
        return None

    def doubt_at(self, found: LastMessage | None, offset: int, topic_id: str) -> str | None:
        """Why this cannot be of the topic whose messages, read from `last` on, begin as told; None: it is proved.

        Args:
            found: the first message that was read; None: the partition ends here.
            offset: of that message, or of the end.
            topic_id: of the topic.
        """
        if self.last is not None and found is not None and offset == self.last.offset:
            return None if found == self.last else f"its message at offset {offset} is not the one that was applied"
        if offset < self.offset:
            what = "ends at" if found is None else "has a message at"
            return f"it {what} offset {offset}, but was applied up to {self.offset}"
        # The broker has dropped the message since, so the id must suffice.
        return None if self.topic_id and self.topic_id == topic_id else "the last applied message no longer exists"


AppliedPartitions: TypeAlias = "Mapping[Partition, AppliedPosition | None]"
"""How far partitions are applied; None: nothing is."""


class Positions:
    """Positions of the partitions followed. Used by the stream's thread only, except `topics`."""

    def __init__(self) -> None:
        self.topics: frozenset[str] = frozenset()
        """The topics that are followed."""
        self.topic_ids: Mapping[str, str] = {}
        """By topic, as the broker reported last; empty where it gives none."""
        self._applied: dict[Partition, AppliedPosition | None] = {}
        """Positions of the partitions followed; None: nothing is applied."""
        self._left: dict[Partition, AppliedPosition] = {}
        """Positions of partitions that the brokers do not list at present."""
        self._known: set[Partition] = set()
        """Partitions that are followed or have been."""
        self._unproved: set[Partition] = set()
        """Partitions that are read from the last message applied, to see whether it is still the same."""
        self._unassigned: set[Partition] = set()
        """Partitions that the client library does not yet read from their intended offset."""

    @property
    def followed(self) -> Set[Partition]:
        """The partitions followed."""
        return self._applied.keys()

    @property
    def unproved(self) -> frozenset[Partition]:
        """Partitions whose topics are being proved."""
        return frozenset(self._unproved)

    @property
    def are_assigned(self) -> bool:
        """Whether the client library reads from where it is to."""
        return not self._unassigned

    @property
    def are_proved(self) -> bool:
        """Whether all messages that come may be used unchecked."""
        return not self._unproved and not self._unassigned

    def offset(self, one: Partition) -> int:
        """The offset of the next message to be applied; 0 where none has been."""
        applied = self._applied[one]
        return 0 if applied is None else applied.offset

    def is_known(self, one: Partition) -> bool:
        """Whether a partition is followed, or has been."""
        return one in self._known

    def left(self, one: Partition) -> AppliedPosition | None:
        """How far a partition was applied that is no longer followed; None: it was never applied."""
        return self._left.get(one)

    def follow(self, one: Partition, applied: AppliedPosition | None) -> str | None:
        """Follow a partition from where it is applied (None: from its oldest message).

        Returns why it is read again from its oldest message although it was applied; None: it is not.
        """
        self._left.pop(one, None)
        self._known.add(one)
        self._applied[one] = applied
        self.topics = frozenset(topic for topic, _ in self._applied)
        return self.suspect(one)

    def leave(self, one: Partition) -> None:
        """Stop following a partition until it exists again."""
        applied = self._applied.pop(one)
        if applied is not None:
            self._left[one] = applied
        self._unproved.discard(one)
        self._unassigned.add(one)
        self.topics = frozenset(topic for topic, _ in self._applied)

    def suspect(self, one: Partition) -> str | None:
        """Start to prove that a partition is still of the same topic; returns as `follow`."""
        self._unassigned.add(one)
        applied = self._applied[one]
        doubt = None if applied is None else applied.doubt(self._id(one))
        if doubt is not None:
            self.restart(one)
        elif applied is not None and applied.last is not None:
            self._unproved.add(one)
        return doubt

    def restart(self, one: Partition) -> None:
        """Read a partition again from its oldest message."""
        self._applied[one] = None
        self._unproved.discard(one)
        self._unassigned.add(one)

    def examine(self, one: Partition, found: LastMessage | None, offset: int) -> str | None:
        """Judge an unproved partition by the first message (None: its end), at this offset; returns as `follow`."""
        applied = self._applied[one]
        doubt = None if applied is None else applied.doubt_at(found, offset, self._id(one))
        self._unproved.discard(one)
        if doubt is not None:
            self.restart(one)
        return doubt

    def miss(self, one: Partition, low: int, high: int) -> tuple[int, str | None]:
        """The brokers have no message at the offset where a partition is read, but those from `low` up to `high`.

        Returns how many messages they removed before these were applied, and as `follow`.
        """
        if not self._is_read(one):
            return 0, None
        self._unassigned.add(one)
        applied = self._applied[one]
        if applied is None:
            return 0, None
        num_removed = max(low - applied.offset, 0)
        if applied.last is not None and one not in self._unproved and not num_removed:
            return 0, self.suspect(one)
        doubt = self.examine(one, None, high)
        if doubt is None:
            self._applied[one] = applied._replace(offset=applied.offset + num_removed)
        return num_removed, doubt

    def is_unproved(self, one: Partition) -> bool:
        """Whether the next message of a partition is to be examined."""
        return one in self._unproved and one not in self._unassigned

    def is_new(self, one: Partition, offset: int) -> bool:
        """Whether a message of a partition is to be applied."""
        return self._is_read(one) and offset >= self.offset(one)

    def apply(self, one: Partition, last: LastMessage) -> None:
        """A partition has been applied up to this message."""
        if self._is_read(one):
            self._applied[one] = AppliedPosition(last.offset + 1, self._id(one), last)

    def reach(self, one: Partition, end: int) -> None:
        """A partition has no message before `end` that is not applied."""
        if self._is_read(one) and end > self.offset(one):
            applied = self._applied[one]
            self._applied[one] = AppliedPosition(end, self._id(one), None if applied is None else applied.last)

    def assign(self) -> dict[Partition, int | None]:
        """Offsets at which the client library is to begin from now on; None: at the oldest message."""
        self._unassigned.clear()
        return {one: self._begin(one, applied) for one, applied in self._applied.items()}

    def applied(self) -> dict[Partition, AppliedPosition | None]:
        """How far the followed partitions are applied (None: nothing is). Any thread may call it."""
        return {**self._left, **self._applied}

    def followed_applied(self) -> dict[Partition, AppliedPosition | None]:
        """`applied`, without partitions that the brokers do not list at present. Any thread may call it."""
        return self._applied.copy()

    def include(self, wanted: AppliedPartitions) -> bool:
        """Whether all that another stream has applied is applied here, of the topics that are the same to both. May be
        called from any thread.
        """
        mine = self._applied.copy()
        return all(
            how_far is None or how_far.is_of_another(mine.get(one)) or how_far.is_within(mine.get(one))
            for one, how_far in wanted.items()
        )

    def _begin(self, one: Partition, applied: AppliedPosition | None) -> int | None:
        if applied is None:
            return None
        return applied.last.offset if one in self._unproved and applied.last is not None else applied.offset

    def _is_read(self, one: Partition) -> bool:
        return one in self._applied and one not in self._unassigned

    def _id(self, one: Partition) -> str:
        return self.topic_ids.get(one[0], "")
