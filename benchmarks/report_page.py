"""The page of report.py: plots and figures in one self-contained HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from hotrow.output.html_page import FAINT, html_page, page_colors, svg, text, wide

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"null": "#8d99ae", "hotrow": "#129a70", "plain": "#d7263d"}
MEANINGS = {
    "null": "a Python model that answers zeros: the least that one costs",
    "hotrow": "the model, imported by hotrow",
    "plain": "ONNX Runtime on the whole model, tables inside, in a Python model",
}
METHOD = (
    "perf_analyzer sends random requests over gRPC to one server. Models take turns; medians of all rounds are shown, "
    "with a line from the least to the most. The client shares the machine's processor with the server."
)
MAIN_CONCURRENCY = 16
Rows = list[dict[str, Any]]


def write_page(results: dict[str, Any], path: Path) -> None:
    """Write the page of these results, as report.py gathers them."""
    figures: Rows = results["figures"]
    networks = list(dict.fromkeys(row["network"] for row in figures))
    with page_colors():
        parts = [
            "<h1>hotrow through Triton, compared with its peers</h1>",
            f"<p class='lead'>{text(headline(figures))}</p>{svg(main_figure(results))}",
            "<ul>",
            *(f"<li><b>{text(name)}</b>: {text(meaning)}</li>" for name, meaning in MEANINGS.items()),
            f"</ul><p>{METHOD}</p>",
            "<h2>Machine</h2><table>",
            *(f"<tr><td>{text(name)}<td class='word'>{text(value)}</tr>" for name, value in results["machine"].items()),
            "</table>",
        ]
        for network in networks:
            rows = [row for row in figures if row["network"] == network]
            parts += [f"<h2>{text(network)}</h2>", svg(network_figure(rows)), wide(table(rows))]
    path.write_text(html_page("hotrow: benchmark report", parts), encoding="utf-8")


def write_figure(results: dict[str, Any], path: Path) -> None:
    """Write the main figure as a picture, with a line about its source."""
    with page_colors():
        figure = main_figure(results)
        figure.supxlabel(origin(results["machine"]), fontsize=7, x=0.99, ha="right")
        figure.savefig(path, dpi=120)


def origin(machine: dict[str, str]) -> str:
    """The facts about the machine that a picture without its page needs."""
    facts = [f"{machine['cores']} cores of {machine['processor']}", machine["memory"], machine["date"]]
    loads = f"load {machine['load before']} before, {machine['load after']} after"
    return f"{', '.join(facts)}; {loads}; lines: least and most of all rounds"


def headline(figures: Rows) -> str:
    """The main figure in a sentence."""
    cases = [row for row in figures if row["model"] == "hotrow" and row["concurrency"] == main_concurrency(figures)]
    ratios = [row["requests_per_s"] / of_model(figures, row, "plain")["requests_per_s"] for row in cases]
    shares = [row["requests_per_s"] / of_model(figures, row, "null")["requests_per_s"] for row in cases]
    return (
        f"With {main_concurrency(figures)} requests at once hotrow answers {min(ratios):.2f} to {max(ratios):.2f} "
        "times as many requests per second as plain ONNX Runtime, and "
        f"{min(shares):.2f} to {max(shares):.2f} of what a model does that only answers zeros."
    )


def main_concurrency(figures: Rows) -> int:
    """The number for the main figure: the measured one nearest to 16."""
    return int(min((row["concurrency"] for row in figures), key=lambda n: abs(n - MAIN_CONCURRENCY)))


def of_model(figures: Rows, like: dict[str, Any], model: str) -> dict[str, Any]:
    """The row of another model in the same case."""
    same = ("network", "samples", "concurrency")
    return next(row for row in figures if row["model"] == model and all(row[key] == like[key] for key in same))


def main_figure(results: dict[str, Any]) -> Figure:
    """Bars: requests per second of each model, per network and batch size; lines from minimum to maximum."""
    figures: Rows = results["figures"]
    concurrency = main_concurrency(figures)
    shown = [row for row in figures if row["concurrency"] == concurrency]
    cases = list(dict.fromkeys((row["network"], row["samples"]) for row in shown))
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(COLORS)
    for m, (model, color) in enumerate(COLORS.items()):
        rows = {(row["network"], row["samples"]): row for row in shown if row["model"] == model}
        rates = [rows[case]["requests_per_s"] for case in cases]
        places = [i + (m - 1) * width for i in range(len(cases))]
        ranges = [rows[case]["range_per_s"] for case in cases]
        axes.bar(places, rates, width * 0.92, color=color, label=model)
        axes.vlines(places, *zip(*ranges, strict=True), color="#5a6478", lw=1)
        for place, rate, (_, most) in zip(places, rates, ranges, strict=True):
            label = f"{rate:,.0f}"
            axes.annotate(label, (place, most), (0, 2), textcoords="offset points", size=7, ha="center")
    axes.set_xticks(range(len(cases)), [case_name(*case) for case in cases], fontsize=8)
    axes.set_ylabel("requests/s")
    axes.set_title(f"Requests per second, {concurrency} at once", loc="left", fontweight="bold")
    axes.legend(frameon=False, ncols=len(COLORS), loc="lower right", bbox_to_anchor=(1, 1))
    finish(axes)
    return figure


def case_name(network: str, samples: int) -> str:
    """The text in lines that fit below a group of bars."""
    return "\n".join([f"samples: {samples}", *network.split(", ")])


def network_figure(rows: Rows) -> Figure:
    """Plots of one network: throughput and latency against the number of requests at once, a column per batch size."""
    sizes = sorted({row["samples"] for row in rows})
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    grid = figure.subplots(2, len(sizes), squeeze=False, sharex=True)
    for column, samples in enumerate(sizes):
        cases = [row for row in rows if row["samples"] == samples]
        rates, latencies = grid[0][column], grid[1][column]
        rates.set_title(f"samples per request: {samples}", loc="left", fontsize=10)
        draw(rates, cases, "requests_per_s", "requests/s")
        rates.set_ylim(bottom=0)
        latencies.set_yscale("log")
        draw(latencies, cases, "p50_us", "p50 and p99 (dotted), us")
        draw_dotted(latencies, cases)
        latencies.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        latencies.yaxis.set_major_formatter(plain_number)
        latencies.yaxis.set_minor_locator(NullLocator())
        latencies.set_xlabel("requests at once")
    grid[0][0].legend(frameon=False)
    return figure


def draw(axes: Axes, rows: Rows, key: str, label: str) -> None:
    """One line per model."""
    for model, color in COLORS.items():
        line = sorted((row["concurrency"], row[key]) for row in rows if row["model"] == model)
        axes.plot(*zip(*line, strict=True), "o-", color=color, ms=4, lw=2 if model == "hotrow" else 1.3, label=model)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({row["concurrency"] for row in rows}))
    axes.xaxis.set_major_formatter(plain_number)
    axes.set_ylabel(label, fontsize=8)
    axes.tick_params(labelsize=8)
    finish(axes)


def plain_number(value: float, _position: object) -> str:
    """A tick's label, on logarithmic axes as well."""
    return f"{value:,.0f}"


def draw_dotted(axes: Axes, rows: Rows) -> None:
    """The 99th percentiles."""
    for model, color in COLORS.items():
        line = sorted((row["concurrency"], row["p99_us"]) for row in rows if row["model"] == model)
        axes.plot(*zip(*line, strict=True), ":", color=color, lw=1)


def finish(axes: Axes) -> None:
    """The common style of all plots."""
    axes.grid(color=FAINT, lw=0.6, axis="y")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def table(rows: Rows) -> str:
    """All figures, with their ratios to the null model and plain ONNX Runtime."""
    heads = "samples", "at once", "model", "requests/s", "of null", "of plain", "p50 us", "p99 us"
    lines = ["<table><tr>" + "".join(f"<th>{head}" for head in heads) + "</tr>"]
    for row in sorted(rows, key=lambda row: (row["samples"], row["concurrency"], list(COLORS).index(row["model"]))):
        rate = row["requests_per_s"]
        ratios = [f"{rate / of_model(rows, row, model)['requests_per_s']:.2f}" for model in ("null", "plain")]
        numbers = row["samples"], row["concurrency"], row["model"], f"{rate:,.0f}", *ratios
        latencies = f"{row['p50_us']:,.0f}", f"{row['p99_us']:,.0f}"
        cells = "".join(f"<td>{text(number)}" for number in (*numbers, *latencies))
        lines.append(f"<tr{' class=strong' if row['model'] == 'hotrow' else ''}>{cells}</tr>")
    return "".join([*lines, "</table>"])
