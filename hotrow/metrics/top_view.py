"""The view of `hotrow top`: tables of a server's last metrics pages and the changes between them."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotrow.metrics.page import MetricsPage, Window
from hotrow.output.formatting import as_cell, in_units, printable

_HISTORY = 24
_NUM_PAGES = 5
_LEAST_NAME = 5
_MOST_EVENTS = 8
_BLOCKS = " ▁▂▃▄▅▆▇█"
_COUNTED_EVENTS = (
    ("hotrow_backend_restarts_total", "its process died and was restarted"),
    ("hotrow_in_place_updates_total", "now serving new content of its folder"),
    ("hotrow_failed_in_place_updates_total", "new content of its folder was rejected"),
)
_FAILURES = ("nv_inference_request_failure", "hotrow_failed_requests_total")
_GOOD, _BAD, _DIM, _HEAD = "green", "bold red", "dim", "bold cyan"


class IndexEntry(NamedTuple):
    """A line of the server's repository index."""

    model: str
    version: str
    state: str
    reason: str


class _Version(NamedTuple):
    model: str
    version: str

    @property
    def labels(self) -> dict[str, str]:
        return {"model": self.model, "version": self.version}


class _Column(NamedTuple):
    heading: str
    from_width: int = 0
    """It is left out on narrower terminals."""


_MODEL_COLUMNS = (
    _Column("requests/s"),
    _Column("failed/s", 60),
    _Column("samples/s", 80),
    _Column("per batch", 130),
    _Column("mean", 60),
    _Column("queue", 90),
    _Column("p50", 110),
    _Column("p90", 130),
    _Column("p99"),
    _Column("memory", 110),
    _Column("requests/s, lately", 170),
)
_TABLE_COLUMNS = (
    _Column("keys/s"),
    _Column("hit rate"),
    _Column("defaults/s", 70),
    _Column("misses/s", 90),
    _Column("evictions/s", 110),
)
_TIER_COLUMNS = (_Column("keys/s", 60), _Column("found"), _Column("skipped/s", 90), _Column("failures/s", 60))


class TopView:
    """Collects pages of one server, and draws the last few."""

    def __init__(self, source: str) -> None:
        """`source`: where the pages come from, for the title."""
        self._source = source
        # Models update their counters about once a second: rates span several looks.
        self._pages: deque[MetricsPage] = deque([MetricsPage()], maxlen=_NUM_PAGES)
        self._states: list[IndexEntry] = []
        self._history: defaultdict[_Version, deque[float]] = defaultdict(lambda: deque(maxlen=_HISTORY))
        self._events: deque[str] = deque(maxlen=_MOST_EVENTS)
        self._failure = ""
        """Why the server does not answer; empty: it does."""

    @property
    def has_rates(self) -> bool:
        """Whether two pages exist to compare."""
        return len(self._pages) > 1

    @property
    def is_lost(self) -> bool:
        """Whether the server did not answer the last time."""
        return bool(self._failure)

    def add(self, page: MetricsPage, states: list[IndexEntry]) -> None:
        """Add a page, and the repository index if it is queried."""
        last = self._pages[-1]
        if self._failure or last.time_s == 0:
            self._pages.clear()  # the server that returns may be another one, with reset counters
        if self._failure:
            self._note("the server answers again")
            self._failure = ""
        if last.time_s > 0:
            self._note_changes(last, page)
        self._pages.append(page)
        self._states = states
        if self.has_rates:
            for version in self._versions():
                rate = Window(last, page).per_second("nv_inference_request_success", **version.labels)
                self._history[version].append(rate or 0.0)

    @property
    def _window(self) -> Window:
        return Window(self._pages[0], self._pages[-1])

    def lose(self, reason: str) -> None:
        """The server does not answer."""
        if not self._failure:
            self._note(f"the server does not answer: {reason}")
        self._failure = reason

    def render(self, width: int) -> RenderableType:
        """The whole view for a terminal of this many columns."""
        # Tables last: a terminal cuts lines that do not fit, and there may be hundreds of tables.
        sections = (
            self._models(width),
            self._tiers(width),
            self._updates(),
            self._not_serving(),
            self._happened(),
            self._tables(width),
        )
        parts: list[RenderableType] = [self._title(), self._machine()]
        for section in sections:
            parts += [Text(""), section] if section is not None else []
        return Group(*parts)

    def _title(self) -> Text:
        clock = time.strftime("%H:%M:%S")
        title = Text.assemble(("hotrow top", "bold"), f"  {self._source}  {clock}")
        if self._failure:
            return title.append(f"  no answer, trying again: {self._failure}", style=_BAD)
        return title

    def _machine(self) -> Text:
        page = self._window.after
        facts = []
        used, total = page.total("nv_cpu_memory_used_bytes"), page.total("nv_cpu_memory_total_bytes")
        if total:
            share = page.total("nv_cpu_utilization") or 0.0
            facts.append(f"CPU {share:.0%}, memory {_memory(used)} of {_memory(total)}")
        for labels, used in page.values("nv_gpu_memory_used_bytes"):
            gpu = labels.get("gpu_uuid", "")
            total = page.total("nv_gpu_memory_total_bytes", gpu_uuid=gpu) or 0
            busy = page.total("nv_gpu_utilization", gpu_uuid=gpu) or 0.0
            facts.append(f"GPU {busy:.0%}, {_memory(used)} of {_memory(total)}")
        return Text("   ".join(facts))

    def _happened(self) -> RenderableType | None:
        if not self._events:
            return None
        return Group(Text("Events", style=_HEAD), *(Text(f"  {event}") for event in self._events))

    def _versions(self) -> list[_Version]:
        """Versions that are loaded, and versions that got requests in this window."""
        page = self._window.after
        known = {
            _Version(labels["model"], labels["version"])
            for labels, _ in page.values("nv_inference_request_success", "model", "version")
        }
        return sorted(version for version in known if self._is_serving(version) or self._is_asked(version))

    def _is_serving(self, version: _Version) -> bool:
        """Models of other backends lack this metric; they count as serving."""
        return self._window.after.total("hotrow_model_version_info", **version.labels) != 0

    def _is_asked(self, version: _Version) -> bool:
        return bool(self._window.grown("nv_inference_request_success", **version.labels))

    def _models(self, width: int) -> RenderableType:
        table = _table("Models", "model", "version", numbers=_shown(_MODEL_COLUMNS, width))
        for version in self._versions():
            cells = zip(_MODEL_COLUMNS, self._model_row(version), strict=True)
            table.add_row(*_names(version), *(cell for column, cell in cells if column.from_width <= width))
        return table if table.row_count else Text("No model is loaded.", style=_DIM)

    def _model_row(self, version: _Version) -> Iterator[str | Text]:
        window, labels = self._window, version.labels
        yield _number(window.per_second("nv_inference_request_success", **labels))
        # Triton counts requests that we answer with an error as successes.
        failures = (window.per_second(name, **labels) for name in _FAILURES)
        yield _alarm(sum(rate or 0.0 for rate in failures))
        # Triton counts a packed HugeCTR request as one sample.
        counted = window.after.total("hotrow_samples_total", **labels) is not None
        samples = "hotrow_samples_total" if counted else "nv_inference_count"
        yield _number(window.per_second(samples, **labels))
        yield _number(window.ratio(samples, "nv_inference_exec_count", **labels))
        for duration in ("nv_inference_request_duration_us", "nv_inference_queue_duration_us"):
            yield _duration(window.ratio(duration, "nv_inference_request_success", **labels))
        for quantile in ("0.5", "0.9", "0.99"):
            yield _duration(window.after.total("nv_inference_request_summary_us", quantile=quantile, **labels))
        yield _memory(window.after.total("hotrow_resident_memory_bytes", **labels))
        yield _sparkline(self._history[version])

    def _tables(self, width: int) -> Table | None:
        table = _table("Tables", "model", "version", "table", numbers=_shown(_TABLE_COLUMNS, width))
        for version in self._versions():
            tables = (
                labels for labels, _ in self._window.after.values("hotrow_lookup_keys_total", "table", **version.labels)
            )
            for labels in sorted(tables, key=lambda labels: labels["table"]):
                cells = zip(_TABLE_COLUMNS, self._table_row(labels), strict=True)
                shown = (cell for column, cell in cells if column.from_width <= width)
                table.add_row(*_names(version), as_cell(labels["table"]), *shown)
        return table if table.row_count else None

    def _table_row(self, labels: dict[str, str]) -> Iterator[str | Text]:
        window = self._window
        hits, misses = "hotrow_cache_hits_total", "hotrow_cache_misses_total"
        yield _number(window.per_second("hotrow_lookup_keys_total", **labels))
        yield _percent(window.ratio(hits, hits, misses, **labels))
        yield _alarm(window.per_second("hotrow_default_vectors_total", **labels), style="yellow")
        yield _number(window.per_second(misses, **labels))
        yield _number(window.per_second("hotrow_cache_evictions_total", **labels))

    def _tiers(self, width: int) -> Table | None:
        table = _table("Tiers", "model", "version", "tier", "state", numbers=_shown(_TIER_COLUMNS, width))
        for version in self._versions():
            tiers = self._window.after.values("hotrow_tier_up", "tier", **version.labels)
            # In the order in which they are queried, which is reverse alphabetical: volatile, persistent, files.
            for labels, up in sorted(tiers, key=lambda tier: tier[0]["tier"], reverse=True):
                state = Text("up", _GOOD) if up else Text("DOWN", _BAD)
                cells = zip(_TIER_COLUMNS, self._tier_row(labels), strict=True)
                shown = (cell for column, cell in cells if column.from_width <= width)
                table.add_row(*_names(version), as_cell(labels["tier"]), state, *shown)
        return table if table.row_count else None

    def _tier_row(self, labels: dict[str, str]) -> Iterator[str | Text]:
        window = self._window
        hits, misses = "hotrow_tier_hits_total", "hotrow_tier_misses_total"
        asked = [window.per_second(name, **labels) or 0.0 for name in (hits, misses)]
        yield _number(sum(asked))
        yield _percent(window.ratio(hits, hits, misses, **labels))
        yield _alarm(window.per_second("hotrow_tier_skipped_total", **labels))
        yield _alarm(window.per_second("hotrow_tier_failures_total", **labels))

    def _updates(self) -> Table | None:
        numbers = ("messages behind", "publish to serve", "rejected/s")
        table = _table("Updates", "model", "version", numbers=numbers)
        page = self._window.after
        for version in self._versions():
            lag = page.total("hotrow_update_lag_messages", **version.labels)
            if lag is not None:
                stale = page.total("hotrow_update_staleness_seconds", **version.labels)
                rejected = self._window.per_second("hotrow_update_messages_rejected_total", **version.labels)
                seconds = "-" if stale is None else f"{stale:.1f} s"
                table.add_row(*_names(version), _number(lag), seconds, _alarm(rejected))
        return table if table.row_count else None

    def _not_serving(self) -> Table | None:
        """The repository index's reasons for versions that should be loaded but do not serve."""
        table = _table("Not serving", "model", "version", "state", "reason")
        for state in self._states:
            if state.state != "READY" and state.reason != "unloaded":
                shown = Text(state.state or "UNKNOWN", _BAD if state.state == "UNAVAILABLE" else "yellow")
                table.add_row(as_cell(state.model), as_cell(state.version), shown, as_cell(state.reason))
        return table if table.row_count else None

    def _note_changes(self, before: MetricsPage, after: MetricsPage) -> None:
        self._note_loads(before, after)
        self._note_tiers(before, after)
        self._note_counted_events(before, after)

    def _note_loads(self, before: MetricsPage, after: MetricsPage) -> None:
        for labels, value in after.values("hotrow_model_version_info", "model", "version"):
            if (before.total("hotrow_model_version_info", **labels) or 0) != value:
                seconds = after.total("hotrow_load_seconds", **labels) or 0.0
                what = f"loaded in {seconds:.2f} s" if value else "unloaded"
                self._note(f"{labels['model']} version {labels['version']} {what}")

    def _note_tiers(self, before: MetricsPage, after: MetricsPage) -> None:
        for labels, up in after.values("hotrow_tier_up", "model", "version", "tier"):
            if before.total("hotrow_tier_up", **labels) not in (None, up):
                what = "answers again" if up else "is down"
                self._note(f"{labels['model']} version {labels['version']}: tier {labels['tier']} {what}")

    def _note_counted_events(self, before: MetricsPage, after: MetricsPage) -> None:
        for name, what in _COUNTED_EVENTS:
            for labels, value in after.values(name, "model"):
                if value > (before.total(name, **labels) or 0):
                    version = f" version {labels['version']}" if "version" in labels else ""
                    self._note(f"{labels['model']}{version}: {what}")

    def _note(self, event: str) -> None:
        self._events.append(f"{time.strftime('%H:%M:%S')}  {printable(event)}")


def _table(title: str, *columns: str, numbers: Sequence[str] = ()) -> Table:
    table = Table(
        title=title, title_justify="left", title_style=_HEAD, box=box.HORIZONTALS, show_edge=False, padding=(0, 1)
    )
    for heading in columns:
        table.add_column(heading, min_width=_LEAST_NAME)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _shown(columns: Sequence[_Column], width: int) -> list[str]:
    return [column.heading for column in columns if column.from_width <= width]


def _names(version: _Version) -> tuple[str, str]:
    return as_cell(version.model), as_cell(version.version)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 or value == round(value) else f"{value:.1f}"


def _alarm(value: float | None, style: str = _BAD) -> Text:
    """A number that should be 0."""
    return Text(_number(value), style if value else "")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _memory(num_bytes: float | None) -> str:
    return in_units(int(num_bytes)) if num_bytes else "-"


def _duration(microseconds: float | None) -> str:
    if microseconds is None:
        return "-"
    if microseconds < 1000:
        return f"{microseconds:.0f} us"
    return f"{microseconds / 1000:.2f} ms" if microseconds < 1e6 else f"{microseconds / 1e6:.2f} s"


def _sparkline(values: deque[float]) -> Text:
    most = max(values, default=0.0)
    steps = len(_BLOCKS) - 1
    drawn = "".join(_BLOCKS[math.ceil(value / most * steps) if most else 0] for value in values)
    return Text(drawn, _GOOD)
