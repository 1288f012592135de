"""What is counted of a model's rows; docs/reference/statistics.md defines each number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from inference_session.embedding_cache.stats import CacheStats
from inference_session.parameter_server.server import ServerStats
from inference_session.stats import gauge
from inference_session.tables.base import Placement


@dataclass(frozen=True)
class UpdatedTableStats:
    """The rows of one table that are newer than its files."""

    rows: int = gauge()
    bytes: int = gauge()


@dataclass(frozen=True)
class RowStats:
    """The counts of the parts that hold the rows; None: there is no such part."""

    cache: CacheStats | None = None
    dropped_inserts: int | None = None
    """Look-ups whose missing rows were not cached, as too many waited for that."""
    server: ServerStats | None = None
    updated: Mapping[str, UpdatedTableStats] | None = None
    """By table folder."""
    placement: Placement | None = None

    def after(self, warm_up: RowStats) -> RowStats:
        """These counts without the look-ups of the warm-up, which are no client's."""
        if self.cache is None or warm_up.cache is None:
            return self
        return replace(self, cache=self.cache.after(warm_up.cache))

    def as_dict(self) -> dict[str, Any]:
        """By the names of docs/reference/statistics.md."""
        parts: dict[str, Any] = {"cache": {} if self.cache is None else asdict(self.cache), "tiers": {}}
        if self.server is not None:
            parts |= asdict(self.server)
        if self.dropped_inserts is not None:
            parts["dropped_inserts"] = self.dropped_inserts
        if self.updated is not None:
            parts["updated"] = {table: asdict(each) for table, each in self.updated.items()}
        if self.placement is not None:
            parts["gpu"] = self.placement._asdict()
        return parts
