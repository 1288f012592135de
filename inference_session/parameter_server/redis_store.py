"""Redis as a tier: standalone or Cluster, over TCP, TLS or a Unix socket, in HPS's layout (redis_layout.py).

Rows travel over our own connections (redis_connection.py): the commands of all partitions and tables of a call are
sent over several connections before the first reply is read, so that the server looks up while we copy. Whatever is
rare goes through the `redis` package: finding a Cluster's nodes, counting, scanning, and rows of a slot that is just
moving from one node to another.
"""

from __future__ import annotations

import re
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import (
    SessionClosedError,
    StoreError,
)
from inference_session.parameter_server import redis_layout as layout
from inference_session.parameter_server.base import (
    SCAN_BYTES,
    BoundStore,
    FetchRequest,
    Rows,
    check_fetch,
    check_insert,
)
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.redis_commands import Read, Write, WriteAbsent, set_times
from inference_session.parameter_server.redis_connection import (
    Address,
    ConnectionPool,
    Deadline,
    DisconnectedError,
    Login,
    RedirectedError,
    RedisConnection,
)
from inference_session.parameter_server.redis_overflow import Eviction, Overflow, num_uses
from inference_session.parameter_server.redis_replies import compile_kernels
from inference_session.parameter_server.redis_servers import SCAN_STEP, RedisServers
from inference_session.parameter_server.store_url import DEFAULT_TIMEOUT_MS, StoreUrl

DEFAULT_CONNECTIONS = 1
"""Connections to one server that a call uses side by side. A server of one thread gains nothing by a second one, and
the call has two sockets to wait for; calls of several threads have connections of their own anyway."""
_MAX_CONNECTIONS = 1024
_MAX_PARTITIONS = 1 << 16
"""Far above what anybody has: their names are laid out in memory, and a digit too many would fill it."""
_BYTES_PER_BATCH = 256 << 10
"""Rows in one batch of commands: enough to be worth its system calls, and little for a server to do in one go."""
_COMMANDS_PER_BATCH = 64
_BYTES_UNDER_WAY = 512 << 10
"""Rows asked for and not yet read: enough to keep the servers busy, and little for them to hold in their buffers."""
_MAX_IDLE = 16
"""Connections to one server that are kept for the next calls, beside those of one call."""
_MAX_ATTEMPTS = 3
_PROBE_FIELDS = 32
_PROBE_INTERVAL_S = 2.0
_GLOB = re.compile(r"[*?\[\]^\\-]")
"""Characters that mean something in a pattern of Redis."""


_Reader = Callable[[RedisConnection, Any, Deadline], None]


def _num_bytes(batch: list[Any]) -> int:
    return sum(command.num_bytes for command in batch)


class RedisStore(BoundStore):
    """The tables of one model in a Redis. Nothing is sent before it is needed: a Redis that is down can be opened."""

    def __init__(
        self,
        url: StoreUrl,
        namespace: Namespace,
        embedding_dims: Mapping[str, int],
        *,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
    ) -> None:
        """See `store_url.create_store`."""
        compile_kernels()
        layout.compile_kernels()
        self.url = url
        self.namespace = namespace
        super().__init__(embedding_dims)
        self._timeout_ms = timeout_ms
        self._num_connections = url.count("connections", DEFAULT_CONNECTIONS, _MAX_CONNECTIONS)
        self._partitionings: dict[str, layout.Partitioning] = {}
        self._certain: set[str] = set()
        """Tables with one partitioning only that their rows fit."""
        if "partitions" in url.options:
            given = layout.Partitioning(url.count("partitions", layout.DEFAULT_PARTITIONS, _MAX_PARTITIONS))
            self._partitionings = dict.fromkeys(embedding_dims, given)
            self._certain = set(embedding_dims)
        self._doubtful: set[str] = set()
        """Tables without that in which keys were not found."""
        self._next_probe = 0.0
        self._overflow = Overflow.of(url)
        self._servers = RedisServers(url, timeout_ms)
        self._pool = ConnectionPool(Login.of(url), max_idle=_MAX_IDLE + self._num_connections)
        self._closed = False

    @property
    def supports_writes(self) -> bool:
        """Always, though a replica may refuse them."""
        return True

    def num_rows(self, table: str) -> int:
        """Number of rows, as Redis counts them."""
        counts = self._pipeline([("HLEN", name) for name in self._names(table, layout.rows_name)])
        return sum(map(int, counts))

    def fetch(self, table: str, keys: NDArray[np.int64], out: NDArray[np.float32]) -> NDArray[np.bool_]:
        """See EmbeddingStore."""
        return self.fetch_many([FetchRequest(table, keys, out)])[0]

    def fetch_many(self, requests: Sequence[FetchRequest]) -> list[NDArray[np.bool_]]:
        """See EmbeddingStore."""
        found = [np.zeros(len(request.keys), np.bool_) for request in requests]
        reads = [r for request, hits in zip(requests, found, strict=True) for r in self._reads(request, hits)]
        self._run(reads, self._read_rows)
        missed = {request.table for request, hits in zip(requests, found, strict=True) if not hits.all()}
        self._doubtful |= missed - self._certain
        return found

    def scan(self, table: str) -> Iterator[Rows]:
        """See EmbeddingStore. A row may come twice."""
        row_bytes = 4 * self.embedding_dim(table)
        count = max(1, SCAN_BYTES // row_bytes)
        for name in self._names(table, layout.rows_name):
            cursor = -1
            while cursor:
                [(cursor, fields)] = self._pipeline([("HSCAN", name, max(cursor, 0), "COUNT", count)])
                if fields:
                    self._refuse_other_widths(table, fields, row_bytes)
                    keys = np.frombuffer(b"".join(fields), "<i8").astype(np.int64)
                    yield keys, np.frombuffer(b"".join(fields.values()), "<f4").reshape(len(keys), -1)

    def insert(self, table: str, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """See EmbeddingStore. The mark of each row is set as well, before the row itself; then room is made."""
        check_insert(keys, vectors, self.embedding_dim(table))
        writes: list[Write | WriteAbsent] = []
        tag = self.namespace.tag(table)
        for partition, part in self._parts(table, keys):
            rows = layout.row_fields(keys[part], vectors[part].astype("<f4", copy=False))
            writes.append(self._mark_new(tag, partition, keys[part]))
            writes.append(Write(b"HSET", layout.rows_name(tag, partition), rows, 2))
        self._run(writes, self._read_numbers)
        self._make_room(table, keys)

    def insert_absent(self, table: str, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """See EmbeddingStore. No row is ever replaced, whoever writes at the same moment."""
        check_insert(keys, vectors, self.embedding_dim(table))
        writes: list[Write | WriteAbsent] = []
        tag = self.namespace.tag(table)
        for partition, part in self._parts(table, keys):
            name = layout.rows_name(tag, partition)
            head = layout.command_head(b"HSETNX", name, num_fields=2)
            rows = layout.row_fields(keys[part], vectors[part].astype("<f4", copy=False), before=head)
            writes += [self._mark_new(tag, partition, keys[part]), WriteAbsent(name, rows)]
        self._run(writes, self._read_numbers)
        self._make_room(table, keys)

    def erase(self, table: str, keys: NDArray[np.int64]) -> None:
        """See EmbeddingStore."""
        tag = self.namespace.tag(table)
        writes = []
        for partition, part in self._parts(table, keys):
            fields = layout.key_fields(keys[part])
            writes.append(Write(b"HDEL", layout.rows_name(tag, partition), fields, 1))
            writes.append(Write(b"HDEL", layout.times_name(tag, partition), fields, 1))
        self._run(writes, self._read_numbers)

    def clear(self, table: str) -> None:
        """See EmbeddingStore. Redis frees the memory in its own background."""
        names = self._names(table, layout.rows_name) + self._names(table, layout.times_name)
        self._pipeline([("UNLINK", name) for name in (*names, layout.note_name(self.namespace.tag(table)))])

    def touch(self, table: str, keys: NDArray[np.int64]) -> None:
        """Set the time of these keys, or with `evict_least_used` add up their uses, one for each time they are named.

        Of counts that several processes add to at the same moment some may be lost: they only rank rows.
        """
        tag = self.namespace.tag(table)
        unique, counts = np.unique(keys, return_counts=True)
        if self._overflow is None or not self._overflow.counts_uses:
            writes = [set_times(tag, partition, unique[part]) for partition, part in self._parts(table, unique)]
            return self._run(writes, self._read_numbers)
        for partition, part in self._parts(table, unique):
            name, fields = layout.times_name(tag, partition), [key.tobytes() for key in unique[part]]
            [marks] = self._pipeline([("HMGET", name, *fields)])
            uses = [b"%d" % (num_uses(m) + n) for m, n in zip(marks, counts[part].tolist(), strict=True)]
            self._pipeline([("HSET", name, *chain.from_iterable(zip(fields, uses, strict=True)))])
        return None

    def versions(self) -> set[str]:
        """See EmbeddingStore. Looks through the whole key space."""
        return {version for _, _, version in self._hashes_of_versions()}

    def remove_versions(self, versions: Collection[str]) -> int:
        """See EmbeddingStore. Looks through the whole key space; Redis frees the memory in its own background."""
        tags = set()
        with self._servers.client() as client:
            for name, tag, version in self._hashes_of_versions():
                if version in versions:
                    tags.add(tag)
                    client.unlink(name)
            for tag in tags:
                client.unlink(layout.note_name(tag))
        return len(tags)

    def _hashes_of_versions(self) -> Iterator[tuple[bytes, str, str]]:
        """Name, tag and version of every hash of this model's versions."""
        self._refuse_if_closed()
        pattern = "hps_et{" + _GLOB.sub(r"\\\g<0>", f"hps_et.{self.namespace.model}@") + "*}[vt]"
        with self._servers.client() as client:
            for name in client.scan_iter(match=pattern, count=SCAN_STEP):
                parts = layout.split_name(name)
                version = None if parts is None else self.namespace.version_of(parts[0])
                if parts is not None and version is not None:
                    yield name, parts[0], version

    def _mark_new(self, tag: str, partition: int, keys: NDArray[np.int64]) -> Write | WriteAbsent:
        """The command that marks rows which are just being inserted: with the time, or as used once."""
        if self._overflow is None or not self._overflow.counts_uses:
            return set_times(tag, partition, keys)
        name = layout.times_name(tag, partition)
        head = layout.command_head(b"HSETNX", name, num_fields=2)
        return WriteAbsent(name, layout.row_fields(keys, np.full((len(keys), 1), ord("1"), np.uint8), before=head))

    def _make_room(self, table: str, keys: NDArray[np.int64]) -> None:
        """Evict rows from those partitions of these keys that hold more than they may."""
        if self._overflow is not None:
            partitions = sorted({partition for partition, _ in self._parts(table, keys)})
            Eviction(self._overflow, self._pipeline).make_room(self.namespace.tag(table), partitions)

    def check(self) -> None:
        """See EmbeddingStore. Asks every node that has rows; others may have filled it since we last heard of it."""
        self._refuse_if_closed()
        self._servers.ping()
        if "partitions" not in self.url.options:
            self._certain.clear()
            self._doubtful, self._next_probe = set(self._partitionings), 0.0

    def refresh(self) -> None:
        """See EmbeddingStore. Tells anew how tables are partitioned that had too few rows for it before."""
        if self._doubtful and time.monotonic() >= self._next_probe:
            self._next_probe = time.monotonic() + _PROBE_INTERVAL_S
            doubtful, self._doubtful = self._doubtful, set()
            for table in doubtful:
                self._probe(table)

    def incarnation(self) -> str:
        """See EmbeddingStore. A process that was started again may come from an old snapshot, a replica that became
        the master may not have heard of the last writes. Never changes for a user who may not ask (`INFO`).
        """
        self._refuse_if_closed()
        with suppress(StoreError):
            return self._servers.run_ids()
        return ""

    def note(self, table: str) -> str | None:
        """See EmbeddingStore."""
        text = self._pipeline([("GET", layout.note_name(self.namespace.tag(table)))])[0]
        return None if text is None else text.decode(errors="replace")

    def set_note(self, table: str, text: str) -> None:
        """See EmbeddingStore."""
        self._pipeline([("SET", layout.note_name(self.namespace.tag(table)), text.encode())])

    def close(self) -> None:
        """Close all connections; calls under way may fail."""
        self._closed = True
        self._pool.close()
        self._servers.close()

    def __repr__(self) -> str:
        return f"<RedisStore {str(self.url)!r} [{self.namespace}, {len(self._embedding_dims)} tables]>"

    def num_partitions(self, table: str) -> int:
        """By how many partitions the table was written, as far as its rows tell, unless the URL says it."""
        return self._partitioning(table).num_partitions

    def _partitioning(self, table: str) -> layout.Partitioning:
        self.embedding_dim(table)
        return self._partitionings.get(table) or self._probe(table)

    def _probe(self, table: str) -> layout.Partitioning:
        """Tell the partitioning from rows; where they fit several, that which has been used stays if it is one."""
        tag = self.namespace.tag(table)
        names = [layout.rows_name(tag, p) for p in range(layout.MAX_PROBED_PARTITIONS)]
        replies = self._pipeline([("HSCAN", name, 0, "COUNT", _PROBE_FIELDS) for name in names])
        samples = {p: list(rows) for p, (_, rows) in enumerate(replies) if rows}
        wrong = next((key for keys in samples.values() for key in keys if len(key) != 8), None)
        if wrong is not None:
            raise StoreError(f"table {tag!r} in {str(self.url)!r} has a key of {len(wrong)} bytes, expected 8 (int64)")
        fitting = layout.fitting_partitionings(samples)
        if not fitting:
            raise StoreError(
                f"table {tag!r} in {str(self.url)!r}: its rows fit no number of partitions up to"
                f" {layout.MAX_PROBED_PARTITIONS}; add ?partitions=N to the URL if you know it"
            )
        if len(fitting) == 1:
            self._certain.add(table)
        used = self._partitionings.get(table)
        partitioning = self._partitionings[table] = used if used in fitting else fitting[0]
        return partitioning

    def _refuse_other_widths(self, table: str, fields: Mapping[bytes, bytes], row_bytes: int) -> None:
        other = next(((k, r) for k, r in fields.items() if len(k) != 8 or len(r) != row_bytes), None)
        if other is not None:
            raise StoreError(
                f"table {table!r} in {str(self.url)!r} has a key of {len(other[0])} bytes with a row of"
                f" {len(other[1])}, expected 8 and {row_bytes}"
            )

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
        return max(1, _BYTES_PER_BATCH // (4 * self.embedding_dim(table)))

    def _reads(self, request: FetchRequest, found: NDArray[np.bool_]) -> Iterator[Read]:
        table, keys, out = request
        self._refuse_if_closed()
        check_fetch(keys, out, self.embedding_dim(table))
        if not len(keys):
            return
        tag, step = self.namespace.tag(table), self._keys_per_command(table)
        order, commands, wire = layout.hmgets(tag, np.ascontiguousarray(keys), self._partitioning(table), max_keys=step)
        has_one_connection = not self.url.is_cluster and self._num_connections == 1
        commands_per_read = max(1, step * len(commands) // len(keys)) if has_one_connection else 1
        sent = 0
        for first in range(0, len(commands), commands_per_read):
            part = commands[first : first + commands_per_read]
            wire_end = int(part[-1, 3])
            yield Read(tag, request, found, order, part, wire[sent:wire_end])
            sent = wire_end

    def _run(self, commands: Sequence[Any], read: _Reader) -> None:
        """Run commands on the servers that have their hashes; again where these have changed, for doing any of our
        commands twice does no harm.
        """
        deadline = Deadline(self._timeout_ms)
        for attempt in range(_MAX_ATTEMPTS):
            try:
                return self._send_and_read(commands, read, deadline)
            except DisconnectedError:
                if attempt == _MAX_ATTEMPTS - 1:
                    raise
            except RedirectedError:
                if attempt > 0:
                    break  # a slot on its way between two nodes; the package knows how to ask both
            self._pool.close_idle()
            self._servers.refresh()
        with self._servers.client() as client:
            for command in commands:
                command.run(client)
        return None

    def _send_and_read(self, commands: Sequence[Any], read: _Reader, deadline: Deadline) -> None:
        """Keep the servers busy with some batches while the replies to earlier ones are read."""
        under_way: deque[tuple[RedisConnection, list[Any]]] = deque()
        num_bytes = 0
        with self._pool.borrow(deadline) as connections:
            for (address, lane), batch in self._batches(commands):
                connection = connections.take(address, lane)
                connection.send(b"".join([command.payload() for command in batch]), deadline)
                under_way.append((connection, batch))
                num_bytes += _num_bytes(batch)
                while num_bytes > _BYTES_UNDER_WAY:
                    first_connection, first = under_way.popleft()
                    num_bytes -= _num_bytes(first)
                    read(first_connection, first, deadline)
            for connection, batch in under_way:
                read(connection, batch, deadline)

    def _batches(self, commands: Sequence[Any]) -> Iterator[tuple[tuple[Address, int], list[Any]]]:
        """Commands for the same connection, as many as are worth sending together.

        All commands of a partition take the same connection, for they must be done in their order.
        """
        batches: dict[tuple[Address, int], tuple[list[Any], int]] = {}
        for command in commands:
            partition = command.name[:-1]  # without the `v` or `t` that its two hashes differ by
            where = self._servers.address(command.name), zlib.crc32(partition) % self._num_connections
            batch, num_bytes = batches.get(where, ([], 0))
            batch.append(command)
            batches[where] = batch, num_bytes + command.num_bytes
            if len(batch) == _COMMANDS_PER_BATCH or num_bytes + command.num_bytes >= _BYTES_PER_BATCH:
                yield where, batches.pop(where)[0]
        yield from ((where, batch) for where, (batch, _) in batches.items())

    @staticmethod
    def _read_rows(connection: RedisConnection, reads: Sequence[Read], deadline: Deadline) -> None:
        replies = [read.replies() for read in reads]
        tables = [read.request.table for read, expected in zip(reads, replies, strict=True) for _ in expected]
        connection.read_rows(replies[0] if len(replies) == 1 else np.concatenate(replies), tables, deadline)

    @staticmethod
    def _read_numbers(connection: RedisConnection, writes: Sequence[Write | WriteAbsent], deadline: Deadline) -> None:
        connection.read_lines(sum(write.num_replies for write in writes), deadline)

    def _pipeline(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run rare commands through the `redis` package, in one go."""
        self._refuse_if_closed()
        with self._servers.client() as client, client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = pipeline.execute()
            return replies

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise SessionClosedError(f"{self!r} has been closed")
