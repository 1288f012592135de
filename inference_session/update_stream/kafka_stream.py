"""The consumer's side of an update stream: messages from Kafka to the rows of one session, in order per key.

    discover    topics of this model's tables, every second (followed_partitions.py)
    consume     a few messages at once, of all partitions
    decode      by table; messages that cannot be applied are set aside, counted, and logged once per reason
    apply       to every tier and the cache; while a store is down, it retries: nothing is dropped
    rest        after every few hundred rows, for a moment, so that requests can use the interpreter
    save        where rows are durable, once a second: how far they are, next to the rows, then the same to the brokers
    follow      a store whose one writer is another process: once that one has saved as much, rows are read again

Other threads of this process answer requests, and the client library and RocksDB do not let these threads run while
they work. So all work is done in pieces of well below a millisecond; they also fit the processor's cache.

Partitions are assigned, not divided by a consumer group: every process keeps its own cache up to date, and so must
see every message. Where the rows are not durable, nothing is saved, and the stream is read from its beginning at start.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import Any, NamedTuple

from inference_session.errors import StoreError, UnavailableError
from inference_session.model_spec import TableSpec
from inference_session.platform.log_records import log_error
from inference_session.platform.pacing import Rests
from inference_session.rows.base import RowWriter
from inference_session.update_stream.followed_partitions import FollowedPartitions
from inference_session.update_stream.kafka_client import (
    BrokerErrors,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
    create_client,
)
from inference_session.update_stream.message_batch import MessageBatch
from inference_session.update_stream.newer_messages import NewerMessages
from inference_session.update_stream.positions import AppliedPartitions, Partition, partition_of
from inference_session.update_stream.saved_positions import SavedPositions
from inference_session.update_stream.store_retries import FIRST_PAUSE_S, LONGEST_PAUSE_S, StoreRetries
from inference_session.update_stream.stream_stats import StreamSnapshot, StreamStats
from inference_session.update_stream.topics import TableTopics
from inference_session.update_stream.update_applier import UpdateApplier
from inference_session.urls.kafka_url import KafkaUrl

DISCOVERY_S = 1.0
MAX_MESSAGES = 500
"""Taken from the client library at once."""
_BYTES_AT_ONCE = 256 << 10
"""Bytes of messages that are taken at once, about."""
TAKES = 8
"""How often messages are taken before they are applied: stores write rows faster in larger batches."""
_POLL_S = 0.05
_SAVE_S = 1.0
_CLOSE_TIMEOUT_S = 10.0
_DISCONNECT_TIMEOUT_S = 1.0
_NOT_ALLOWED = (KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError.TOPIC_AUTHORIZATION_FAILED)
_HELD_POLL_S = 0.005
_HOLD_TIMEOUT_S = 10.0
"""How long `held` waits for what is being applied: as long as a call of a store may take."""

_log = logging.getLogger(__name__)


class _ConsumedMessages(NamedTuple):
    """Messages that were taken together."""

    by_topic: Mapping[str, MessageBatch]
    oldest_ms: int
    """When the oldest of them was published; 0: there are none."""
    ends: Mapping[Partition, int]
    """The offsets of the ends that partitions have been read up to."""


class KafkaUpdateStream:
    """Applies a model's updates in its own thread, until closed."""

    _hold: threading.Event | None = None
    """Set once the thread applies nothing more; None: the stream is not held."""
    _save_at = _discover_at = 0.0
    _num_at_once = 1
    _has_more = False
    """Whether more messages may have arrived than were taken last."""

    def __init__(
        self,
        url: KafkaUrl,
        model: str,
        version: str,
        tables: Sequence[TableSpec],
        rows: RowWriter,
        *,
        topic_filter: str = ".+",
        since: datetime | None = None,
        allow_non_finite: bool = False,
    ) -> None:
        """Begin to follow the topics of a model. Brokers that do not answer are waited for, in the background.

        Args:
            url: the brokers.
            model: name of the model, which is in the topics' names.
            version: for the name under which offsets are committed.
            tables: in the order in which `rows` counts them.
            rows: takes the updates.
            topic_filter: regular expression; of the model's topics, those that it matches somewhere are followed.
            since: messages published before are passed over (newer_messages.py).
            allow_non_finite: whether rows with NaN or infinite elements are applied.
        """
        self._url, self._model, self._newer = url, model, NewerMessages(since)
        self._rests, self._stats, self._closing = Rests(), StreamStats(model), threading.Event()
        self._topics = TableTopics(model, [spec.folder for spec in tables])
        retries = StoreRetries(self._stats, self._closing, self._wait_for_stores)
        self._saved = SavedPositions(rows, self._topics, retries)
        self._updates = UpdateApplier(
            tables,
            self._topics,
            rows,
            saved=self._saved,
            retries=retries,
            stats=self._stats,
            rests=self._rests,
            allow_non_finite=allow_non_finite,
            closing=self._closing,
        )
        self._has_let_go = threading.Event()  # set once the thread uses the rows no more
        self._lost_broker = threading.Event()  # a connection has ended: on the next one, topics may be others
        group = f"hotrow.{model}.{version}.{socket.gethostname()}"
        self._errors, self._commit_warning = BrokerErrors(), _CommitWarning(group)
        self._consumer = create_consumer(url, group, self._note_error, self._commit_warning.on_commit)
        self._followed = FollowedPartitions(
            url, model, topic_filter, self._consumer, self._errors, rows=rows, saved=self._saved, stats=self._stats
        )
        self._thread = threading.Thread(target=self._work, name="hotrow-update-stream", daemon=True)
        self._thread.start()

    def wait_until_current(self, timeout_s: float) -> bool:
        """Wait until all messages that topics had when this stream began are applied; returns False after `timeout_s`.

        Does not wait for brokers that cannot be reached.
        """
        return self._followed.is_current.wait(timeout_s)

    @contextlib.contextmanager
    def held(self) -> Iterator[AppliedPartitions]:
        """Apply nothing until the context ends; yields how far the followed partitions are applied.

        Raises:
            UnavailableError: the thread is still applying messages after `_HOLD_TIMEOUT_S`.
        """
        self._hold = hold = threading.Event()
        try:
            if not hold.wait(_HOLD_TIMEOUT_S):
                raise UnavailableError(f"{self!r} is still applying messages after {_HOLD_TIMEOUT_S:g} s; try again")
            yield self._followed.positions.followed_applied()
        finally:
            self._hold = None

    def wait_until_applied(self, wanted: AppliedPartitions, timeout_s: float) -> bool:
        """Wait until this stream has applied what another stream of the same topics has; returns False after
        `timeout_s`. Does not wait for topics that this stream's filter leaves out, or that were created again.
        """
        end = time.monotonic() + timeout_s
        while not self._followed.include(wanted):
            if time.monotonic() > end or self._closing.wait(_HELD_POLL_S):
                return False
        return True

    def stats(self) -> StreamSnapshot:
        """What has been done so far."""
        return self._stats.snapshot(sorted(self._followed.positions.topics))

    def close(self) -> None:
        """Stop applying updates, and save how far they were applied. May be called more than once."""
        self._closing.set()
        if not self._has_let_go.wait(_CLOSE_TIMEOUT_S):
            _log.warning("%r is still applying its last messages; they are read again at the next start", self)
        # Where the last commit goes to a broker that is down, the client waits for a minute.
        self._thread.join(_DISCONNECT_TIMEOUT_S)

    def __repr__(self) -> str:
        return f"<KafkaUpdateStream of model {self._model!r} from {str(self._url)!r}>"

    def _note_error(self, error: KafkaError) -> None:
        self._errors(error)
        self._lost_broker.set()

    def _work(self) -> None:
        try:
            while self._may_go_on():
                self._try(self._step)
            self._try(self._save)
        finally:
            # It refers to the rows, which refer to this object. While it does, only the garbage collector would free
            # their memory and the mapped files.
            del self._updates, self._saved
            self._followed.release_rows()
            self._has_let_go.set()
            self._consumer.close()

    def _may_go_on(self) -> bool:
        """Wait while held; returns False once closing. After a hold that ends with closing nothing is applied: it would
        be older than what a successor has written meanwhile.
        """
        while (hold := self._hold) is not None and not self._closing.is_set():
            hold.set()
            self._closing.wait(_HELD_POLL_S)
        return not self._closing.is_set()

    def _wait_for_stores(self) -> None:
        """Called between attempts to write what the stores have refused; no attempt is made while held."""
        self._followed.measure_lag()
        self._may_go_on()

    def _try(self, work: Callable[[], None]) -> None:
        """Do a piece of work; an error in it is logged, and must not end later work."""
        try:
            work()
        except KafkaException as error:
            self._stats.fail(f"the Kafka client reports: {error.args[0].str()}")
            self._closing.wait(FIRST_PAUSE_S)
        except (UnavailableError, StoreError) as error:  # closing: unapplied messages come again at the next start
            self._stats.fail(str(error))
        except Exception as error:  # noqa: BLE001 - any error is logged, and the same messages come again
            self._stats.fail(f"{type(error).__name__}: {error}")
            log_error(_log, "the update stream of model %r failed and is trying again", self._model)
            self._followed.suspect_all()
            self._closing.wait(LONGEST_PAUSE_S)

    def _step(self) -> None:
        if time.monotonic() >= self._discover_at:
            self._followed.discover()
            self._discover_at = time.monotonic() + DISCOVERY_S
        self._followed.assign()
        consumed = self._consume()
        if consumed.by_topic:
            self._rests.rest()
            self._apply_all(consumed)
        if consumed.ends:
            self._followed.reach(consumed.ends)
        self._followed.note_ends(consumed.ends)
        if time.monotonic() >= self._save_at:
            self._save()

    def _consume(self) -> _ConsumedMessages:
        by_topic: defaultdict[str, MessageBatch] = defaultdict(MessageBatch)
        ends: dict[Partition, int] = {}
        oldest_ms: list[int] = []
        for messages in self._take():
            if self._lost_broker.is_set():  # all that came with this is read again, after the last message applied
                self._lost_broker.clear()
                self._followed.suspect_all()
            if not self._followed.positions.are_proved:
                messages = [message for message in messages if self._followed.is_new(message)]  # noqa: PLW2901
            whole = [message for message in messages if not message.error()]
            if self._stats.blocked:  # before the errors, which come after these messages
                self._stats.unblock(map(partition_of, whole))
            if len(whole) < len(messages):
                reached = dict(self._ends_among([message for message in messages if message.error()]))
                self._newer.note_ends(reached)
                ends |= reached
            for topic, group in groupby(whole, Message.topic):
                own = list(group)
                oldest_ms.append(own[0].timestamp()[1])
                by_topic[topic].add(own, self._newer.among(topic or "", own))
        return _ConsumedMessages(by_topic, min(oldest_ms, default=0), ends)

    def _ends_among(self, failed: Iterable[Any]) -> Iterator[tuple[Partition, int]]:
        """The ends of partitions, from end events among the messages; other events report failures."""
        for message in failed:
            one, error = partition_of(message), message.error()
            if error.code() == KafkaError._PARTITION_EOF:
                self._stats.unblock([one])
                yield one, message.offset() or 0
            elif error.code() == KafkaError._AUTO_OFFSET_RESET:
                self._followed.note_unreadable(one)
            elif error.code() == KafkaError._BAD_MSG:
                self._stats.block(one, f"a message arrives damaged: {error.str()}")
            elif not one[0]:
                self._commit_warning.give(error)
            else:
                self._stats.block(one, error.str())
                self._discover_at = 0.0

    def _take(self) -> Iterator[list[Any]]:
        """The messages that have arrived, and the events of partitions' ends."""
        # The client library waits by the time of day: if that is set back by an hour, for an hour.
        if not self._has_more:
            self._closing.wait(_POLL_S)
        self._has_more = False
        for take in range(TAKES):
            num_wanted = self._num_at_once
            try:
                messages = self._consumer.consume(num_wanted, 0.0)
            except KafkaException:
                if not take:
                    raise
                return  # it will be raised again, after the messages before it have been returned
            if not messages:
                return
            # A batch may be a thousand times as large as a row.
            num_fitting = _BYTES_AT_ONCE * len(messages) // (sum(map(len, messages)) or 1)
            self._num_at_once = min(max(num_fitting, 1), 2 * num_wanted, MAX_MESSAGES)
            yield messages
            if len(messages) < num_wanted:
                return
            self._rests.rest()
        self._has_more = True

    def _apply_all(self, consumed: _ConsumedMessages) -> None:
        self._stats.begin(consumed.oldest_ms / 1000 if consumed.oldest_ms > 0 else time.time())
        positions = self._followed.positions
        for topic, messages in consumed.by_topic.items():
            reached = {(topic, partition): last for partition, last in messages.reached.items()}
            begins = {one[1]: positions.offset(one) if one in positions.followed else 0 for one in reached}
            if self._updates.apply(topic, positions.topic_ids.get(topic, ""), messages, begins):
                # Not the client's own count, which includes the end of a partition as a message.
                for one, last in reached.items():
                    positions.apply(one, last)
            else:
                self._apply_again(reached)
        self._stats.end(sum(messages.num_messages for messages in consumed.by_topic.values()))
        self._followed.measure_lag()

    def _save(self) -> None:
        """Store next to the rows how far updates have been applied, and commit that to the brokers."""
        self._save_at = time.monotonic() + _SAVE_S
        # A store that takes no notes takes no rows either: the failed write of rows is reported.
        with contextlib.suppress(UnavailableError, StoreError):
            self._replay_pushed()
            applied = self._followed.positions.applied()
            if self._saved.save(applied):
                reached = [TopicPartition(*one, how_far.offset) for one, how_far in applied.items() if how_far]
                if reached:
                    self._consumer.commit(offsets=reached, asynchronous=True)

    def _apply_again(self, partitions: Iterable[Partition]) -> None:
        """Read partitions again of which the stores have lost rows; ask first whether their topics are the same."""
        for one in sorted(partitions):
            self._followed.restart(one, "the store has lost rows that were applied, or they were pushed again")
        self._discover_at = 0.0

    def _replay_pushed(self) -> None:
        """Read the updates of tables again that were pushed meanwhile: the push has replaced their rows."""
        pushed = self._saved.pushed_tables()
        positions = self._followed.positions
        for one in sorted(positions.followed) if pushed else ():
            if self._topics.table_of(one[0]) in pushed and positions.offset(one):
                self._followed.restart(one, "its table was pushed again")


class _CommitWarning:
    """Says once that this user may not commit offsets: they tell others how far the stream is, and nothing else."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._is_given = False

    def give(self, error: KafkaError) -> None:
        """Log the brokers' refusal, unless one was logged before."""
        if not self._is_given:
            self._is_given = True
            _log.warning(
                "offsets are not committed under the group %r, so others do not see how far updates are applied: %s",
                self._group,
                error.str(),
            )

    def on_commit(self, error: KafkaError | None, partitions: Iterable[TopicPartition]) -> None:
        """The client's callback, for a commit and for each of its partitions."""
        for each in (error, *(one.error for one in partitions)):
            if each is not None and each.code() in _NOT_ALLOWED:
                self.give(each)


def create_consumer(
    url: KafkaUrl,
    group: str,
    on_error: Callable[[KafkaError], None],
    on_commit: Callable[[KafkaError | None, list[TopicPartition]], None],
) -> Consumer:
    """`on_error` is called, by the thread that reads, before messages that arrive after a connection has ended."""
    settings = {
        "group.id": group,  # no consumer joins it: offsets are committed under its name
        "on_commit": on_commit,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",  # or else messages that were removed meanwhile would be missed without a word
        "enable.partition.eof": True,
        "fetch.wait.max.ms": 100,
        "fetch.error.backoff.ms": 200,
        "reconnect.backoff.max.ms": 1000,
        "queued.max.messages.kbytes": 32 << 10,
        "fetch.queue.backoff.ms": 10,  # with this much queued; with the default second, a consumer behind runs dry
    }
    return create_client(Consumer, url, settings, on_error)
