"""What goes wrong, and how it heals. Each fault is one object: `start`, later `heal`."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Protocol

from tests.campaign.expectations import Permit
from tests.parameter_server.servers import RedisClusterServers, RedisServer
from tests.update_stream.broker import Broker


class Fault(Protocol):
    """One thing that can go wrong."""

    permits: tuple[Permit, ...]
    """What documentation allows while it lasts."""
    what: str
    """That which is faulty: one fault of it at a time."""

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
    """All that it holds is gone, at once."""

    def start(self) -> None:
        """Empty it."""
        with self.server.client() as client:
            client.flushall()

    def heal(self) -> None:
        """Nothing is left to do."""


class RedisRestored(RedisKilled):
    """A snapshot now; later it is killed and started from that."""

    def start(self) -> None:
        """Write the snapshot."""
        with self.server.client() as client:
            client.save()

    def heal(self) -> None:
        """Go back in time."""
        self.server.stop(signal.SIGKILL)
        self.server.start()


class RedisFull(RedisKilled):
    """It takes no rows."""

    def start(self) -> None:
        """Leave it no memory."""
        with self.server.client() as client:
            client.config_set("maxmemory", "1")

    def heal(self) -> None:
        """Give it all that it wants."""
        with self.server.client() as client:
            client.config_set("maxmemory", "0")


class RedisReadOnly(RedisKilled):
    """A replica of a master that is not there: it answers, and takes no rows."""

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


def redis_faults(server: RedisServer) -> list[Callable[[], Fault]]:
    """All of one Redis."""
    kinds = (RedisKilled, RedisFrozen, RedisEmptied, RedisRestored, RedisFull, RedisReadOnly)
    return [lambda kind=kind: kind(server) for kind in kinds]  # type: ignore[misc]


class NodeKilled(RedisKilled):
    """One node of a Cluster."""

    def __init__(self, cluster: RedisClusterServers, number: int) -> None:
        super().__init__(cluster.servers[number])
        self.cluster = cluster

    def heal(self) -> None:
        """Start it again, and wait until the Cluster has taken it back."""
        super().heal()
        self.cluster.wait_until_ready()


class NodeFrozen(RedisFrozen):
    """One node of a Cluster."""

    def __init__(self, cluster: RedisClusterServers, number: int) -> None:
        super().__init__(cluster.servers[number])
        self.cluster = cluster

    def heal(self) -> None:
        """Let it go on, and wait until the Cluster has taken it back."""
        super().heal()
        self.cluster.wait_until_ready()


def cluster_faults(cluster: RedisClusterServers) -> list[Callable[[], Fault]]:
    """All of any one node of a Cluster."""
    numbers = range(len(cluster.servers))
    return [lambda k=kind, n=number: k(cluster, n) for number in numbers for kind in (NodeKilled, NodeFrozen)]  # type: ignore[misc]
