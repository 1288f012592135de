"""Which partitions an update stream follows, and from where it reads them.

It follows the topics that there are at the beginning from where their rows are durable up to, else from the oldest
message; and new topics from the oldest message. A topic that is gone is left, and followed from there when it is back.

A topic has to be proved to be still the one of which messages were applied (positions.py): where one is followed that
was applied before, when a connection ends or brokers do not answer, and where a partition ends too early.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Collection, Iterable, Mapping, Set
from typing import Any

from inference_session.rows.base import RowWriter
from inference_session.update_stream.kafka_client import (
    OFFSET_BEGINNING,
    AdminClient,
    BrokerErrors,
    Consumer,
    KafkaError,
    KafkaException,
    TopicMetadata,
    TopicPartition,
    assign,
    create_client,
    topic_ids,
)
from inference_session.update_stream.positions import AppliedPartitions, LastMessage, Partition, Positions, partition_of
from inference_session.update_stream.saved_positions import SavedPositions
from inference_session.update_stream.stream_stats import StreamStats
from inference_session.update_stream.topics import table_of
from inference_session.urls.kafka_url import KafkaUrl

MAX_UNDESCRIBED = 3
"""Looks in which brokers may fail to say whether a topic has an id; then it counts as one without."""
BROKER_TIMEOUT_S = 2.0
"""How long a question to the brokers may take."""
_BEGINNING: int = OFFSET_BEGINNING

_log = logging.getLogger(__name__)


class FollowedPartitions:
    """The partitions of a model's topics. Used by the stream's thread only, unless a method says otherwise."""

    def __init__(
        self,
        url: KafkaUrl,
        model: str,
        topic_filter: str,
        consumer: Consumer,
        errors: BrokerErrors,
        *,
        rows: RowWriter,
        saved: SavedPositions,
        stats: StreamStats,
    ) -> None:
        """Follow no topic until `discover`.

        Args:
            url: the brokers.
            model: name of the model, which is in the topics' names.
            topic_filter: see KafkaUpdateStream.
            consumer: reads the partitions; the caller closes it.
            errors: the consumer's.
            rows: reads cached rows again once notes say what is applied.
            saved: how far rows that outlive this process have been updated.
            stats: where failures and the lag are counted.
        """
        self._url, self._model, self._filter = url, model, re.compile(topic_filter)
        self._consumer, self._errors, self._admin = consumer, errors, create_client(AdminClient, url)
        self._rows, self._saved, self._stats = rows, saved, stats
        self.positions = Positions()
        """How far the partitions are applied."""
        self.is_current = threading.Event()
        """Set once all messages are applied that the topics had at the beginning, or no broker can be reached."""
        self._behind: set[Partition] = set()
        """The partitions among them whose end has not been seen yet."""
        self._unreadable: set[Partition] = set()
        """Partitions that the brokers have no message of at the offset where they are read."""
        self._num_undescribed: dict[str, int] = {}
        """By topic, how often in a row the brokers have not said whether it has an id."""
        self._is_beginning = True
        """Whether the partitions that there were at the beginning are not all known yet."""

    def include(self, wanted: AppliedPartitions) -> bool:
        """Whether all is applied that another stream has applied of topics that both follow. Any thread may ask."""
        return self.positions.include({one: how_far for one, how_far in wanted.items() if self._is_ours(one[0])})

    def release_rows(self) -> None:
        """Refer no more to the rows; nothing else may be called after this but what any thread may."""
        del self._rows, self._saved

    def discover(self) -> None:
        """Follow the topics that there are now."""
        try:
            listed = self._consumer.list_topics(timeout=BROKER_TIMEOUT_S).topics
            topics = {name: listed[name] for name in listed if self._is_ours(name)}
            changed = self._identify(topics)
        except KafkaException as error:
            why = self._errors.explain(error, None if self.positions.followed else self._consumer)
            self._stats.fail(f"no broker answers at {self._url}: {why}")
            # The consumer may reach the brokers before they answer the next question, and they may have lost topics.
            self._suspect(self.positions.followed - self.positions.unproved)
            if error.args[0].code() != KafkaError._TIMED_OUT:  # wait for a broker that is up but busy
                self.is_current.set()
            return
        self._errors.forget()
        self._stats.recover()
        described = self._described(topics)
        told = {(name, p) for name in described for p in topics[name].partitions}
        followed = set(self.positions.followed)
        there = {one for one in followed if one in told or (one[0] in topics and one[0] not in described)}
        self._leave(followed - there)
        self._suspect({one for one in there if one[0] in changed} | self._cut(there))
        self._refute_cut(there)
        self._read_what_is_left(there)
        self._try_blocked(there)
        self._warn_of_growth(told - followed, {topic for topic, _ in there} - changed)
        self._follow(told - followed)
        if self._is_beginning:
            self._behind |= told - followed
            self._is_beginning = described != topics.keys()
        self.note_ends(followed - there)
        self.measure_lag()

    def assign(self) -> None:
        """Have the consumer read from where partitions are applied, if it does not yet."""
        if self.positions.are_assigned:
            return
        begins = self.positions.assign()
        assign(self._consumer, [TopicPartition(*one, _BEGINNING if at is None else at) for one, at in begins.items()])

    def is_new(self, message: Any) -> bool:
        """Whether a message, or a partition's end event, is to be applied; the first of a partition proves it."""
        one, offset, error = partition_of(message), message.offset() or 0, message.error()
        if error is not None and error.code() != KafkaError._PARTITION_EOF:
            return True
        if self.positions.is_unproved(one):
            found = None if error is not None else LastMessage.of(message)
            self._note_doubt(one, self.positions.examine(one, found, offset))
        return self.positions.is_new(one, offset)

    def reach(self, ends: Mapping[Partition, int]) -> None:
        """Count offsets from the last message to the end as read: of control records, or of compacted messages."""
        for one, end in ends.items():
            self.positions.reach(one, end)
        self.measure_lag()

    def note_ends(self, ends: Iterable[Partition]) -> None:
        """These partitions have been read up to their ends, or do not exist any more."""
        self._behind.difference_update(ends)
        if not self._is_beginning and not self._behind:
            self.is_current.set()

    def note_unreadable(self, one: Partition) -> None:
        """The brokers have no message of this partition at the offset where it is read; `discover` finds out why."""
        self._unreadable.add(one)

    def suspect_all(self) -> None:
        """Prove of all partitions that their topics are still the same."""
        self._suspect(self.positions.followed)

    def restart(self, one: Partition, reason: str) -> None:
        """Read a partition again from its oldest message."""
        self.positions.restart(one)
        self._note_doubt(one, reason)

    def measure_lag(self) -> None:
        """Count the messages that partitions have beyond those applied, as the brokers reported last."""
        positions = self.positions
        self._stats.lag(sum(max(self._end(one) - positions.offset(one), 0) for one in positions.followed))

    def _is_ours(self, topic: str) -> bool:
        return table_of(topic, self._model) is not None and self._filter.search(topic) is not None

    def _identify(self, topics: Collection[str]) -> set[str]:
        """Learn the ids of topics; returns those whose id has changed. An id that is not given now stays as it was."""
        known = self.positions.topic_ids
        found = topic_ids(self._admin, topics, BROKER_TIMEOUT_S)
        given = {topic: topic_id for topic, topic_id in found.items() if topic_id}
        self.positions.topic_ids = {**found, **known, **given}
        return {topic for topic in given.keys() & known.keys() if known[topic] not in {"", given[topic]}}

    def _described(self, topics: Mapping[str, TopicMetadata]) -> set[str]:
        """The topics among these that can be followed. A topic with an error exists, but its partitions are not listed.

        Where stores keep an order, a topic is not followed before the brokers have said whether it has an id, or have
        failed to several times: without it, older rows replace those that other servers have written.
        """
        listed = {name for name, topic in topics.items() if topic.error is None}
        unknown = sorted(listed - self.positions.topic_ids.keys()) if self._rows.orders_updates else []
        self._num_undescribed = {name: self._num_undescribed.get(name, 0) + 1 for name in unknown}
        awaited = {name for name, count in self._num_undescribed.items() if count <= MAX_UNDESCRIBED}
        partitions = {(name, p) for name in awaited for p in topics[name].partitions}
        for one in sorted(partitions):
            self._stats.block(one, "no broker describes its topic")
        self._stats.unblock(self._stats.blocked - partitions - self.positions.followed)
        return listed - awaited

    def _leave(self, partitions: Collection[Partition]) -> None:
        for topic, partition in sorted(partitions):
            _log.warning(
                "topic %r, partition %d, is not there any more, or this user may not see it; its rows stay, and reading"
                " resumes when it is back",
                topic,
                partition,
            )
            self.positions.leave((topic, partition))
        self._stats.unblock(partitions)

    def _warn_of_growth(self, partitions: Collection[Partition], topics: Set[str]) -> None:
        """Warn of new partitions of topics: they have rows of keys of which other partitions have earlier rows."""
        for topic in sorted({one[0] for one in partitions if one[0] in topics and not self.positions.is_known(one)}):
            _log.warning(
                "topic %r has more partitions than before: a server that reads it from its oldest message may take an"
                " older row of a key for its newest; delete the topic, and publish all rows again",
                topic,
            )

    def _follow(self, partitions: Collection[Partition]) -> None:
        any_saved = False
        for one in sorted(partitions):
            applied = left = self.positions.left(one)
            # What another process notes of a new topic holds for a store that both share, not for the store before it.
            if left is None and self._is_beginning:
                applied = self._saved.read(*one)
                any_saved |= applied is not None
            _log.info("reading topic %r, partition %d, applied: %s", *one, applied)
            self._note_doubt(one, self.positions.follow(one, applied))
        if any_saved:  # cached rows may be older than the updates that notes count as applied: no message repeats these
            self._rows.renew()

    def _suspect(self, partitions: Collection[Partition]) -> None:
        for one in sorted(partitions):
            self._note_doubt(one, self.positions.suspect(one))

    def _note_doubt(self, one: Partition, doubt: str | None) -> None:
        """Report a partition that is read again."""
        if doubt is not None:
            _log.warning(
                "topic %r, partition %d, is read again from its oldest message, so rows may be older until that is"
                " done: %s",
                *one,
                doubt,
            )
            self._stats.count(replays=1)
            self._saved.forget(one[0])

    def _cut(self, partitions: set[Partition]) -> set[Partition]:
        """Partitions that end before their applied position and are not being proved already."""
        return {one for one in partitions - self.positions.unproved if self._ends_early(one)}

    def _refute_cut(self, partitions: set[Partition]) -> None:
        """Read those again that wait for proof by a message after their end, for which some brokers send nothing."""
        for one in sorted(partitions & self.positions.unproved):
            if self.positions.is_unproved(one) and self._ends_early(one):
                self._note_doubt(one, self.positions.examine(one, None, self._end(one)))

    def _read_what_is_left(self, partitions: Collection[Partition]) -> None:
        """Read unreadable partitions again, from where the brokers have messages."""
        for one in sorted(self._unreadable.intersection(partitions)):
            try:
                low, high = self._consumer.get_watermark_offsets(TopicPartition(*one), timeout=BROKER_TIMEOUT_S)
            except KafkaException:  # where it is read is soon found to be unreadable again
                self._suspect([one])
                continue
            num_removed, doubt = self.positions.miss(one, low, high)
            if num_removed:
                self._note_removed(one, low - num_removed, low - 1)
            self._note_doubt(one, doubt)
        self._unreadable.clear()

    def _try_blocked(self, partitions: Set[Partition]) -> None:
        """Let the client tell the ends of partitions again that could not be read: it tells each end only once, and
        not that an error is over.
        """
        if not self.positions.are_assigned:
            return
        for one in sorted((self._stats.blocked & partitions) - self.positions.unproved):
            with contextlib.suppress(KafkaException):
                self._consumer.seek(TopicPartition(*one, self.positions.offset(one) or _BEGINNING))

    def _note_removed(self, one: Partition, first: int, last: int) -> None:
        """Report messages that cannot be applied any more."""
        _log.warning(
            "topic %r, partition %d: the messages at offsets %d to %d were removed before they were applied"
            " (retention); rows that changed only there stay as they were until they are published again",
            *one,
            first,
            last,
        )
        self._stats.count(missed_messages=last + 1 - first)

    def _ends_early(self, one: Partition) -> bool:
        return 0 <= self._end(one) < self.positions.offset(one)

    def _end(self, one: Partition) -> int:
        """A partition's end as the brokers reported it last; below 0: they never did."""
        try:
            end: int = self._consumer.get_watermark_offsets(TopicPartition(*one), cached=True)[1]
        except KafkaException:  # the client library does not know the partition yet
            return -1
        return end
