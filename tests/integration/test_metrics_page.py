"""docs/reference/metrics.md, compared with what a real server reports and with the alerts."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest
import yaml

from tests.testing.command_line import hotrow
from tests.testing.metrics_documentation import METRICS_PAGE, Metric, documented_metrics
from tests.testing.model_settings import add_settings
from tests.testing.served import Serve
from tests.testing.servers import wait_until
from tests.testing.triton_models import write_ctr

ROOT = Path(__file__).parents[2]
METRIC = re.compile(r"\b(?:hotrow|nv)_[a-z_]+[a-z]\b")


def reported(text: str) -> dict[str, Metric]:
    """What is on a server's metrics page."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    labels: dict[str, frozenset[str]] = {}
    for name, values in re.findall(r"^(\w+)(?:\{(.*?)\})? \S+$", text, re.MULTILINE):
        labels[name] = frozenset(re.findall(r'(\w+)="', values))
    return {name: Metric(kind, labels.get(name, frozenset())) for name, kind in kinds.items()}


def alerts() -> dict[str, str]:
    """The conditions of all alerts, by name."""
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text(encoding="utf-8"))
    return {rule["alert"]: rule["expr"] for group in rules["groups"] for rule in group["rules"]}


@pytest.mark.triton
def test_the_page_has_each_metric_of_a_server_with_its_kind_and_labels(serve: Serve, tmp_path: Path) -> None:
    """A model with a store and an update stream has all metrics; and all metrics of the page exist."""
    version_dir, database = tmp_path / "repository/ctr/1", f"rocksdb://{tmp_path}/db"
    write_ctr(version_dir)
    hotrow("push", version_dir, "--to", database)
    # No broker listens there; the server must serve anyway.
    settings = {"persistent_store": database, "update_stream": "kafka://127.0.0.1:1"}
    add_settings(version_dir.parent / "config.pbtxt", settings)
    served = serve(tmp_path / "repository")

    def found() -> dict[str, Metric]:
        """What the server reports at the moment."""
        with urllib.request.urlopen(served.metrics) as page:  # noqa: S310  a page of ours
            return reported(page.read().decode())

    described = {name: Metric(metric.kind, metric.labels) for name, metric in documented_metrics().items()}
    wait_until(lambda: described.items() <= found().items(), f"all of {sorted(described)}")
    assert {name for name in found() if name.startswith("hotrow_")} <= described.keys()


def test_the_page_has_each_alert_its_first_steps_and_what_it_reads() -> None:
    """Every alert has a section, every section an alert, and each metric lists the alerts that read it."""
    assert set(re.findall(r"^### (\w+)$", METRICS_PAGE, re.MULTILINE)) == alerts().keys()
    reading: dict[str, set[str]] = {}
    for alert, condition in alerts().items():
        for name in METRIC.findall(condition):
            reading.setdefault(name, set()).add(alert)
    assert {name: set(metric.alerts) for name, metric in documented_metrics().items() if metric.alerts} == reading


def test_the_page_has_all_that_is_looked_at() -> None:
    """The metrics that the dashboard and the scaling rule query are described."""
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/hotrow.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    scaling = yaml.safe_load((ROOT / "deploy/kubernetes/adapter.yaml").read_text(encoding="utf-8"))
    queries += [rule[query] for rule in scaling["rules"]["custom"] for query in ("seriesQuery", "metricsQuery")]
    assert {name for query in queries for name in METRIC.findall(query)} <= documented_metrics().keys()
