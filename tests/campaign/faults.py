"""Faults, and how they heal. Each fault is one object: `start`, later `heal`."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from tests.campaign.clock import Clock
from tests.campaign.contents import MODEL, TABLES
from tests.campaign.expectations import Expectations, Permit
from tests.campaign.journal import Journal
from tests.campaign.plan import CATCH_UP_S
from tests.campaign.target import TritonTarget
from tests.testing.broker import Broker
from tests.testing.proxy import Network, Proxy
from tests.testing.servers import RedisSentinelServers, RedisServer, wait_until


class Fault(Protocol):
    """One thing that can go wrong."""

    permits: tuple[Permit, ...]
    """Deviations that the documentation allows while it lasts."""
    what: str
    """The faulty component: it has one fault at a time."""

    def start(self) -> None:
        """Begin."""

    def heal(self) -> None:
        """End."""


class RedisKilled:
    """kill -9; it comes back empty, or from the last snapshot."""

    permits: tuple[Permit, ...] = ()
    what = "volatile"

    def __init__(self, server: RedisServer) -> None:
        self.server = server

    def start(self) -> None:
        """Kill it."""
        self.server.stop(signal.SIGKILL)

    def heal(self) -> None:
        """Start it again."""
        self.server.start()


class RedisFrozen(RedisKilled):
    """SIGSTOP and SIGCONT."""

    def start(self) -> None:
        """Stop it."""
        self.server.send_signal(signal.SIGSTOP)

    def heal(self) -> None:
        """Let it go on."""
        self.server.send_signal(signal.SIGCONT)


class RedisEmptied(RedisKilled):
    """Deletes all rows at once."""

    def start(self) -> None:
        """Empty it."""
        with self.server.client() as client:
            client.flushall()

    def heal(self) -> None:
        """Nothing is left to do."""


class RedisRestored(RedisKilled):
    """Takes a snapshot now; later the server is killed and started from it."""

    def start(self) -> None:
        """Write the snapshot."""
        with self.server.client() as client:
            client.save()

    def heal(self) -> None:
        """Go back in time."""
        self.server.stop(signal.SIGKILL)
        self.server.start()


class RedisFull(RedisKilled):
    """The server refuses rows."""

    def start(self) -> None:
        """Leave it no memory."""
        with self.server.client() as client:
            client.config_set("maxmemory", "1")

    def heal(self) -> None:
        """Remove the memory limit."""
        with self.server.client() as client:
            client.config_set("maxmemory", "0")


class RedisReadOnly(RedisKilled):
    """A replica of a master that does not exist: it answers, and refuses rows."""

    def start(self) -> None:
        """Make it a replica."""
        with self.server.client() as client:
            client.replicaof("127.0.0.1", 1)

    def heal(self) -> None:
        """Make it a master."""
        with self.server.client() as client:
            client.replicaof("NO", "ONE")


class BrokerFrozen:
    """SIGSTOP and SIGCONT."""

    permits: tuple[Permit, ...] = ()
    what = "stream"

    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    def start(self) -> None:
        """Stop it."""
        self.broker.send_signal(signal.SIGSTOP)

    def heal(self) -> None:
        """Let it go on."""
        self.broker.send_signal(signal.SIGCONT)


class BrokerEmptied(BrokerFrozen):
    """kill -9 of a broker that keeps nothing; its topics are created again, and rows published again."""

    lose: Callable[[Callable[[], None]], None]

    def __init__(self, broker: Broker, lose: Callable[[Callable[[], None]], None]) -> None:
        super().__init__(broker)
        self.lose = lose

    def start(self) -> None:
        """Lose all topics."""
        self.lose(self._lose)

    def heal(self) -> None:
        """Rows are published already."""

    def _lose(self) -> None:
        self.broker.stop()
        self.broker.start()


class TopicsDeleted(BrokerEmptied):
    """The topics of the model are deleted and created again, and rows published again."""

    def _lose(self) -> None:
        for table in TABLES:
            self.broker.delete_topic(f"hps_et.{MODEL}.{table.name}")


class NetworkFault:
    """The network path to a Redis, or to a broker, is faulty."""

    permits: tuple[Permit, ...] = ()

    def __init__(self, what: str, proxy: Proxy, network: Network) -> None:
        self.what = what
        self.proxy = proxy
        self.network = network

    def __str__(self) -> str:
        return f"network of the {self.what}: {self.network.value}"

    def start(self) -> None:
        """Break the network path."""
        self.proxy.set(self.network)

    def heal(self) -> None:
        """Pass everything on."""
        self.proxy.set(Network.GOOD)


def network_faults(what: str, proxy: Proxy) -> list[Callable[[], Fault]]:
    """All of one network."""
    kinds = (Network.CUT, Network.SILENT, Network.SLOW)
    return [lambda kind=kind: NetworkFault(what, proxy, kind) for kind in kinds]  # type: ignore[misc]


def broker_faults(broker: Broker, lose: Callable[[Callable[[], None]], None]) -> list[Callable[[], Fault]]:
    """All of a broker."""
    return [lambda: BrokerFrozen(broker), lambda: BrokerEmptied(broker, lose), lambda: TopicsDeleted(broker, lose)]


class ProcessKilled:
    """kill -9 of a process that serves; its supervisor starts another."""

    permits: tuple[Permit, ...] = (Permit.ERRORS, Permit.OLD_ROWS)
    """Old rows: the new process serves after `catch_up_s` in any case, and a busy machine may take longer."""
    what = "server"

    def __init__(self, target: TritonTarget, process: str) -> None:
        self.target = target
        self.process = process

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.process}"

    def start(self) -> None:
        """Kill it."""
        self.target.process(self.process).kill()

    def heal(self) -> None:
        """Wait until requests are answered again, by one process."""
        wait_until(self.target.answers, "answers")
        self.target.process("stub")


class StubFrozen(ProcessKilled):
    """SIGSTOP of a backend process; the launcher replaces it, and ends it once another serves. Until then it is the
    writer of its RocksDB, so that the other may serve before it has applied what was published.
    """

    def start(self) -> None:
        """Stop it."""
        self.target.process("stub").suspend()


class ServerKilled(ProcessKilled):
    """kill -9 of the server, or of `hotrow serve`: where that ends, it is started again, and serves the newest version.

    The launcher starts a server again that went down with a backend process, with the versions that served.
    """

    def __init__(self, target: TritonTarget, process: str, operator: Restarts) -> None:
        super().__init__(target, process)
        self.operator = operator

    def start(self) -> None:
        """Kill it."""
        self.operator.expect_restart()
        super().start()

    def heal(self) -> None:
        """Wait for answers, and start `hotrow serve` again if need be."""
        if self.process == "launcher":
            wait_until(lambda: not self.target.answers(), "the server's end")
        self.operator.take_restart(self.target.recover())


class Restarts(Protocol):
    """The object that knows which version serves."""

    def expect_restart(self) -> None:
        """From now on the newest version may also serve."""

    def take_restart(self, number: int) -> None:
        """The server answers again, with this content."""


class DiskFull:
    """A file fills the file system where the RocksDBs are."""

    permits: tuple[Permit, ...] = ()
    what = "persistent"

    def __init__(self, folder: Path) -> None:
        self.filler = folder / "filler"

    def start(self) -> None:
        """Leave no byte."""
        assert self.filler.parent.is_mount(), "it would be the disk of this machine that is filled"
        with self.filler.open("wb", buffering=0) as file:
            for num_bytes in (1 << 20, 4096, 1):
                with contextlib.suppress(OSError):  # no room is left for this many
                    while True:
                        file.write(bytes(num_bytes))

    def heal(self) -> None:
        """Make room."""
        self.filler.unlink()


class ClockJump:
    """The wall clock jumps, and later back."""

    permits: tuple[Permit, ...] = ()
    what = "clock"

    def __init__(self, clock: Clock, off_s: int) -> None:
        self.clock = clock
        self.off_s = off_s

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.off_s:+d} s"

    def start(self) -> None:
        """Jump."""
        self.clock.set(self.off_s)

    def heal(self) -> None:
        """Jump back."""
        self.clock.set(0)


def clock_faults(clock: Clock) -> list[Callable[[], Fault]]:
    """A second, an hour and a month, to both sides."""
    return [lambda s=s: ClockJump(clock, s) for s in (-2_600_000, -3600, -1, 1, 3600, 2_600_000)]  # type: ignore[misc]


def triton_faults(target: TritonTarget, operator: Restarts) -> list[Callable[[], Fault]]:
    """All of a served model."""
    return [
        lambda: ProcessKilled(target, "stub"),
        lambda: StubFrozen(target, "stub"),
        lambda: ServerKilled(target, "server", operator),
        lambda: ServerKilled(target, "launcher", operator),
    ]


def redis_faults(server: RedisServer) -> list[Callable[[], Fault]]:
    """All of one Redis."""
    kinds = (RedisKilled, RedisFrozen, RedisEmptied, RedisRestored, RedisFull, RedisReadOnly)
    return [lambda kind=kind: kind(server) for kind in kinds]  # type: ignore[misc]


class Fleet(Protocol):
    """Several Redis servers that replace each other."""

    def wait_until_ready(self) -> None:
        """Return when all are up, and replicas follow their masters."""


class NodeKilled(RedisKilled):
    """One of several servers."""

    def __init__(self, fleet: Fleet, server: RedisServer) -> None:
        super().__init__(server)
        self.fleet = fleet

    def heal(self) -> None:
        """Start it again, and wait until the others have taken it back."""
        super().heal()
        self.fleet.wait_until_ready()


class NodeFrozen(RedisFrozen):
    """One of several servers."""

    def __init__(self, fleet: Fleet, server: RedisServer) -> None:
        super().__init__(server)
        self.fleet = fleet

    def heal(self) -> None:
        """Let it go on, and wait until the others have taken it back."""
        super().heal()
        self.fleet.wait_until_ready()


def fleet_faults(fleet: Fleet, servers: Sequence[RedisServer]) -> list[Callable[[], Fault]]:
    """All of any one of several servers."""
    return [lambda k=kind, s=server: k(fleet, s) for server in servers for kind in (NodeKilled, NodeFrozen)]  # type: ignore[misc]


def sentinel_faults(servers: RedisSentinelServers) -> list[Callable[[], Fault]]:
    """All of a master and its replica. That which began as the replica is not killed: it would come back as the other
    one's replica, as its options say, also where it has become the master.
    """
    both = servers.master, servers.replica
    frozen = [lambda s=server: NodeFrozen(servers, s) for server in both]  # type: ignore[misc]
    return [lambda: NodeKilled(servers, servers.master), *frozen]


_LONGEST_S = 8.0
"""Short enough that no client of a frozen broker (15 s) gives up, so the order of its messages is known."""
_MOST = 2
"""Faults at a time."""
_MOST_STEPS = 5


class Faults:
    """The active faults of one deployment. Used by one thread."""

    def __init__(
        self, rng: random.Random, journal: Journal, expectations: Expectations, *, is_redis_alone: bool = False
    ) -> None:
        """`is_redis_alone`: whether what has been written is in a Redis and nowhere else."""
        self.possible: list[Callable[[], Fault]] = []
        self._is_redis_alone = is_redis_alone
        self._rng = rng
        self._journal = journal
        self._expectations = expectations
        self._active: dict[Fault, tuple[int, float]] = {}
        """Each with the steps that it has left, and when it began."""

    def is_healthy(self, what: str) -> bool:
        """Whether no fault of it is active."""
        return all(fault.what != what for fault in self._active)

    def start_one(self) -> bool:
        """Begin a fault, if any fits."""
        fault = self._rng.choice(self.possible)() if self.possible else None
        num_steps = self._rng.randrange(_MOST_STEPS)
        if fault is None or len(self._active) >= _MOST or not self._is_free(fault.what):
            return False
        self._journal.fault(_name(fault))
        self._expectations.permit(_name(fault), *fault.permits)
        self._active[fault] = num_steps, time.monotonic()
        starts_without_brokers = not (self.is_healthy("server") or self.is_healthy("stream"))
        if starts_without_brokers or isinstance(fault, BrokerEmptied):
            self._expectations.permit("stream behind", Permit.OLD_ROWS)
        if self._is_redis_alone and fault.what == "volatile":
            self._expectations.permit("Redis alone", Permit.OLD_ROWS)
        fault.start()
        return True

    def _is_free(self, what: str) -> bool:
        """Whether a fault of it may begin. With Redis alone no process can start while that is faulty."""
        together = {"server", "volatile"}
        return all(map(self.is_healthy, together if self._is_redis_alone and what in together else {what}))

    def pass_step(self) -> None:
        """Heal those whose time is over."""
        for fault, (left, began_s) in list(self._active.items()):
            if left <= 0 or time.monotonic() - began_s > _LONGEST_S:
                self._heal(fault)
            else:
                self._active[fault] = left - 1, began_s

    def heal_all(self, what: str | None = None) -> None:
        """Heal all, or those of one thing."""
        for fault in list(self._active):
            if what in {None, fault.what}:
                self._heal(fault)

    def _heal(self, fault: Fault) -> None:
        self._journal.note(f"heals: {_name(fault)}")
        began_s = time.monotonic()
        fault.heal()
        is_late = fault.what == "server" and time.monotonic() - began_s > CATCH_UP_S
        if is_late or isinstance(fault, StubFrozen):
            self._expectations.permit("stream behind", Permit.OLD_ROWS)
        del self._active[fault]
        self._expectations.lift(_name(fault))


def _name(fault: Fault) -> str:
    return str(fault) if type(fault).__str__ is not object.__str__ else type(fault).__name__
