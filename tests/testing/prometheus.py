"""A real Prometheus that scrapes a server, and the queries of the dashboard."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import yaml

from tests.testing.servers import free_port

DASHBOARD = Path(__file__).parents[2] / "deploy/grafana/dashboards/hotrow.json"
INTERVAL_S = 1
"""Time between two scrapes."""


class Prometheus:
    """The program of Debian's package `prometheus`, on a free port, until the context ends."""

    def __init__(self, metrics_url: str, folder: Path) -> None:
        target = metrics_url.split("/")[2]
        config = {
            "global": {"scrape_interval": f"{INTERVAL_S}s"},
            "scrape_configs": [{"job_name": "hotrow", "static_configs": [{"targets": [target]}]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        address = f"127.0.0.1:{free_port()}"
        self._url = f"http://{address}/api/v1"
        flags = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        flags += [f"--web.listen-address={address}", "--log.level=error"]
        self._process = subprocess.Popen(["prometheus", *flags])

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def has_data(self, query: str) -> bool:
        """Whether the query has an answer; a query that Prometheus refuses is an error."""
        return bool(self._ask("query", query=query))

    def series(self, query: str, begin: float, end: float) -> list[dict[str, Any]]:
        """What the query answers for each scrape from `begin` to `end`: `metric` (labels) and `values` of each line."""
        return self._ask("query_range", query=query, start=begin, end=end, step=INTERVAL_S)

    def _ask(self, path: str, **parameters: str | float) -> list[dict[str, Any]]:
        """The result; empty while Prometheus starts, or is busy."""
        try:
            answer = requests.get(f"{self._url}/{path}", params=parameters, timeout=10)
        except (requests.ConnectionError, requests.Timeout):
            return []
        if answer.status_code == requests.codes.service_unavailable:
            return []
        assert answer.ok, f"{parameters['query']}: {answer.text}"
        return answer.json()["data"]["result"]


@dataclass(frozen=True)
class Panel:
    """A panel of the dashboard."""

    title: str
    unit: str
    queries: list[tuple[str, str]]
    """Each with the format of its lines' names: `{{model}} {{version}}`."""


def panels() -> list[Panel]:
    """The panels, with Grafana's variables filled in."""
    found = []
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        queries = []
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", f"{10 * INTERVAL_S}s")
            queries.append((re.sub(r"\$(instance|model)\b", ".*", query), target["legendFormat"]))
        if queries:
            found.append(Panel(panel["title"], panel["fieldConfig"]["defaults"]["unit"], queries))
    return found
