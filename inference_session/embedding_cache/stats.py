"""What an embedding cache counts; docs/reference/statistics.md defines each number."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from inference_session.stats import gauge


class RowCounts(NamedTuple):
    """The rows of one table."""

    inserts: int
    updates: int
    evictions: int
    erases: int
    rows: int
    capacity: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class TableStats:
    """The counts of one table since the cache was made."""

    hits: int
    """Keys looked up that were cached."""
    misses: int
    """Keys looked up that were not."""
    inserts: int
    """Rows added."""
    updates: int
    """Rows replaced by new contents."""
    evictions: int
    """Rows dropped for space."""
    erases: int
    """Rows dropped by request."""
    rows: int = gauge()
    """Rows cached."""
    capacity: int = gauge()
    """Rows that may be."""
    bytes: int = gauge()
    """Memory allocated, whether in use or not."""


@dataclass(frozen=True, kw_only=True)
class CacheStats(TableStats):
    """The counts of all tables, in all and by table."""

    tables: Mapping[str, TableStats]
    cache_bytes: int = gauge()
    """The most that the cache may allocate."""

    @classmethod
    def of(cls, cache_bytes: int, tables: Mapping[str, TableStats]) -> CacheStats:
        """The counts of these tables, added up."""
        return cls(cache_bytes=cache_bytes, tables=tables, **_totals(tables.values()))

    @classmethod
    def added(cls, caches: Sequence[CacheStats]) -> CacheStats:
        """The counts of several caches of the same tables, added up."""
        tables = {name: TableStats(**_totals([cache.tables[name] for cache in caches])) for name in caches[0].tables}
        return cls.of(sum(cache.cache_bytes for cache in caches), tables)

    def after(self, warm_up: CacheStats) -> CacheStats:
        """These counts without the look-ups of the warm-up, which are no client's."""
        tables = {
            name: replace(table, hits=table.hits - before.hits, misses=table.misses - before.misses)
            for (name, table), before in zip(self.tables.items(), warm_up.tables.values(), strict=True)
        }
        return CacheStats.of(self.cache_bytes, tables)


def _totals(tables: Collection[TableStats]) -> dict[str, int]:
    """Each count, added up."""
    return {name: sum(getattr(table, name) for table in tables) for name in TableStats.__dataclass_fields__}
