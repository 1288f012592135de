"""Connections to the servers of a store, kept between calls.

A server, or the network to it, may be slow: writes of a call that was given up may be carried out much later, after
newer writes of the same rows. So a server is first told to drop connections that were closed with writes unanswered.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from inference_session.errors import UnavailableError
from inference_session.parameter_server.redis.connection import Address, Deadline, Login, RedisConnection, Writer


class ConnectionPool:
    """Connections to several servers that wait for their next use. Thread-safe."""

    def __init__(self, login: Login, max_idle: int) -> None:
        """`max_idle`: connections to one server that are kept while unused."""
        self._login = login
        self._max_idle = max_idle
        self._idle: dict[Address, list[RedisConnection]] = {}
        self._unanswered: defaultdict[Address, set[Writer]] = defaultdict(set)
        """Connections whose writes may still be carried out."""
        self._lock = threading.Lock()
        self._closed = False
        self.trusted: frozenset[str] = frozenset()
        """The processes that may be asked for rows, by their run ids; empty: all."""

    @contextmanager
    def borrow(self, deadline: Deadline) -> Iterator[BorrowedConnections]:
        """Connections for the length of a call. After an error they are closed: replies may be left in them."""
        borrowed = BorrowedConnections(self, deadline)
        try:
            yield borrowed
        except BaseException:
            borrowed.close()
            raise
        borrowed.give_back()

    def take(self, address: Address, deadline: Deadline) -> RedisConnection:
        """A connection for the caller alone."""
        with self._lock:
            idle = self._idle.get(address)
            connection = idle.pop() if idle else None
        return connection or RedisConnection(self._login, address, deadline)

    def give_up(self, address: Address, connection: RedisConnection) -> None:
        """Close a connection that may have unanswered commands."""
        if connection.writer is not None and connection.writer.number:
            with self._lock:
                self._unanswered[address].add(connection.writer)
        connection.close()

    def withdraw_unanswered(self, address: Address, connection: RedisConnection, deadline: Deadline) -> None:
        """Return, over a connection to the same server, when no write of a connection that was given up can follow."""
        with self._lock:
            given_up = self._unanswered.get(address, set()).copy()
        if given_up:
            connection.withdraw(given_up, deadline)
            with self._lock:
                self._unanswered[address] -= given_up

    def give_back(self, address: Address, connection: RedisConnection) -> None:
        """Keep a connection whose replies have all been read, for the next caller."""
        with self._lock:
            idle = self._idle.setdefault(address, [])
            keep = len(idle) < self._max_idle and not self._closed
            if keep:
                idle.append(connection)
        if not keep:
            connection.close()

    def close_idle(self) -> None:
        """Close idle connections: after a failure they are probably dead too."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for connection in (c for connections in idle.values() for c in connections):
            connection.close()

    def close(self) -> None:
        """Close idle connections, and those returned from now on."""
        self._closed = True
        self.close_idle()


class BorrowedConnections:
    """The connections of one call, several to a server where it wants them."""

    def __init__(self, pool: ConnectionPool, deadline: Deadline) -> None:
        """Made by `ConnectionPool.borrow`."""
        self._pool = pool
        self._deadline = deadline
        self._taken: dict[tuple[Address, int], RedisConnection] = {}

    def take(self, address: Address, number: int, *, trusted: bool = True) -> RedisConnection:
        """The call's connection of that number to a server.

        Raises:
            UnavailableError: with `trusted`, it leads to a process that is not, such as one that was started again
                from an old snapshot.
        """
        connection = self._taken.get((address, number))
        if connection is None:
            connection = self._taken[address, number] = self._pool.take(address, self._deadline)
            self._pool.withdraw_unanswered(address, connection, self._deadline)
            if trusted and self._pool.trusted and connection.run_id(self._deadline) not in self._pool.trusted:
                raise UnavailableError(
                    f"Redis at {connection.name} is not the process that took the last writes; "
                    "the writes that it lacks must be determined first"
                )
        return connection

    def give_back(self) -> None:
        """Return them to the pool; all replies have been read."""
        for (address, _), connection in self._taken.items():
            self._pool.give_back(address, connection)

    def close(self) -> None:
        """Close them all."""
        for (address, _), connection in self._taken.items():
            self._pool.give_up(address, connection)
