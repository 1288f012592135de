"""What an update stream has done so far, and its state: written by the stream's thread, read by any thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from inference_session.platform.log_records import warn
from inference_session.stats import gauge
from inference_session.update_stream.encodings import REASONS
from inference_session.update_stream.positions import Partition

MAX_SET_ASIDE = 100
"""Refused messages that the statistics list."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StreamSnapshot:
    """What an update stream has done by one moment; docs/reference/statistics.md defines each number."""

    messages: int
    updated_rows: int
    deleted_rows: int
    replays: int
    missed_messages: int
    failures: int
    rejected: Mapping[str, int]
    """Messages set aside, by reason."""
    staleness_s: float
    set_aside: Sequence[str]
    """What was wrong with the last of them."""
    failure: str | None
    """Why the stream cannot go on at present."""
    topics: Sequence[str]
    lag_messages: int = gauge()
    """Messages that the brokers have and that are not applied."""


class StreamStats:
    """Counters of one model's stream. Failures are logged when they begin and end, refusals once per reason."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._lock = threading.Lock()
        counted = ("messages", "updated_rows", "deleted_rows", "replays", "missed_messages", "failures")
        self._counts = dict.fromkeys(counted, 0)
        self._rejected = dict.fromkeys(REASONS, 0)
        self._set_aside: deque[str] = deque(maxlen=MAX_SET_ASIDE)
        self._lag_messages = 0
        self._staleness_s = 0.0
        self._pending_since_s: float | None = None
        """When the oldest of the messages that are being applied was published; None: none are."""
        self._failure: str | None = None
        self._blocked: dict[Partition, str] = {}
        """Partitions that cannot be read at present, and why."""

    def begin(self, published_s: float) -> None:
        """Messages are about to be applied, the oldest of them published at this value of time.time()."""
        with self._lock:
            self._pending_since_s = published_s

    def end(self, num_messages: int) -> None:
        """The messages that `begin` told of are applied."""
        with self._lock:
            self._counts["messages"] += num_messages
            self._staleness_s = self._age_s()
            self._pending_since_s = None

    def count(self, **numbers: int) -> None:
        """Add to counts, by the names of StreamSnapshot."""
        with self._lock:
            for name, number in numbers.items():
                self._counts[name] += number

    def lag(self, num_messages: int) -> None:
        """Note how many of the brokers' messages are not applied."""
        with self._lock:
            self._lag_messages = num_messages

    def refuse(self, reason: str, text: str) -> None:
        """A message is set aside, for one of REASONS."""
        with self._lock:
            is_first = not self._rejected[reason]
            self._rejected[reason] += 1
            self._set_aside.append(f"{reason}: {text}")
        if is_first:
            warn(_log, "an update was rejected (%s; further ones are only counted): %s", reason, text)

    def fail(self, failure: str) -> None:
        """The stream cannot go on at present."""
        with self._lock:
            is_new = self._failure is None
            self._counts["failures"] += 1
            self._failure = failure
        if is_new:
            warn(_log, "the update stream of model %r is waiting: %s", self._model, failure)

    def recover(self) -> None:
        """The stream goes on again, if it had stopped."""
        with self._lock:
            was_down, self._failure = self._failure is not None, None
        if was_down:
            # A warning, like the one it resolves: a reader who saw that one must see this one too.
            warn(_log, "the update stream of model %r continues", self._model)

    @property
    def blocked(self) -> Set[Partition]:
        """Partitions that cannot be read at present."""
        return self._blocked.keys()

    def block(self, one: Partition, why: str) -> None:
        """A partition cannot be read at present; it is tried again."""
        with self._lock:
            is_new = one not in self._blocked
            self._counts["failures"] += 1
            self._blocked[one] = f"topic {one[0]!r}, partition {one[1]}, cannot be read: {why}"
        if is_new:
            warn(_log, "topic %r, partition %d, cannot be read: %s", *one, why)

    def unblock(self, partitions: Iterable[Partition]) -> None:
        """These partitions are read, or exist no more."""
        with self._lock:
            read = [one for one in {*partitions} if self._blocked.pop(one, None)]
        for one in read:
            warn(_log, "topic %r, partition %d, continues", *one)

    def snapshot(self, topics: Sequence[str] = ()) -> StreamSnapshot:
        """All of it at one moment; `topics`: those that are followed."""
        with self._lock:
            return StreamSnapshot(
                **self._counts,
                lag_messages=self._lag_messages,
                staleness_s=self._age_s(),
                rejected=dict(self._rejected),
                set_aside=list(self._set_aside),
                failure=self._failure or next(iter(self._blocked.values()), None),
                topics=list(topics),
            )

    def _age_s(self) -> float:
        """Must be called while holding the lock."""
        pending = self._pending_since_s
        return self._staleness_s if pending is None else max(time.time() - pending, 0.0)
