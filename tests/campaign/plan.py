"""Deployments: which there are, and one drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass

from tests.campaign.expectations import Writer

CATCH_UP_S = 20
"""The setting of all deployments."""
SMALL_CACHE_BYTES = 10_000
"""Of a cache that evicts; on a GPU it must hold a bucket of each table."""


@dataclass(frozen=True)
class Plan:
    """A deployment."""

    writer: Writer
    volatile: str | None = None
    """`redis`, `cluster`, `sentinel`, or None."""
    by_proxy: bool = False
    """Whether the Redis, and the broker, are reached through a network that may fail."""
    has_rocksdb: bool = False
    has_files: bool = True
    """Whether versions keep their table files, below the stores."""
    cache_bytes: int = 0
    on_triton: bool = False
    has_small_disk: bool = False
    """Whether the RocksDBs are where a disk can be filled."""
    has_clock: bool = False
    """Whether the wall clock may jump."""

    @property
    def has_stores(self) -> bool:
        """Whether stores keep rows. Without any, new content in place waits until the brokers answer."""
        return self.volatile is not None or self.has_rocksdb

    @property
    def is_redis_alone(self) -> bool:
        """Whether what is written is in a Redis and nowhere else."""
        return self.volatile is not None and not self.has_rocksdb

    @classmethod
    def draw(cls, rng: random.Random) -> Plan:
        """Any that the campaign knows."""
        writer = rng.choices(list(Writer), (3, 2))[0]
        on_triton = writer is Writer.STREAM and rng.random() < 0.5
        by_proxy = rng.random() < 0.4
        has_clock = rng.random() < 0.3
        if writer is Writer.STREAM and rng.random() < 0.3:
            return cls(writer, by_proxy=by_proxy, on_triton=on_triton, has_clock=has_clock)
        volatile = rng.choices(("redis", "cluster", "sentinel", None), (6, 2, 2, 1))[0]
        cache_bytes = rng.choice((0, SMALL_CACHE_BYTES, 1 << 20))
        if volatile is not None and rng.random() < 0.15:
            return cls(writer, volatile, by_proxy, cache_bytes=cache_bytes, on_triton=on_triton, has_clock=has_clock)
        has_files, has_small_disk = rng.random() < 0.5, rng.random() < 0.3
        return cls(writer, volatile, by_proxy, True, has_files, cache_bytes, on_triton, has_small_disk, has_clock)

    def __str__(self) -> str:
        said = asdict(self) | {"writer": self.writer.value}
        return " ".join(f"{name}={value}" for name, value in said.items())
