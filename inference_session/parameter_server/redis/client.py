"""Commands to the servers of a Redis: sent to those that have their hashes, and again where these have moved."""

from __future__ import annotations

import contextlib
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from inference_session.errors import HotrowError, StoreError, UnavailableError, fresh
from inference_session.parameter_server.redis import layout
from inference_session.parameter_server.redis.commands import Call, Command, asking, refuse_misfit
from inference_session.parameter_server.redis.connection import (
    MEMORY_COMMAND,
    ORIGIN_COMMAND,
    RUN_ID_COMMAND,
    Address,
    Deadline,
    DisconnectedError,
    Login,
    PlainCommand,
    RedirectedError,
    RedisConnection,
    Reply,
    WrongTypeError,
    eviction_policy_in,
    origin_in,
    run_id_in,
)
from inference_session.parameter_server.redis.connection_pool import ConnectionPool
from inference_session.parameter_server.redis.topology import Cluster, OneServer, Sentinel, Topology, masters_known_to
from inference_session.urls.store_url import StoreUrl

BYTES_PER_BATCH = 256 << 10
"""Rows in one batch of commands: enough to be worth its system calls, and little for a server to do in one go."""
SCAN_STEP = 1000
"""Names or fields that one command of a scan goes through: little enough to be no other client's delay."""
_COMMANDS_PER_BATCH = 64
BYTES_UNDER_WAY = 512 << 10
"""Rows asked for and not yet read: enough to keep the servers busy, and little for them to hold in their buffers."""
_MAX_IDLE = 16
"""Connections to one server that are kept for the next calls, in addition to those of one call."""
_MAX_ATTEMPTS = 3
_MAX_REDIRECTIONS = 5

Result = TypeVar("Result")
ReadReplies = Callable[[RedisConnection, Any, Deadline], None]
"""Reads the replies to some commands from the connection that they were sent over."""


class RedisClient:
    """The servers of one Redis. Nothing is sent before it is asked for. Thread-safe.

    Work is done in batches, each of which has `timeout_ms`: a large call may take longer while it makes progress.
    """

    def __init__(self, url: StoreUrl, timeout_ms: int, *, num_connections: int = 1) -> None:
        """`num_connections`: to one server, that one call uses side by side."""
        self._url = url
        self._timeout_ms = timeout_ms
        self._num_connections = num_connections
        login = Login.of(url, must_be_master=bool(url.sentinels))
        self._pool = ConnectionPool(login, max_idle=_MAX_IDLE + num_connections)
        self._sentinels: ConnectionPool | None = None
        self._topology = self._topology_of(url)

    def run(self, commands: Sequence[Command], read: ReadReplies) -> None:
        """Run commands on the servers that have their hashes; again where these have changed, because running any of
        our commands twice does no harm.
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
                    break  # a slot that moves between two nodes; both may have to be asked
            self._pool.close_idle()
            self._topology.refresh(deadline)
        for command in commands:
            for single in command.singles():
                self._follow(single, read, deadline)
        return None

    def replies(self, commands: Sequence[PlainCommand], *, lenient: bool = False) -> list[Any]:
        """The replies to rare commands, whose second argument is a name. An error among them is raised; with
        `lenient`, the error that a name is of another type is that command's reply instead.
        """
        calls = [Call(command) for command in commands]
        self.run(calls, _read_calls)
        for call in calls:
            if isinstance(call.reply, HotrowError) and not (lenient and isinstance(call.reply, WrongTypeError)):
                raise fresh(call.reply)
        return [call.reply for call in calls]

    def scan(self, pattern: str) -> Iterator[bytes]:
        """The names that match a pattern, on all servers; some may come twice."""
        for address in self._topology.servers(Deadline(self._timeout_ms)):
            cursor = b"-1"
            while cursor != b"0":
                command = "SCAN", max(int(cursor), 0), "MATCH", pattern, "COUNT", SCAN_STEP
                reply: Any = self._ask(address, command, Deadline(self._timeout_ms))
                cursor, names = reply
                yield from names

    def scan_hash(self, name: bytes, count: int) -> Iterator[dict[bytes, bytes]]:
        """The fields of a hash, about `count` at once; some may come twice. WrongTypeError where it is no hash.

        A cursor means nothing to another process, which would pass over fields: a scan that another one goes on with,
        after a failover, a restart or a move of the slot, begins again.
        """
        cursor, scanned_by = 0, None
        while True:
            call = Call(("HSCAN", name, cursor, "COUNT", count))
            answered_by = self._run_by_one(call)
            if cursor and answered_by != scanned_by:
                cursor = 0
                continue
            cursor, fields = layout.scanned(call.reply)
            scanned_by = answered_by
            yield fields
            if not cursor:
                return

    def _run_by_one(self, call: Call) -> str:
        """Run a command, raise the error that it is answered with, and return which process has answered it."""
        processes: list[str] = []

        def read(connection: RedisConnection, calls: Sequence[Call], deadline: Deadline) -> None:
            _read_calls(connection, calls, deadline)
            processes.append(connection.process(deadline))

        self.run([call], read)
        if isinstance(call.reply, HotrowError):
            raise fresh(call.reply)
        return processes[-1]

    def refresh(self) -> None:
        """Look for a new master, where sentinels may have made one without causing an error here."""
        if self._sentinels is not None:
            deadline = Deadline(self._timeout_ms)
            before = self._topology.servers(deadline)
            self._topology.refresh(deadline)
            if self._topology.servers(deadline) != before:
                self._pool.close_idle()

    def ping(self) -> None:
        """Raise unless all servers that have rows answer, by a Cluster's present state: one that hangs may have been
        replaced.
        """
        deadline = Deadline(self._timeout_ms)
        self._topology.refresh(deadline)
        for address in self._topology.servers(deadline):
            self._ping(address, deadline)

    def refuse_part_of_cluster(self) -> None:
        """StoreError where the URL names one of several masters of a Cluster as if it had all rows."""
        if self._url.is_cluster:
            return
        deadline = Deadline(self._timeout_ms)
        for address in self._topology.servers(deadline):
            try:
                masters = masters_known_to(address, self._ask, deadline)
            except StoreError:  # it is in no Cluster, or this user may not ask
                continue
            if len(masters) > 1:
                raise StoreError(
                    f"Redis at {address[0]}:{address[1]} is one of {len(masters)} masters of a Cluster, and has only a"
                    f" part of the rows; use {'rediss' if self._url.uses_tls else 'redis'}+cluster:// in its URL"
                )

    def try_read(self, name: bytes) -> None:
        """Raise what reading a hash raises, whichever process has it now; nothing where there is none."""
        deadline = Deadline(self._timeout_ms)
        try:
            with contextlib.suppress(WrongTypeError):  # this and a redirection come after the access list was asked
                self._ask(self._topology.address(name, deadline), ("HMGET", name, bytes(8)), deadline)
        except RedirectedError as error:
            if error.address is None:
                raise

    def incarnations(self) -> str:
        """Identifies the processes that have rows, as opposed to earlier or later ones, and whose rows they have."""
        deadline = Deadline(self._timeout_ms)
        return " ".join(sorted(self._of_each_server(self._incarnation, deadline)))

    def eviction_policies(self) -> set[str]:
        """The policies of those servers that may evict rows; StoreError where the user lacks the permission to ask."""
        deadline = Deadline(self._timeout_ms)
        replies = self._of_each_server(lambda server, deadline: self._ask(server, MEMORY_COMMAND, deadline), deadline)
        return {*map(eviction_policy_in, replies)} - {""}

    def trust(self, incarnations: str) -> None:
        """Ask only these processes for rows, as `incarnations` gives them; empty: any."""
        self._pool.trusted = frozenset(each.partition("/")[0] for each in incarnations.split())

    def close(self) -> None:
        """Close all connections; calls under way may fail."""
        self._pool.close()
        if self._sentinels is not None:
            self._sentinels.close()

    def _topology_of(self, url: StoreUrl) -> Topology:
        if url.sentinels:
            self._sentinels = ConnectionPool(Login.of(url.of_sentinels), max_idle=1)
            return Sentinel(url, partial(self._ask, pool=self._sentinels))
        return Cluster(url, self._ask) if url.is_cluster else OneServer(url)

    def _ping(self, address: Address, deadline: Deadline) -> None:
        try:
            self._ask(address, ("PING",), deadline)
        except UnavailableError as error:
            # A Redis whose disk takes no snapshot refuses PING, as it refuses writes. Rows can still be read.
            if "MISCONF" not in str(error):
                raise

    def _of_each_server(self, ask: Callable[[Address, Deadline], Result], deadline: Deadline) -> list[Result]:
        """What each server that has rows answers. One that does not may have left its Cluster, and nothing else would
        show that where no row of ours was there.
        """
        try:
            return [ask(address, deadline) for address in self._topology.servers(deadline)]
        except DisconnectedError:
            self._topology.refresh(deadline)
        return [ask(address, deadline) for address in self._topology.servers(deadline)]

    def _incarnation(self, address: Address, deadline: Deadline) -> str:
        run_id = run_id_in(self._ask(address, RUN_ID_COMMAND, deadline))
        origin = origin_in(self._ask(address, ORIGIN_COMMAND, deadline))
        return f"{run_id}/{origin}" if origin else run_id

    def _ask(
        self,
        address: Address,
        command: PlainCommand,
        deadline: Deadline,
        pool: ConnectionPool | None = None,
    ) -> Reply:
        """One server's reply to one command; over a new connection where the kept one is dead."""
        pool = pool or self._pool
        try:
            return _ask_once(pool, address, command, deadline)
        except DisconnectedError:
            pool.close_idle()
        return _ask_once(pool, address, command, deadline)

    def _send_and_read(self, commands: Sequence[Command], read: ReadReplies, deadline: Deadline) -> None:
        """Keep the servers busy with some batches while the replies to earlier ones are read."""
        under_way: deque[tuple[RedisConnection, list[Command]]] = deque()
        num_bytes = 0
        with self._pool.borrow(deadline) as connections:

            def read_first() -> int:
                connection, batch = under_way.popleft()
                read(connection, batch, deadline)
                deadline.restart()
                return _num_bytes(batch)

            for (address, lane), batch in self._batches(commands, deadline):
                connection = connections.take(address, lane)
                if any(command.may_write for command in batch):
                    connection.expect_writes(deadline)
                connection.send(b"".join([command.payload() for command in batch]), deadline)
                under_way.append((connection, batch))
                num_bytes += _num_bytes(batch)
                while num_bytes > BYTES_UNDER_WAY:
                    num_bytes -= read_first()
            while under_way:
                read_first()

    def _batches(
        self, commands: Sequence[Command], deadline: Deadline
    ) -> Iterator[tuple[tuple[Address, int], list[Command]]]:
        """Commands for the same connection, as many as are worth sending together.

        All commands of a partition take the same connection, because they must be done in order.
        """
        batches: dict[tuple[Address, int], tuple[list[Command], int]] = {}
        for command in commands:
            partition = command.name[:-1]  # without the letter that its hashes differ by
            where = self._topology.address(command.name, deadline), zlib.crc32(partition) % self._num_connections
            batch, num_bytes = batches.get(where, ([], 0))
            batch.append(command)
            batches[where] = batch, num_bytes + command.num_bytes
            if len(batch) == _COMMANDS_PER_BATCH or num_bytes + command.num_bytes >= BYTES_PER_BATCH:
                yield where, batches.pop(where)[0]
        yield from ((where, batch) for where, (batch, _) in batches.items())

    def _follow(self, command: Command, read: ReadReplies, deadline: Deadline) -> None:
        """Run one command on the node of a Cluster that another one names, as often as one names another."""
        address, is_ask = self._topology.address(command.name, deadline), False
        for attempt in range(_MAX_REDIRECTIONS):
            try:
                with self._pool.borrow(deadline) as connections:
                    connection = connections.take(address, 0)
                    if command.may_write:
                        connection.expect_writes(deadline)
                    connection.send(asking(command) if is_ask else command.payload(), deadline)
                    connection.read_lines(int(is_ask), deadline)
                    read(connection, [command], deadline)
                break
            except RedirectedError as error:
                if error.address is None or attempt == _MAX_REDIRECTIONS - 1:
                    raise
                address, is_ask = error.address, error.is_ask
        deadline.restart()


def _ask_once(pool: ConnectionPool, address: Address, command: PlainCommand, deadline: Deadline) -> Reply:
    with pool.borrow(deadline) as connections:
        [reply] = connections.take(address, 0, trusted=False).call([command], deadline)
    if isinstance(reply, HotrowError):
        raise fresh(reply)
    refuse_misfit(command, reply)
    return reply


def _num_bytes(batch: Sequence[Command]) -> int:
    return sum(command.num_bytes for command in batch)


def _read_calls(connection: RedisConnection, calls: Sequence[Call], deadline: Deadline) -> None:
    for call, reply in zip(calls, connection.read_replies(len(calls), deadline), strict=True):
        refuse_misfit(call.arguments, reply)
        call.reply = reply
