"""Updates of streams, written so that no row becomes older, whichever of several servers writes it when.

Each hash of rows has a note in the same slot, a hash too:

    hps_et{<tag>/p<partition>}n    source → `<history> <epoch> <position>`: the rows contain its updates before that
                                   `empty` → all rows were erased, and Redis keeps no hash without fields

A script reads the note and writes rows and note in one go, so that they always match, in snapshots and replicas too.
It writes nothing if the rows contain the updates already. If the note says less than this process knows to be written,
or the rows are gone, Redis has lost updates: all must be applied again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import HotrowError, UnavailableError, fresh
from inference_session.parameter_server.redis import layout
from inference_session.parameter_server.redis.connection import Deadline, PlainCommand, RedisConnection
from inference_session.tables.ordered_updates import OrderedUpdates, Outcome, SourceProgress, Status

_WRITTEN, _CONTAINED, _LOST = range(3)
_NOTE = re.compile(rb"(?P<history>\S+) (?P<epoch>-?\d+) (?P<position>\d+)")
_SCRIPT = b"""
local rows, times, note, num_sources = KEYS[1], KEYS[2], KEYS[3], tonumber(ARGV[1])
local at = 3
local inserted = at + 7 * num_sources
local erased = inserted + ARGV[2]

local function send(verb, name, first, last)
  for i = first, last, 4000 do
    local reply = redis.pcall(verb, name, unpack(ARGV, i, math.min(i + 3999, last)))
    if type(reply) == 'table' and reply.err then return reply end
  end
end

if redis.pcall('HLEN', rows) == 0 and not redis.call('HGET', note, 'empty') then
  local reply = redis.pcall('UNLINK', note)
  if type(reply) == 'table' then return reply end
end
local replies = {}
for source = 1, num_sources do
  local name, history, known = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
  local epoch, position = tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4])
  local last_inserted, last_erased = inserted + ARGV[at + 5] - 1, erased + ARGV[at + 6] - 1
  local found = redis.call('HGET', note, name)
  local of, noted_epoch, noted = string.match(found or '', '^(%S+) (-?%d+) (%d+)$')
  local status = 0
  if of ~= history then
    if known >= 0 then status = 2 end
  elseif tonumber(noted) < known then
    status = 2
  elseif tonumber(noted) >= position and tonumber(noted_epoch) >= epoch then
    status = 1
  end
  if status == 0 then
    local failure = send('HDEL', times, erased, last_erased) or send('HSET', rows, inserted, last_inserted)
      or send('HDEL', rows, erased, last_erased)
    if failure then return failure end
    noted = position
    redis.call('HSET', note, name, history .. ' ' .. ARGV[at + 3] .. ' ' .. ARGV[at + 4])
  end
  replies[2 * source - 1], replies[2 * source] = status, tonumber(noted or -1)
  inserted, erased, at = last_inserted + 1, last_erased + 1, at + 7
end
if redis.pcall('HLEN', rows) == 0 then redis.call('HSET', note, 'empty', '') else redis.call('HDEL', note, 'empty') end
return replies
"""


@dataclass
class OrderedWrite:
    """The updates of one hash of rows, as one command."""

    tag: str
    partition: int
    updates: OrderedUpdates
    inserted: NDArray[np.intp]
    """Positions of rows to be inserted, ordered by their source."""
    erased: NDArray[np.intp]
    """The same of rows to be erased."""
    known: Sequence[int]
    """By source, up to where the hash is known to contain it; -1: nothing is known."""
    statuses: Sequence[int] = ()
    """By source, what was done; as the reply tells."""
    noted: Sequence[int] = ()
    """By source, up to where the hash contains it now; as the reply tells."""
    may_write: bool = True

    @property
    def name(self) -> bytes:
        return layout.rows_name(self.tag, self.partition)

    @property
    def num_bytes(self) -> int:
        row_bytes: int = 4 * self.updates.vectors.shape[1] + 16
        return len(self.inserted) * row_bytes + 16 * len(self.erased)

    def payload(self) -> bytes:
        keys, vectors = self.updates.keys[self.inserted], self.updates.vectors[self.inserted]
        rows = layout.row_fields(keys, vectors.astype("<f4", copy=False))
        erased = layout.key_fields(self.updates.deleted[self.erased])
        names = self.name, layout.times_name(self.tag, self.partition), layout.applied_name(self.tag, self.partition)
        counts = b"%d" % len(self.known), b"%d" % (2 * len(rows))
        arguments = b"EVAL", _SCRIPT, b"3", *names, *counts, *self._sources()
        head = layout.command_head(*arguments, num_fields=2 * len(rows) + len(erased))
        return b"".join([head, rows.view(np.uint8).data, erased.view(np.uint8).data])

    def singles(self) -> Iterator[OrderedWrite]:
        """See Command."""
        yield self

    def _sources(self) -> Iterator[bytes]:
        """Seven arguments for each source."""
        num_sources = len(self.known)
        num_inserted = np.bincount(self.updates.sources[self.inserted], minlength=num_sources)
        num_erased = np.bincount(self.updates.deleted_sources[self.erased], minlength=num_sources)
        for source, one in enumerate(self.updates.progress):
            yield one.source.encode()
            yield one.history.encode()
            numbers = self.known[source], one.epoch, one.end, 2 * int(num_inserted[source]), int(num_erased[source])
            yield from (b"%d" % number for number in numbers)

    def take(self, reply: object) -> None:
        """Take a reply; UnavailableError where a script never answers that."""
        whole = isinstance(reply, list) and all(isinstance(number, int) for number in reply)
        if not isinstance(reply, list) or not whole or len(reply) != 2 * len(self.known):
            raise UnavailableError(f"the reply to EVAL is not valid in the Redis protocol: {str(reply)[:60]}")
        self.statuses, self.noted = reply[::2], reply[1::2]

    def read_note(self) -> PlainCommand:
        """The command that reads the note's fields of all sources."""
        name = layout.applied_name(self.tag, self.partition)
        return "HMGET", name, *(one.source for one in self.updates.progress)

    def take_note(self, fields: Sequence[bytes | None]) -> None:
        """Count the updates as contained, and so not to be written, where the note says that of all sources."""
        noted = [_contained(text, one) for text, one in zip(fields, self.updates.progress, strict=True)]
        if min(noted, default=-1) >= 0:
            self.statuses, self.noted = [_CONTAINED] * len(noted), noted


def read_ordered(connection: RedisConnection, writes: Sequence[OrderedWrite], deadline: Deadline) -> None:
    """Read the replies to some writes; an error among them is raised."""
    for write, reply in zip(writes, connection.read_replies(len(writes), deadline), strict=True):
        if isinstance(reply, HotrowError):
            raise fresh(reply)
        write.take(reply)


class OrderedWrites:
    """The writes of one store, and what it remembers of them. Used by one thread at a time."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], _KnownSource] = {}
        """By table and source."""
        self.are_behind = False
        """Whether another process had written some of the last updates: notes may say that of the next ones too."""

    def of(
        self, table: str, tag: str, updates: OrderedUpdates, partitioning: layout.Partitioning
    ) -> list[OrderedWrite]:
        """The writes of updates, one for each hash that has a row of them."""
        known = [self._current(table, one) for one in updates.progress]
        inserted = _by_partition(updates.keys, updates.sources, partitioning)
        erased = _by_partition(updates.deleted, updates.deleted_sources, partitioning)
        return [
            OrderedWrite(tag, p, updates, *parts, [one.by_partition.get(p, -1) for one in known])
            for p, parts in enumerate(zip(inserted, erased, strict=True))
            if len(parts[0]) or len(parts[1])
        ]

    def outcome(self, table: str, updates: OrderedUpdates, writes: Sequence[OrderedWrite]) -> Outcome:
        """What writes have done, all of which were answered."""
        inserted, erased = (np.zeros(len(part), np.int8) for part in (updates.keys, updates.deleted))
        for write in writes:
            found = np.array([_result(*one) for one in zip(write.statuses, write.noted, updates.progress, strict=True)])
            inserted[write.inserted] = found[updates.sources[write.inserted]]
            erased[write.erased] = found[updates.deleted_sources[write.erased]]
        lost = any(_LOST in write.statuses for write in writes)
        self.are_behind = any(_CONTAINED in write.statuses for write in writes)
        for source, one in enumerate(updates.progress):
            if lost:
                self._known.pop((table, one.source), None)
            else:
                known = self._current(table, one)
                known.end = one.end
                known.by_partition |= {write.partition: write.noted[source] for write in writes}
        return Outcome(inserted, erased, lost)

    def _current(self, table: str, progress: SourceProgress) -> _KnownSource:
        """What is known of a source. Nothing, where it is applied again from before."""
        known = self._known.get((table, progress.source))
        if known is None or known.history != progress.history or progress.begin < known.end:
            known = self._known[table, progress.source] = _KnownSource(progress.history, progress.begin, {})
        return known


@dataclass
class _KnownSource:
    """Up to where hashes are known to contain a source."""

    history: str
    end: int
    """Up to where this process has applied it."""
    by_partition: dict[int, int]


def _result(status: int, noted: int, progress: SourceProgress) -> Status:
    """What the outcome says of the rows of a source in one hash."""
    if status == _WRITTEN:
        return Status.WRITTEN
    return Status.SAME if status == _CONTAINED and noted == progress.end else Status.OTHER


def _contained(text: bytes | None, progress: SourceProgress) -> int:
    """Up to where a note says that the rows contain a source; -1: less than these updates."""
    match = _NOTE.fullmatch(text or b"")
    if match is None or match["history"] != progress.history.encode() or int(match["epoch"]) < progress.epoch:
        return -1
    return position if (position := int(match["position"])) >= progress.end else -1


def _by_partition(
    keys: NDArray[np.int64], sources: NDArray[np.intp], partitioning: layout.Partitioning
) -> Iterator[NDArray[np.intp]]:
    """Positions of the keys of each partition, ordered by their source."""
    by_source = np.argsort(sources, kind="stable")
    order, bounds = layout.by_partition(np.ascontiguousarray(keys[by_source]), partitioning)
    return (by_source[order[begin:end]] for begin, end in pairwise(bounds))
