"""The ports of a server, as options of the commands that start one, or check whether one could start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

_PORT = click.IntRange(0, 65535)


def port_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options `--http-port`, `--grpc-port` and `--metrics-port` of a click command."""
    http = click.option(
        "--http-port",
        type=_PORT,
        default=8000,
        show_default=True,
        help="0 for any free port; the same holds for the other ports.",
    )
    grpc = click.option("--grpc-port", type=_PORT, default=8001, show_default=True)
    metrics = click.option("--metrics-port", type=_PORT, default=8002, show_default=True)
    return http(grpc(metrics(command)))
