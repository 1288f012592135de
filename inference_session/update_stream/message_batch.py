"""Messages, copied out of the objects of the client library."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from inference_session.update_stream.encodings import KeyValue
from inference_session.update_stream.positions import LastMessage


class MessageBatch:
    """Messages of one topic, in their order.

    Of the client's own objects, only the last of each partition is kept: thousands of them would make the garbage
    collector scan all of the process repeatedly.
    """

    def __init__(self) -> None:
        self.contents: list[KeyValue] = []
        """Key and value of each message, except those that were published too early."""
        self.partitions: list[int] = []
        """The partition of each of the contents."""
        self.offsets: list[int] = []
        """The offset of each of the contents."""
        self.num_messages = 0
        self._last: dict[int, Any] = {}
        """By partition, its last message."""

    def add(self, messages: Sequence[Any], since_ms: int) -> None:
        """Add messages of the client library; leave out the contents of those published before `since_ms`."""
        partitions, offsets = [m.partition() for m in messages], [m.offset() for m in messages]
        self.num_messages += len(messages)
        self._last.update(zip(partitions, messages, strict=True))
        if since_ms:
            messages = [message for message in messages if message.timestamp()[1] >= since_ms]
            partitions, offsets = [m.partition() for m in messages], [m.offset() for m in messages]
        self.contents += [(m.key(), m.value()) for m in messages]
        self.partitions += partitions
        self.offsets += offsets

    @cached_property
    def reached(self) -> dict[int, LastMessage]:
        """By partition, its last message; read after all have been added, as a fingerprint reads a whole message."""
        return {partition: LastMessage.of(message) for partition, message in self._last.items()}
