"""The results of `hotrow size`: as tables, JSON, a picture and a page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from hotrow.output.formatting import as_cell, in_units
from hotrow.output.streams import output_console
from inference_session.device.placement import Place
from inference_session.embedding_cache.cpu_budget import bytes_to_hold, rows_held
from inference_session.model_spec import ModelSpec, TableSpec
from inference_session.sizing.cache_plan import CachePlan, CachePoint, TracedTable
from inference_session.sizing.hit_rate import LruCurve, SamplingError, SimulatedCurve
from inference_session.sizing.memory import MemoryItem, bytes_in

_PLACES = {
    "device": "A copy on each device",
    "shards": "Divided among the devices by rows",
    "host": "In host memory, read from there",
}
_NUM_ROWS_SHOWN = 12
_BAR_LENGTH = 30


@dataclass(frozen=True)
class TableReport:
    """The results of a trace for one table."""

    spec: TableSpec
    num_keys: int
    num_unknown: int
    """Further keys that the table lacks, and a cache therefore as well."""
    rate: float
    """Part of the keys that was analysed."""
    lru: LruCurve
    ours: SimulatedCurve
    error: SamplingError

    @property
    def sizes(self) -> list[int]:
        """Numbers of rows, from few to all that were used."""
        return [round(rows) for rows in self.ours.rows[1:].tolist()]

    def cache_bytes(self, rows: int) -> int:
        """Bytes of a cache for this many rows of this table alone."""
        return bytes_to_hold({"": self.spec.embedding_dim}, {"": rows})


@dataclass(frozen=True)
class SizingReport:
    """The full report of a version."""

    version_dir: Path
    """As the user named it."""
    spec: ModelSpec
    cache_bytes: int
    items: list[MemoryItem]
    places: dict[str, Place]
    """By table name, where GPUs look the table up; empty if they do not."""
    target: float = 0.0
    """The hit rate that the cache is to reach, as a part of the best possible."""
    tables: dict[str, TableReport] = field(default_factory=dict)
    """By folder; empty without a trace."""

    @property
    def total_bytes(self) -> int:
        """Memory of one version on a machine."""
        return sum(item.total_bytes for item in self.items)

    @cached_property
    def ours(self) -> CachePlan:
        """The plan for hotrow's cache."""
        return self._plan(lambda table: table.ours)

    @cached_property
    def lru(self) -> CachePlan:
        """The plan for an LRU cache in the same memory."""
        return self._plan(lambda table: table.lru)

    @cached_property
    def recommended(self) -> CachePoint:
        """The smallest cache that reaches the target."""
        return self.ours.recommended(self.target)

    @cached_property
    def knee(self) -> CachePoint:
        """The size above which more memory brings less."""
        return self.ours.knee()

    @property
    def is_sampled(self) -> bool:
        """Whether hit rates are estimates."""
        return any(table.rate < 1 for table in self.tables.values())

    def error(self, cache_bytes: int) -> float:
        """The error of the hit rate with that cache, two standard errors."""
        rows = rows_held(self._dims, cache_bytes, self._num_rows)
        num_keys = sum(table.num_keys for table in self.tables.values())
        errors = [table.num_keys * table.error.at(rows[folder]) for folder, table in self.tables.items()]
        return float(np.hypot.reduce(errors)) / num_keys

    def as_json(self) -> dict[str, Any]:
        """The full report for programs; docs/reference/size-report.md says what each key means."""
        document: dict[str, Any] = {
            "version_dir": str(self.version_dir),
            "cache_bytes": self.cache_bytes,
            "memory": [{**item._asdict(), "total_bytes": item.total_bytes} for item in self.items],
            "process_bytes": bytes_in(self.items, "process"),
            "device_bytes": bytes_in(self.items, "device"),
            "total_bytes": self.total_bytes,
            "swap_bytes": 2 * self.total_bytes,
        }
        if self.places:
            document["placement"] = self.places
        return {**document, "trace": self._trace_as_json()} if self.tables else document

    def _trace_as_json(self) -> dict[str, Any]:
        sizes = [point.cache_bytes for point in self.ours.points(_NUM_ROWS_SHOWN)]
        document: dict[str, Any] = {
            "sampled": self.is_sampled,
            "error": self.error(self.recommended.cache_bytes),
            "best_hit_rate": self.ours.best_hit_rate,
            "target": self.target,
            "recommended": self.recommended._asdict(),
            "knee": self.knee._asdict(),
            "hit_rates": [
                {"cache_bytes": size, "lru": self.lru.hit_rate(size), "hotrow": self.ours.hit_rate(size)}
                for size in sizes
            ],
            "tables": {folder: _table_as_json(table) for folder, table in self.tables.items()},
        }
        if self.cache_bytes:
            document["hit_rate"] = self.ours.hit_rate(self.cache_bytes)
        return document

    def _plan(self, curve: Any) -> CachePlan:
        traced = {
            folder: TracedTable(table.num_keys, table.lru.num_distinct, table.sizes[0], curve(table))
            for folder, table in self.tables.items()
        }
        return CachePlan(self._dims, self._num_rows, traced)

    @property
    def _dims(self) -> dict[str, int]:
        return {table.folder: table.embedding_dim for table in self.spec.tables}

    @property
    def _num_rows(self) -> dict[str, int]:
        return {table.folder: table.num_rows for table in self.spec.tables}


def _table_as_json(table: TableReport) -> dict[str, Any]:
    return {
        "name": table.spec.name,
        "keys": table.num_keys,
        "distinct_keys": table.lru.num_distinct,
        "unknown_keys": table.num_unknown,
        "sample_rate": table.rate,
        "hit_rates": [
            {
                "rows": rows,
                "cache_bytes": table.cache_bytes(rows),
                "lru": table.lru.hit_rate(rows),
                "hotrow": table.ours.hit_rate(rows),
                "error": table.error.at(rows),
            }
            for rows in table.sizes
        ],
    }


def show(report: SizingReport) -> None:
    """Print all as tables."""
    console = output_console()
    console.print(f"[b]Memory[/b] of {as_cell(str(report.version_dir))}")
    console.print(_memory_table(report))
    for line in memory_lines(report):
        console.print(line)
    if not report.tables:
        console.print("Give --trace to get a recommended cache size, computed from the keys of real requests.")
        return
    for table in report.tables.values():
        console.print(f"\n[b]Table {as_cell(table.spec.name)}[/b]: {facts(table)}")
        console.print(_curve_table("rows", curve_rows(table)))
    if len(report.spec.tables) > 1:
        console.print("\n[b]All tables[/b], as one cache")
        console.print(_curve_table("cache_bytes", _plan_rows(report)))
    for line in conclusions(report):
        console.print(line)


def _memory_table(report: SizingReport) -> Table:
    table = Table("part", "where")
    for heading in ("bytes", "", "copies", "in all"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, *cells in memory_rows(report):
        table.add_row(as_cell(name), *cells, end_section=len(table.rows) == len(report.items) - 1)
    return table


def memory_rows(report: SizingReport) -> Iterator[tuple[str, ...]]:
    """The rows of the memory table: part, place, bytes, the same in units, copies, in all. The last two are sums."""
    for item in report.items:
        each = item.each_bytes
        yield item.name, item.place, str(each), in_units(each), str(item.copies), in_units(item.total_bytes)
    for name, total in (("one version", report.total_bytes), ("during a swap", 2 * report.total_bytes)):
        yield name, "", str(total), in_units(total), "", in_units(total)


def memory_lines(report: SizingReport) -> Iterator[str]:
    """The total of the memory table."""
    yield f"Per process: {in_units(bytes_in(report.items, 'process'))}, private."
    if device := bytes_in(report.items, "device"):
        yield f"Per device: {in_units(device)}."
    for place, meaning in _PLACES.items():
        if tables := [name for name, each in report.places.items() if each == place]:
            yield f"{meaning}: {', '.join(tables)}."
    files = bytes_in(report.items, "page cache")
    if report.spec.tables and not files:
        yield "No table files: rows come from the stores, whose own memory is not counted here."
        return
    yield (
        f"Table files: {in_units(files)} on disk, mapped and shared by all processes; "
        "they need as much page cache to stay in memory."
    )
    if not report.cache_bytes and not device:
        yield "No cache: look-ups read the table files, which a cache on the CPU would not make faster."


def facts(table: TableReport) -> str:
    """The trace of a table in a line."""
    parts = [f"{table.num_keys:,} keys, {table.lru.num_distinct:,} distinct"]
    if table.rate < 1:
        parts.append(f"from a sample of 1 in {round(1 / table.rate)}, error up to {table.error.errors.max():.3f}")
    if table.lru.num_distinct > table.spec.num_rows:
        parts.append(f"more than the table's {table.spec.num_rows:,} rows: some of these keys belong to other tables")
    if table.num_unknown:
        parts.append(f"{table.num_unknown:,} further keys left out because the table does not have them")
    return "; ".join(parts)


def curve_rows(table: TableReport) -> Iterator[tuple[str, str, float, float]]:
    """By number of rows: that number, the bytes of the cache, the hit rates of LRU and of hotrow."""
    for rows in table.sizes:
        yield f"{rows:,}", in_units(table.cache_bytes(rows)), table.lru.hit_rate(rows), table.ours.hit_rate(rows)


def _plan_rows(report: SizingReport) -> Iterator[tuple[str, str, float, float]]:
    for size, rate in report.ours.points(_NUM_ROWS_SHOWN):
        yield str(size), in_units(size), report.lru.hit_rate(size), rate


def _curve_table(size: str, rows: Iterator[tuple[str, str, float, float]]) -> Table:
    table = Table()
    for heading in (size, "cache" if size == "rows" else "", "LRU", "hotrow"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("hit rate of hotrow", no_wrap=True)
    for number, cache_bytes, lru, ours in rows:
        table.add_row(number, cache_bytes, f"{lru:.4f}", f"{ours:.4f}", "█" * round(ours * _BAR_LENGTH))
    return table


def conclusions(report: SizingReport) -> Iterator[str]:
    """The recommendations as sentences."""
    best, knee, chosen = report.ours.best_hit_rate, report.knee, report.recommended
    yield f"Best hit rate possible: {best:.4f}; the first use of a key is always a miss."
    yield (
        f"Knee: {knee.cache_bytes} bytes ({in_units(knee.cache_bytes)}), hit rate {knee.hit_rate:.4f}; "
        "beyond this size a byte adds less than the average byte."
    )
    if report.cache_bytes:
        rate = report.ours.hit_rate(report.cache_bytes)
        yield f"As requested: cache_bytes {report.cache_bytes} ({in_units(report.cache_bytes)}), hit rate {rate:.4f}."
    error = f" ± {report.error(chosen.cache_bytes):.4f}" if report.is_sampled else ""
    yield (
        f"Recommended: cache_bytes {chosen.cache_bytes} ({in_units(chosen.cache_bytes)}), hit rate "
        f"{chosen.hit_rate:.4f}{error}: the smallest with {report.target:g} of the best possible{_where(report)}."
    )


def _where(report: SizingReport) -> str:
    """When the recommended cache applies, if the configured model has none."""
    in_files = not report.cache_bytes and bytes_in(report.items, "page cache")
    return ", once rows are in stores or on a GPU" if in_files else ""
