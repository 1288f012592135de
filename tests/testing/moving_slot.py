"""A slot of a Redis Cluster that moves from one node to another, as by `redis-cli --cluster reshard`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import redis

from tests.testing.servers import PATIENCE_MS, RedisClusterServers


@contextmanager
def moving_slot(cluster: RedisClusterServers, name: bytes) -> Iterator[tuple[redis.Redis, redis.Redis]]:
    """Half way through, the slot of a name is on its way from one node to another; these are yielded."""
    clients = [server.client() for server in cluster.masters]
    slot = int(clients[0].execute_command("CLUSTER", "KEYSLOT", name))
    ids = [client.execute_command("CLUSTER", "MYID").decode() for client in clients]
    owner = ids.index(_owner_of(clients[0], slot))
    source, target = clients[owner], clients[(owner + 1) % 3]
    target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[owner])
    source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[(owner + 1) % 3])
    yield source, target
    for client in (target, source, *clients):
        client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[(owner + 1) % 3])
    for client in clients:
        client.close()


def migrate(source: redis.Redis, target: redis.Redis, *names: bytes) -> None:
    """Move what has these names, and exists, to the other node."""
    source.execute_command("MIGRATE", "127.0.0.1", port_of(target), "", 0, PATIENCE_MS, "KEYS", *names)


def port_of(client: redis.Redis) -> int:
    """The port of the server of a client."""
    return int(client.connection_pool.connection_kwargs["port"])


def _owner_of(client: redis.Redis, slot: int) -> str:
    """The id of the node that has a slot."""
    for first, last, (_, _, node_id, *_), *_ in client.execute_command("CLUSTER", "SLOTS"):
        if first <= slot <= last:
            return str(node_id.decode())
    raise AssertionError(f"no node has slot {slot}")
