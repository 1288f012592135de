"""Tells the messages that a version has learned from those that are newer than it.

Publishers date messages by their own clocks, so a date alone proves nothing: one whose clock was set back dates new
rows before the version. The order of a partition does: what lies behind a newer message is newer, and so is what lies
behind the end that this process has read up to, because the version existed by then.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from inference_session.update_stream.positions import Partition

_NOWHERE = 1 << 63
"""Beyond all offsets."""
_CLOCKS_DIFFER_MS = 60_000
"""By how much the dates of a partition may go back before a clock counts as set back."""

_log = logging.getLogger(__name__)


class NewerMessages:
    """Picks the messages that were published after a moment. Used by one thread."""

    def __init__(self, since: datetime | None) -> None:
        """`since`: the model has learned of what was published before; None: of nothing."""
        self._since = since
        self._since_ms = 0 if since is None else int(since.timestamp() * 1000)
        self._newer_from: dict[Partition, int] = {}
        """Offsets from which on all messages are newer, also if their topic is deleted and created again meanwhile."""
        self._latest_ms: dict[Partition, int] = {}
        """The latest date among the messages passed over."""
        self._warned: set[tuple[Partition, str]] = set()

    def note_ends(self, ends: Mapping[Partition, int]) -> None:
        """Partitions have been read up to these offsets, where they end at present."""
        for one, end in ends.items():
            self._newer_from[one] = min(end, self._newer_from.get(one, end))

    def among(self, topic: str, messages: Sequence[Any]) -> Sequence[Any]:
        """The newer ones of the client library's messages of one topic, which are in their order."""
        return messages if self._since is None else list(self._newer(topic, messages))

    def _newer(self, topic: str, messages: Sequence[Any]) -> Iterator[Any]:
        for message in messages:
            one, offset, date_ms = (topic, message.partition()), message.offset(), message.timestamp()[1]
            newer_from = self._newer_from.get(one, _NOWHERE)
            if date_ms >= self._since_ms:
                self._newer_from[one] = min(offset, newer_from)
                yield message
            elif offset >= newer_from:
                self._warn(one, offset, "but was published later: it is applied, and so is what follows")
                yield message
            else:
                latest_ms = self._latest_ms.get(one, 0)
                if date_ms < latest_ms - _CLOCKS_DIFFER_MS:
                    self._warn(one, offset, "and before earlier messages: it is passed over; publish newer rows again")
                self._latest_ms[one] = max(date_ms, latest_ms)

    def _warn(self, one: Partition, offset: int, what: str) -> None:
        if (one, what) not in self._warned:
            self._warned.add((one, what))
            _log.warning(
                "topic %r, partition %d: the message at offset %d is dated before %s, up to which the model has"
                " learned, %s; set the clock of its publisher, or of the process that wrote the version",
                *one,
                offset,
                self._since,
                what,
            )
