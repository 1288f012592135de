"""The contract of a store, on servers that speak Redis."""

from __future__ import annotations

from typing import Any

import redis

from inference_session.parameter_server.redis.store import RedisStore
from tests.testing.store_contract import SharedStoreContract, packed

MASK = 2**64 - 1


def partition_in_plain_python(key: int, num_partitions: int) -> int:
    """HPS's rule, with Python's integers."""

    def rotated(value: int, by: int) -> int:
        return (value >> by | value << (64 - by)) & MASK

    x = key & MASK
    x ^= rotated(x, 25) ^ rotated(x, 50)
    x = x * 0xA24BAED4963EE407 & MASK
    x ^= rotated(x, 24) ^ rotated(x, 49)
    x = x * 0x9FB21C651E98DF25 & MASK
    return (x ^ x >> 28) % num_partitions


class RedisContract(SharedStoreContract):
    """The contract, with plain `redis` clients that bypass the store."""

    PARTITIONS = 8
    client: redis.Redis | redis.RedisCluster
    bound: RedisStore

    def put(self, table: str, key: int, row: bytes) -> None:
        self.client.hset(self._hash(table, key), packed(key), row)

    def get(self, table: str, key: int) -> bytes | None:
        row: Any = self.client.hget(self._hash(table, key), packed(key))
        assert row is None or isinstance(row, bytes)
        return row

    def _hash(self, table: str, key: int) -> str:
        tag = self.bound.namespace.tag(table)
        return f"hps_et{{{tag}/p{partition_in_plain_python(key, self.PARTITIONS)}}}v"
