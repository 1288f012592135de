"""docs/reference/dashboard.md, compared with the dashboard.

`python -m tests.docs.test_dashboard` writes the page's tables from the dashboard.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tests.testing.manual import ROOT

PAGE = ROOT / "docs/reference/dashboard.md"
DASHBOARD = ROOT / "deploy/grafana/dashboards/hotrow.json"


def tables() -> str:
    """A heading for each row of the dashboard, and a line for each of its panels."""
    lines: list[str] = []
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        if panel["type"] == "row":
            lines += ["", f"## {panel['title']}", "", "| panel | shows | from |", "| --- | --- | --- |"]
        else:
            lines.append(f"| {panel['title']} | {panel['description']} | {_metrics(panel)} |")
    return "\n".join(lines) + "\n"


def _metrics(panel: dict[str, Any]) -> str:
    queries = " ".join(target["expr"] for target in panel["targets"])
    return ", ".join(f"`{name}`" for name in dict.fromkeys(re.findall(r"\b(?:hotrow|nv)_\w+", queries)))


def introduction() -> str:
    """What the page says before its tables."""
    return PAGE.read_text(encoding="utf-8").partition("\n## ")[0]


def test_the_page_describes_each_panel() -> None:
    """With its title, what it shows, and the metrics that its queries read."""
    assert PAGE.read_text(encoding="utf-8") == introduction() + tables()


if __name__ == "__main__":
    PAGE.write_text(introduction() + tables(), encoding="utf-8")
