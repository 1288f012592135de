"""Reads the description of each metric from docs/reference/metrics.md."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.testing import ROOT

METRICS_PAGE = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Metric:
    """The description of a metric: its kind, as Prometheus names it, its labels, and the alerts that read it."""

    kind: str
    labels: frozenset[str]
    alerts: frozenset[str] = frozenset()


def documented_metrics() -> dict[str, Metric]:
    """The rows of the page's tables, by metric."""
    metrics = {}
    for row in re.findall(r"^\| `(?:hotrow|nv)_.*$", METRICS_PAGE, re.MULTILINE):
        named, kind, _, _, alerts = (cell.strip() for cell in row.strip("|").split("|"))
        name, _, labels = named.strip("`").rstrip("}").partition("{")
        of_all = {label for label in ("model", "version") if f"no `{label}`" not in row}
        metrics[name] = Metric(
            kind.split(",")[0],
            frozenset(of_all | set(filter(None, labels.split(",")))),
            frozenset(re.findall(r"Hotrow\w+", alerts)),
        )
    return metrics
