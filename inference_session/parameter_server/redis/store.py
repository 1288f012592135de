"""Redis as a tier: standalone, Cluster or Sentinel, over TCP, TLS or a Unix socket, in HPS's layout (layout.py).

The commands of all partitions and tables of a call are sent, over several connections where there are several servers,
before the first reply is read, so that the servers look up while we copy (client.py).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import HotrowError, StoreError, fresh, without_frames
from inference_session.parameter_server.base import ERASED_SUFFIX, EmbeddingStore, FetchRequest, check_insert
from inference_session.parameter_server.namespace import Namespace, StoredTable
from inference_session.parameter_server.redis import layout
from inference_session.parameter_server.redis.client import BYTES_PER_BATCH, RedisClient
from inference_session.parameter_server.redis.commands import Read, Write, WriteAbsent, set_times
from inference_session.parameter_server.redis.connection import Deadline, PlainCommand, RedisConnection, WrongTypeError
from inference_session.parameter_server.redis.ordered_writes import OrderedWrites, read_ordered
from inference_session.parameter_server.redis.overflow import Eviction, Overflow, num_uses
from inference_session.parameter_server.redis.partitionings import Partitionings
from inference_session.parameter_server.redis.replies import compile_kernels
from inference_session.tables.base import SCAN_BYTES, RowBatch, check_fetch
from inference_session.tables.ordered_updates import OrderedUpdates, Outcome, Status
from inference_session.urls.store_url import DEFAULT_TIMEOUT_MS, StoreUrl

DEFAULT_CONNECTIONS = 1
"""Connections to one server that a call uses side by side. A server of one thread gains nothing by a second one, and
the call has two sockets to wait for; calls of several threads have connections of their own anyway."""
_MAX_CONNECTIONS = 1024
_PROBE_FIELDS = 32
_MAY_EVICT = (
    "store %s: its maxmemory-policy is %s, so a full Redis drops whole partitions of tables, updated and erased rows"
    " included; set maxmemory-policy to noeviction, and limit the rows by overflow_margin"
)
_GLOB = re.compile(r"[*?\[\]^\\-]")
"""Characters that mean something in a pattern of Redis."""

_log = logging.getLogger(__name__)


class RedisStore(EmbeddingStore):
    """The tables of one model in a Redis. Nothing is sent until needed, so a Redis that is down can be opened."""

    def __init__(
        self,
        url: StoreUrl,
        namespace: Namespace,
        embedding_dims: Mapping[str, int],
        *,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
    ) -> None:
        """See `parameter_server.create.create_store`."""
        compile_kernels()
        layout.compile_kernels()
        self.url = url
        self.namespace = namespace
        super().__init__(embedding_dims)
        self._has_one_connection = not url.is_cluster and url.count("connections", DEFAULT_CONNECTIONS) == 1
        self._partitionings = Partitionings(url, namespace, embedding_dims, self._samples)
        self._overflow = Overflow.of(url)
        self.client = RedisClient(
            url, timeout_ms, num_connections=url.count("connections", DEFAULT_CONNECTIONS, _MAX_CONNECTIONS)
        )
        """Sends commands to the server, or servers, that have the rows."""
        self._is_eviction_known = False
        self._ordered = OrderedWrites()

    @property
    def is_shared(self) -> bool:
        """Always: any number of processes write to a Redis."""
        return True

    def num_rows(self, table: str) -> int:
        """Number of rows, as Redis counts them."""
        counts = self._replies([("HLEN", name) for name in self._names(table, layout.rows_name)])
        return sum(map(int, counts))

    def fetch(self, table: str, keys: NDArray[np.int64], out: NDArray[np.float32]) -> NDArray[np.bool_]:
        return self.fetch_many([FetchRequest(table, keys, out)])[0]

    def fetch_many(self, requests: Sequence[FetchRequest]) -> list[NDArray[np.bool_]]:
        found = [np.zeros(len(request.keys), np.bool_) for request in requests]
        reads = [r for request, hits in zip(requests, found, strict=True) for r in self._reads(request, hits)]
        self.client.run(reads, self._read_rows)
        missed = {request.table for request, hits in zip(requests, found, strict=True) if not hits.all()}
        self._partitionings.doubt(missed)
        return found

    def scan(self, table: str) -> Iterator[RowBatch]:
        """See EmbeddingStore. A row may come twice."""
        count = max(1, SCAN_BYTES // (4 * self.embedding_dim(table)))
        for name in self._names(table, layout.rows_name):
            self._refuse_if_closed()
            try:
                for fields in self.client.scan_hash(name, count):
                    if fields:
                        yield self._rows_of(table, fields)
                    self._refuse_if_closed()
            except WrongTypeError:
                self._note_no_hash(table, name)

    def insert(self, table: str, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """See EmbeddingStore. The mark of each row is set as well, before the row itself; then room is made."""
        self._insert(table, keys, vectors, lambda name, *rows: Write(b"HSET", name, layout.row_fields(*rows), 2))

    def insert_absent(self, table: str, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """See EmbeddingStore. No row is ever replaced, even if others write at the same time."""
        self._insert(table, keys, vectors, _write_absent)

    def _insert(
        self,
        table: str,
        keys: NDArray[np.int64],
        vectors: NDArray[np.float32],
        write: Callable[[bytes, NDArray[np.int64], NDArray[Any]], Write | WriteAbsent],
    ) -> None:
        """`write`: the command that writes some rows to a hash of that name."""
        check_insert(keys, vectors, self.embedding_dim(table))
        writes: list[Write | WriteAbsent] = []
        tag = self.namespace.tag(table)
        for partition, part in self._parts(table, keys):
            rows = keys[part], vectors[part].astype("<f4", copy=False)
            writes += [self._mark_new(tag, partition, rows[0]), write(layout.rows_name(tag, partition), *rows)]
        self.client.run(writes, self._read_numbers)
        self._make_room(table, keys)

    def erase(self, table: str, keys: NDArray[np.int64]) -> None:
        tag = self.namespace.tag(table)
        writes: list[Write] = []
        for partition, part in self._parts(table, keys):
            fields = layout.key_fields(keys[part])
            writes.append(Write(b"HDEL", layout.rows_name(tag, partition), fields, 1))
            writes.append(Write(b"HDEL", layout.times_name(tag, partition), fields, 1))
        self.client.run(writes, self._read_erased)

    @property
    def orders_updates(self) -> bool:
        """Always: see ordered_writes.py."""
        return True

    def apply(self, table: str, updates: OrderedUpdates) -> Outcome:
        """See EmbeddingStore. All or nothing of a partition's updates; rows are marked afterwards. For one thread at a
        time.
        """
        check_insert(updates.keys, updates.vectors, self.embedding_dim(table))
        self._refuse_if_closed()
        tag, partitioning = self.namespace.tag(table), self._partitioning(table)
        writes = self._ordered.of(table, tag, updates, partitioning)
        if self._ordered.are_behind:
            for write, note in zip(writes, self._replies([write.read_note() for write in writes]), strict=True):
                write.take_note(note)
        self.client.run([write for write in writes if not write.statuses], read_ordered)
        outcome = self._ordered.outcome(table, updates, writes)
        written = updates.keys[outcome.inserted == Status.WRITTEN]
        marks = [self._mark_new(tag, p, np.ascontiguousarray(written[part])) for p, part in self._parts(table, written)]
        self.client.run(marks, self._read_numbers)
        self._make_room(table, written)
        return outcome

    def forget_applied(self, table: str) -> None:
        self._replies([("UNLINK", name) for name in self._names(table, layout.applied_name)])

    def clear(self, table: str) -> None:
        """See EmbeddingStore. Redis frees the memory in its own background."""
        kinds = layout.rows_name, layout.times_name, layout.applied_name
        self._replies([("UNLINK", name) for kind in kinds for name in self._names(table, kind)])
        # Last, as it tells whose rows those are that an interrupted call leaves.
        self._replies([("UNLINK", layout.note_name(self.namespace.tag(table)))])

    def touch(self, table: str, keys: NDArray[np.int64]) -> None:
        """Set the time of keys [n], or with `evict_least_used` add up their uses, one for each time they are named.

        When several processes add to a count at the same time, some uses may be lost: counts only rank rows.
        """
        tag = self.namespace.tag(table)
        unique, counts = np.unique(keys, return_counts=True)
        if self._overflow is None or not self._overflow.counts_uses:
            writes = [set_times(tag, partition, unique[part]) for partition, part in self._parts(table, unique)]
            return self.client.run(writes, self._read_numbers)
        for partition, part in self._parts(table, unique):
            name, fields = layout.times_name(tag, partition), [key.tobytes() for key in unique[part]]
            [marks] = self._replies([("HMGET", name, *fields)])
            uses = [b"%d" % (num_uses(m) + n) for m, n in zip(marks, counts[part].tolist(), strict=True)]
            self._replies([("HSET", name, *chain.from_iterable(zip(fields, uses, strict=True)))])
        return None

    def versions(self) -> set[str]:
        """See EmbeddingStore. Looks through the whole key space."""
        return {version for _, _, version in self._hashes_of_versions()}

    def remove_versions(self, versions: Collection[str]) -> int:
        """See EmbeddingStore. Looks through the whole key space; Redis frees the memory in its own background."""
        tags = set()
        for name, tag, version in self._hashes_of_versions():
            if version in versions:
                tags.add(tag)
                self._replies([("UNLINK", name)])
        for tag in tags:
            self._replies([("UNLINK", layout.note_name(tag))])
        return len(tags)

    def _hashes_of_versions(self) -> Iterator[tuple[bytes, str, str]]:
        """Name, tag and version of every hash of this model's versions."""
        self._refuse_if_closed()
        pattern = "hps_et{" + _GLOB.sub(r"\\\g<0>", f"hps_et.{self.namespace.model}@") + "*}[vtn]"
        for name in self.client.scan(pattern):
            parts = layout.split_name(name)
            version = None if parts is None else self.namespace.version_of(parts[0])
            if parts is not None and version is not None:
                yield name, parts[0], version

    def _mark_new(self, tag: str, partition: int, keys: NDArray[np.int64]) -> Write | WriteAbsent:
        """The command that marks rows being inserted: with the time, or as used once."""
        if self._overflow is None or not self._overflow.counts_uses:
            return set_times(tag, partition, keys)
        return _write_absent(layout.times_name(tag, partition), keys, np.full((len(keys), 1), ord("1"), np.uint8))

    def _make_room(self, table: str, keys: NDArray[np.int64]) -> None:
        """Evict rows from those partitions of these keys that hold more than they may."""
        if self._overflow is not None and not table.endswith(ERASED_SUFFIX):
            partitions = sorted({partition for partition, _ in self._parts(table, keys)})
            Eviction(self._overflow, self._replies).make_room(self.namespace.tag(table), partitions)

    def check(self) -> None:
        """See EmbeddingStore. Asks every node that has rows; others may have filled it since the last check."""
        self._refuse_if_closed()
        self.client.ping()
        self.client.refuse_part_of_cluster()
        self._refuse_without_readable_table()
        self._warn_of_eviction()
        self._partitionings.doubt_all()

    def _refuse_without_readable_table(self) -> None:
        """StoreError where this user may read no table: PING needs no such permission."""
        refusal = None
        for table in self.tables:
            try:
                self.client.try_read(layout.rows_name(self.namespace.tag(table), 0))
            except StoreError as error:  # noqa: PERF203  the next table may be readable
                refusal = without_frames(error)
            else:
                return
        if refusal is not None:
            raise fresh(refusal)

    def _warn_of_eviction(self) -> None:
        """Log once if a server may evict rows. Nothing is known of it for a user without permission for `INFO`."""
        if self._is_eviction_known:
            return
        with suppress(StoreError):
            for policy in self.client.eviction_policies():
                _log.warning(_MAY_EVICT, self.url, policy)
        self._is_eviction_known = True

    def refresh(self) -> None:
        """See EmbeddingStore. Infers the partitioning of tables again that had too few rows before."""
        self._refuse_if_closed()
        self.client.refresh()
        self._partitionings.infer_doubtful()

    def incarnation(self) -> str:
        """See EmbeddingStore. A process that was started again may come from an old snapshot; a replica that became
        the master, or a master that was made a replica of another, may lack the last writes. Never changes for a user
        without permission for `INFO`.
        """
        self._refuse_if_closed()
        with suppress(StoreError):
            return self.client.incarnations()
        return ""

    def trust(self, incarnation: str) -> None:
        """See EmbeddingStore. Each connection is asked once which process it leads to."""
        self.client.trust(incarnation)

    def note(self, table: str) -> str | None:
        text = self._replies([("GET", layout.note_name(self.namespace.tag(table)))])[0]
        return None if text is None else text.decode(errors="replace")

    def set_note(self, table: str, text: str) -> None:
        self._replies([("SET", layout.note_name(self.namespace.tag(table)), text.encode())])

    def close(self) -> None:
        """Close all connections; calls under way may fail."""
        self._closed = True
        self.client.close()

    def __repr__(self) -> str:
        return f"<RedisStore {str(self.url)!r} [{self.namespace}, {len(self._embedding_dims)} tables]>"

    def num_partitions(self, table: str) -> int:
        """The number of partitions with which the table was written, inferred from its rows unless the URL gives it."""
        return self._partitioning(table).num_partitions

    def _partitioning(self, table: str) -> layout.Partitioning:
        self.embedding_dim(table)
        return self._partitionings.of(table)

    def _samples(self, table: str) -> dict[int, list[bytes]]:
        """Some keys of each partition that has any."""
        tag = self.namespace.tag(table)
        names = [layout.rows_name(tag, p) for p in range(layout.MAX_PROBED_PARTITIONS)]
        replies = self._replies([("HSCAN", name, 0, "COUNT", _PROBE_FIELDS) for name in names], lenient=True)
        samples: dict[int, list[bytes]] = {}
        other_lengths: set[int] = set()
        for partition, (name, reply) in enumerate(zip(names, replies, strict=True)):
            if isinstance(reply, WrongTypeError):
                self._note_no_hash(table, name)
                continue
            fields = list(layout.scanned(reply)[1])
            other_lengths.update(len(field) for field in fields if len(field) != 8)
            if keys := [field for field in fields if len(field) == 8]:
                samples[partition] = keys
        if other_lengths and not samples:
            found = min(other_lengths)
            raise StoreError(f"table {tag!r} in {str(self.url)!r} has keys of {found} bytes, expected 8 (int64)")
        return samples

    def _note_no_hash(self, table: str, name: bytes) -> None:
        """Count the rows of a partition, whose number is unknown, as one malformed row."""
        self._malformed.add(self, table, f"{name.decode(errors='replace')} is not a Redis hash")

    def _rows_of(self, table: str, fields: Mapping[bytes, bytes]) -> RowBatch:
        """The fields that are keys and rows; others are counted."""
        row_bytes = 4 * self.embedding_dim(table)
        good = {key: row for key, row in fields.items() if len(key) == 8 and len(row) == row_bytes}
        for key in fields.keys() - good.keys():
            what = f"key {int.from_bytes(key, 'little', signed=True)}" if len(key) == 8 else f"field {key[:32]!r}"
            self._malformed.add(self, table, f"{what} has {len(fields[key])} bytes, expected {row_bytes}")
        keys = np.frombuffer(b"".join(good), "<i8").astype(np.int64)
        return keys, np.frombuffer(b"".join(good.values()), "<f4").reshape(len(keys), row_bytes // 4)

    def _names(self, table: str, name: Callable[[str, int], bytes]) -> list[bytes]:
        return [name(self.namespace.tag(table), p) for p in range(self.num_partitions(table))]

    def _parts(self, table: str, keys: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Positions of the keys of each command, in their order, with their partition."""
        self._refuse_if_closed()
        order, bounds = layout.by_partition(np.ascontiguousarray(keys), self._partitioning(table))
        step = self._keys_per_command(table)
        for partition, (begin, end) in enumerate(pairwise(bounds)):
            for first in range(begin, end, step):
                yield partition, order[first : min(first + step, end)]

    def _keys_per_command(self, table: str) -> int:
        return max(1, BYTES_PER_BATCH // (4 * self.embedding_dim(table)))

    def _reads(self, request: FetchRequest, found: NDArray[np.bool_]) -> Iterator[Read]:
        table, keys, out = request
        self._refuse_if_closed()
        check_fetch(keys, out, self.embedding_dim(table))
        if not len(keys):
            return
        tag, step = self.namespace.tag(table), self._keys_per_command(table)
        order, commands, wire = layout.hmgets(tag, np.ascontiguousarray(keys), self._partitioning(table), max_keys=step)
        commands_per_read = max(1, step * len(commands) // len(keys)) if self._has_one_connection else 1
        sent = 0
        for first in range(0, len(commands), commands_per_read):
            part = commands[first : first + commands_per_read]
            wire_end = int(part[-1, 3])
            yield Read(tag, request, found, order, part, wire[sent:wire_end])
            sent = wire_end

    def _read_rows(self, connection: RedisConnection, reads: Sequence[Read], deadline: Deadline) -> None:
        replies = [read.replies() for read in reads]

        def on_malformed(reply: int, key: int | None, found_bytes: int) -> None:
            read, command = [(read, c) for read in reads for c in range(len(read.commands))][reply]
            self._pass_over(read, command, key, found_bytes)

        connection.read_rows(replies[0] if len(replies) == 1 else np.concatenate(replies), deadline, on_malformed)

    @staticmethod
    def _read_erased(connection: RedisConnection, writes: Sequence[Write], deadline: Deadline) -> None:
        """A value that is not a hash has no rows to keep."""
        for reply in connection.read_replies(len(writes), deadline):
            if isinstance(reply, HotrowError) and not isinstance(reply, WrongTypeError):
                raise fresh(reply)

    def _pass_over(self, read: Read, command: int, key: int | None, found_bytes: int) -> None:
        """Count malformed values as missing: one key of a command, or all of them where the value is not a hash."""
        table, keys, out = read.request
        partition, begin, end, _ = read.commands[command].tolist()
        if key is not None:
            number = int(keys[read.order[begin + key]])
            self._malformed.add_row(self, table, number, found_bytes, 4 * out.shape[1])
            return
        read.found[read.order[begin:end]] = False
        name = layout.rows_name(read.tag, partition).decode(errors="replace")
        self._malformed.add(self, table, f"{name} is not a Redis hash", end - begin)

    @staticmethod
    def _read_numbers(connection: RedisConnection, writes: Sequence[Write | WriteAbsent], deadline: Deadline) -> None:
        connection.read_lines(sum(write.num_replies for write in writes), deadline)

    def _replies(self, commands: Sequence[PlainCommand], *, lenient: bool = False) -> list[Any]:
        """See RedisClient.replies."""
        self._refuse_if_closed()
        return self.client.replies(commands, lenient=lenient)


def _write_absent(name: bytes, keys: NDArray[np.int64], values: NDArray[Any]) -> WriteAbsent:
    """The command that writes values [n, any], of the keys that a hash lacks."""
    head = layout.command_head(b"HSETNX", name, num_fields=2)
    return WriteAbsent(name, layout.row_fields(keys, values, before=head))


def list_redis_tables(url: StoreUrl, *, timeout_ms: int) -> list[StoredTable]:
    """All tables of all models in a Redis; looks through its whole key space, in small steps."""
    client = RedisClient(url, timeout_ms)
    counts: dict[str, int] = {}
    widths: dict[str, int] = {}
    try:
        client.refuse_part_of_cluster()
        for name in client.scan("hps_et{*}v"):
            parts = layout.split_name(name)
            if parts is not None:
                num_rows, widths[parts[0]] = _rows_and_bytes(client, name)
                counts[parts[0]] = counts.get(parts[0], 0) + num_rows
    finally:
        client.close()
    return [StoredTable(tag, counts[tag], widths[tag] // 4) for tag in sorted(counts)]


def _rows_and_bytes(client: RedisClient, name: bytes) -> tuple[int, int]:
    """How many rows a hash has, and how many bytes one of them."""
    try:
        scan, count = client.replies([("HSCAN", name, 0, "COUNT", 1), ("HLEN", name)])
    except WrongTypeError as error:
        raise StoreError(f"{name!r}, whose name is that of a table's rows: {error}") from None
    return int(count), len(next(iter(layout.scanned(scan)[1].values()), b""))
