"""Messages, copied out of the objects of the client library."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from inference_session.update_stream.encodings import KeyValue
from inference_session.update_stream.positions import LastMessage


class MessageBatch:
    """Messages of one topic, in their order.

    Of the client's own objects, only the last of each partition is kept: thousands of them would make the garbage
    collector scan all of the process repeatedly.
    """

    def __init__(self) -> None:
        self.contents: list[KeyValue] = []
        """Key and value of each message, except those that the version has learned."""
        self.partitions: list[int] = []
        """The partition of each of the contents."""
        self.offsets: list[int] = []
        """The offset of each of the contents."""
        self.num_messages = 0
        self._last: dict[int, Any] = {}
        """By partition, its last message."""

    def add(self, messages: Sequence[Any], newer: Sequence[Any]) -> None:
        """Add messages of the client library, and the contents of those among them that are newer than the version."""
        self.num_messages += len(messages)
        self._last.update((m.partition(), m) for m in messages)
        self.contents += [(m.key(), m.value()) for m in newer]
        self.partitions += [m.partition() for m in newer]
        self.offsets += [m.offset() for m in newer]

    @cached_property
    def reached(self) -> dict[int, LastMessage]:
        """By partition, its last message; read after all have been added, as a fingerprint reads a whole message."""
        return {partition: LastMessage.of(message) for partition, message in self._last.items()}

    @cached_property
    def epochs(self) -> dict[int, int]:
        """By partition, which of its leaders took the last message; -1: the brokers do not tell."""
        epochs = {partition: message.leader_epoch() for partition, message in self._last.items()}
        return {partition: -1 if epoch is None else epoch for partition, epoch in epochs.items()}

    def ends(self, part: slice) -> dict[int, int]:
        """By partition, in their order, the offset after the last of some of the contents."""
        partitions, last = np.unique(self.partitions[part][::-1], return_index=True)
        offsets = self.offsets[part][::-1]
        return {p: offsets[position] + 1 for p, position in zip(partitions.tolist(), last.tolist(), strict=True)}
