"""`hotrow top`: shows live what a running server does."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

import click
from rich.console import Console
from rich.live import Live

from hotrow.metrics.page import MetricsPage, page_url, unreadable
from hotrow.metrics.top_view import IndexEntry, TopView
from hotrow.options.server import ServerAddress, access_options
from hotrow.options.types import Number
from inference_session.errors import HotrowError

_PLAIN_WIDTH = 200
_TIMEOUT_S = 5.0
_Index: TypeAlias = Callable[[], list[IndexEntry]]


@click.command()
@click.option(
    "--metrics-url",
    default="http://localhost:8002/metrics",
    show_default=True,
    callback=lambda ctx, parameter, value: page_url(value),
    help="The server's metrics.",
)
@click.option(
    "--url",
    metavar="HOST:PORT",
    help="The server's gRPC endpoint, which shows versions that do not serve and why.  [default: not used]",
)
@click.option("--interval", type=Number(0.1, 3600), default=1.0, show_default=True, help="Seconds between updates.")
@click.option("--once", is_flag=True, help="Print one interval and exit.")
@access_options
def command(metrics_url: str, address: ServerAddress | None, interval: float, once: bool) -> None:
    """Watch a running server: requests, latency, hit rates, tiers, updates, memory, and versions that come and go.

    Stop it with Ctrl-C. If the server goes away, the command waits for it. When the output is a pipe, reports are
    printed one after the other.

    \b
    Examples:
      hotrow top
      hotrow top --metrics-url http://recommender-3:8002/metrics --url recommender-3:8001 --once
    """
    view = TopView(metrics_url)
    # The user leaves with Ctrl-C; a reader of a pipe closes it.
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError), _index(address) as index:
        if once:
            _print_once(view, metrics_url, index, interval)
        elif sys.stdout.isatty():
            _watch(view, metrics_url, index, interval)
        else:
            _print_often(view, metrics_url, index, interval)


@contextlib.contextmanager
def _index(address: ServerAddress | None) -> Iterator[_Index]:
    """Yield what asks a server over gRPC which versions it has; without a gRPC address it returns nothing."""
    if address is None:
        yield list
        return
    with address.connect() as server:
        yield lambda: [
            IndexEntry(*(entry.get(key, "") for key in ("name", "version", "state", "reason")))
            for entry in server.repository_index()
        ]


def _look(view: TopView, metrics_url: str, index: _Index) -> None:
    """Query the server once; failures are shown as well."""
    try:
        view.add(MetricsPage.fetch(metrics_url, timeout_s=_TIMEOUT_S), index())
    except (HotrowError, OSError, ValueError) as error:
        view.lose(str(error))


def _watch(view: TopView, metrics_url: str, index: _Index, interval: float) -> None:
    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            _look(view, metrics_url, index)
            live.update(view.render(console.width), refresh=True)
            time.sleep(interval)


def _print_often(view: TopView, metrics_url: str, index: _Index, interval: float) -> None:
    console = _plain_console()
    while True:
        _look(view, metrics_url, index)
        if view.has_rates or view.is_lost:
            console.print(view.render(console.width))
            sys.stdout.flush()
        time.sleep(interval)


def _print_once(view: TopView, metrics_url: str, index: _Index, interval: float) -> None:
    try:
        view.add(MetricsPage.fetch(metrics_url, timeout_s=_TIMEOUT_S), index())
        time.sleep(interval)
        view.add(MetricsPage.fetch(metrics_url, timeout_s=_TIMEOUT_S), index())
    except (OSError, ValueError) as error:
        raise unreadable(metrics_url, error) from error
    console = _plain_console()
    console.print(view.render(console.width))


def _plain_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)
