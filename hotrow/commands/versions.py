"""`hotrow versions`: which versions of a model a server has, and which one serves."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import click

from hotrow.metrics.page import MetricsPage, page_url, unreadable
from hotrow.options import completion
from hotrow.options.server import ServerAddress, server_options
from hotrow.output.formatting import counted
from hotrow.output.streams import print_json
from triton_backend.client.server import RemoteError, RemoteServer, VersionState

_LEAST_WIDTH = 8
"""Width of the column of version numbers, which may be dates."""


@click.command()
@click.argument("model", shell_complete=completion.models)
@server_options
@click.option("--metrics-url", metavar="URL", help="http://HOST:8002/metrics: adds age and hit rate.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def command(model: str, address: ServerAddress, metrics_url: str | None, as_json: bool) -> None:
    """List the versions of MODEL that the server has loaded, had loaded, or failed to load, with their states.

    Versions in the repository that this server was never asked to load are not listed.

    \b
    Example:
      hotrow versions ctr --metrics-url http://localhost:8002/metrics
    """
    with address.connect() as server:
        states = server.versions(model)
        requests = _requests(server, model)
    page = _metrics(metrics_url) if metrics_url else MetricsPage()
    serving = max((state.version for state in states if state.state == "READY"), default=None)
    rows = [_facts(model, state, serving, requests.get(state.version), page) for state in states]
    if as_json:
        print_json(rows)
        return
    if not rows:
        click.echo(f"{model}: no version has been loaded")
    width = max([_LEAST_WIDTH, *(len(str(row["version"])) + 1 for row in rows)])
    for row in rows:
        click.echo(_line(row, width))


def _requests(server: RemoteServer, model: str) -> Mapping[int, Mapping[str, Any]]:
    try:
        return server.statistics(model)
    except RemoteError:  # nothing is loaded, or the key to the statistics was not given
        return {}


def _metrics(url: str) -> MetricsPage:
    url = page_url(url)
    try:
        return MetricsPage.fetch(url)
    except (OSError, ValueError) as error:
        raise unreadable(url, error) from error


def _facts(
    model: str, state: VersionState, serving: int | None, statistics: Mapping[str, Any] | None, page: MetricsPage
) -> dict[str, Any]:
    facts: dict[str, Any] = {"version": state.version, "state": state.state, "serves": state.version == serving}
    if state.reason:
        facts["reason"] = state.reason
    if statistics is not None:
        facts["requests"] = int(statistics.get("inference_stats", {}).get("success", {}).get("count", 0))
    labels = {"model": model, "version": str(state.version)}
    loaded_at = page.total("hotrow_loaded_timestamp_seconds", **labels)
    if state.state == "READY" and loaded_at:
        facts["age_s"] = round(max(0.0, time.time() - loaded_at), 1)  # clocks may differ
    hits, misses = (page.total(f"hotrow_cache_{kind}_total", **labels) or 0.0 for kind in ("hits", "misses"))
    if hits + misses:
        facts["hit_rate"] = round(hits / (hits + misses), 4)
    return facts


def _line(facts: Mapping[str, Any], width: int) -> str:
    known = [
        "serves" if facts["serves"] else "",
        counted(facts["requests"], "request") if "requests" in facts else "",
        f"loaded {facts['age_s']:.0f} s ago" if "age_s" in facts else "",
        f"hit rate {facts['hit_rate']}" if "hit_rate" in facts else "",
        facts.get("reason", ""),
    ]
    return f"{facts['version']:<{width}}{facts['state']:<13}{', '.join(filter(None, known))}".rstrip()
