"""The curves of `hotrow size`, as a picture (PNG) and as a self-contained page (HTML with SVG)."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hotrow.output.formatting import in_units
from hotrow.output.html_page import FAINT, html_page, page_colors, svg, text, wide
from hotrow.sizing.report import SizingReport, TableReport, conclusions, curve_rows, facts, memory_lines, memory_rows
from inference_session.errors import ConfigurationError
from inference_session.platform.small_files import write_chosen

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OURS, _LRU, _CHOSEN, _KNEE, _ASKED = "#129a70", "#8d99ae", "#d7263d", "#f4a259", "#5b84b1"
_NUM_POINTS = 200
_COLUMNS = 3
_MOST_TABLES = 12
"""Number of tables with a separate plot: those with the most keys."""


def write_plot(report: SizingReport, path: Path) -> None:
    """Write the curves as .png, or everything as .html."""
    (write_page if path.suffix == ".html" else write_picture)(report, path)


def write_picture(report: SizingReport, path: Path) -> None:
    """Write the curves as PNG."""
    picture = io.BytesIO()
    with page_colors():
        _figure(report).savefig(picture, format="png", dpi=144)
    write_chosen(path, picture.getvalue())


def write_page(report: SizingReport, path: Path) -> None:
    """Write everything as one HTML file."""
    parts = [
        f"<h1>Sizing of {text(report.version_dir)}</h1>",
        *(_conclusions(report) if report.tables else ()),
        "<h2>Memory</h2>",
        wide(_memory_table(report)),
        *(f"<p>{text(line)}</p>" for line in memory_lines(report)),
        *(f"<h2>Table {text(t.spec.name)}</h2><p>{text(facts(t))}</p>{_curve(t)}" for t in report.tables.values()),
    ]
    write_chosen(path, html_page(f"hotrow size {report.version_dir}", parts).encode())


def _conclusions(report: SizingReport) -> list[str]:
    *others, chosen = conclusions(report)
    with page_colors():
        curves = svg(_figure(report))
    return [f"<p class='chosen'>{text(chosen)}</p>", *(f"<p>{text(line)}</p>" for line in others), curves]


def _memory_table(report: SizingReport) -> str:
    rows = [
        f"<tr><td>{text(name)}<td class='word'>{text(place)}{''.join(f'<td>{text(number)}' for number in numbers)}</tr>"
        for name, place, *numbers in memory_rows(report)
    ]
    heads = "<tr><th>part<th class='word'>where<th>bytes<th><th>copies<th>in all</tr>"
    return f"<table>{heads}{''.join(rows)}</table>"


def _curve(table: TableReport) -> str:
    rows = [
        f"<tr><td>{number}<td>{size}<td>{lru:.4f}<td>{ours:.4f}</tr>" for number, size, lru, ours in curve_rows(table)
    ]
    figures = wide(f"<table><tr><th>rows<th>cache<th>LRU<th>hotrow</tr>{''.join(rows)}</table>")
    return f"<details><summary>hit rate by size</summary>{figures}</details>"


def _figure(report: SizingReport) -> Figure:
    from matplotlib.figure import Figure

    if not report.tables:
        raise ConfigurationError("--plot needs --trace: hit rates are computed from a trace")
    tables = sorted(report.tables.values(), key=lambda table: -table.num_keys)[:_MOST_TABLES]
    tables = tables if len(report.spec.tables) > 1 else []
    num_rows = math.ceil(len(tables) / _COLUMNS)
    figure = Figure(figsize=(10, 4.8 + 2.7 * num_rows), layout="constrained")
    grid = figure.add_gridspec(1 + num_rows, _COLUMNS, height_ratios=[4.8, *[2.7] * num_rows])
    _draw_plan(figure.add_subplot(grid[0, :]), report)
    for i, table in enumerate(tables):
        _draw_table(figure.add_subplot(grid[1 + i // _COLUMNS, i % _COLUMNS]), table)
    return figure


def _draw_plan(axes: Axes, report: SizingReport) -> None:
    """The hit rate of all tables against the bytes of their cache, and the sizes worth naming."""
    points = report.ours.points(_NUM_POINTS)
    sizes = [point.cache_bytes for point in points]
    axes.plot(sizes, [report.lru.hit_rate(size) for size in sizes], color=_LRU, lw=1.6, label="LRU")
    axes.plot(sizes, [point.hit_rate for point in points], color=_OURS, lw=2.4, label="hotrow")
    axes.axhline(report.ours.best_hit_rate, color=_LRU, lw=0.8, ls=":")
    axes.annotate("best possible", (sizes[0], report.ours.best_hit_rate), (0, 3), textcoords="offset points", size=8)
    _draw_size(axes, report.knee, "knee", _KNEE)
    _draw_size(axes, report.recommended, "recommended", _CHOSEN)
    if report.cache_bytes >= report.ours.least_bytes:
        _draw_size(axes, (report.cache_bytes, report.ours.hit_rate(report.cache_bytes)), "as asked", _ASKED)
    _finish(axes, "cache_bytes", lambda size, _: in_units(round(size)), base=4)
    axes.set_title(
        f"Hit rate of a cache for {report.version_dir.parent.name}, version {report.version_dir.name}",
        loc="left",
        fontweight="bold",
        pad=26,
    )
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 0.99), ncols=5, fontsize=9, frameon=False)


def _draw_size(axes: Axes, point: tuple[int, float], name: str, color: str) -> None:
    size, hit_rate = point
    axes.plot([size, size], [0, hit_rate], color=color, lw=1, ls="--")
    label = f"{name}: {in_units(size)}, {hit_rate:.3f}"
    axes.plot([size], [hit_rate], "o", color=color, ms=7, label=label)


def _draw_table(axes: Axes, table: TableReport) -> None:
    rows = np.unique(np.geomspace(table.sizes[0], table.sizes[-1], _NUM_POINTS).astype(int))
    axes.plot(rows, [table.lru.hit_rate(size) for size in rows.tolist()], color=_LRU, lw=1.2)
    axes.plot(table.ours.rows[1:], table.ours.hit_rates[1:], color=_OURS, lw=1.8)
    _finish(axes, "rows", lambda size, _: f"{size:,.0f}", base=10)
    axes.set_title(f"{table.spec.name} ({table.num_keys:,} keys)", loc="left", fontsize=9)
    axes.tick_params(labelsize=7)


def _finish(axes: Axes, label: str, tick: Any, base: int) -> None:
    axes.set_xscale("log", base=base)
    axes.minorticks_off()
    axes.set_ylim(0, 1.03)
    axes.set_xlabel(label)
    axes.set_ylabel("hit rate")
    axes.xaxis.set_major_formatter(tick)
    axes.grid(color=FAINT, lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
