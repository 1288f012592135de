"""`hotrow health`: does a model answer? For probes of Kubernetes and people."""

from __future__ import annotations

import time

import click

from hotrow.options import completion
from hotrow.options.server import ServerAddress, server_options
from hotrow.options.types import Number


@click.command()
@click.option("--model", required=True, shell_complete=completion.models, help="The model that must answer.")
@click.option(
    "--timeout",
    "timeout_s",
    type=Number(0.1, 86400),
    default=6.0,
    show_default=True,
    help="Time limit for the answer, in seconds.",
)
@server_options
def command(model: str, timeout_s: float, address: ServerAddress) -> None:
    """Send a small generated request to a model, and exit with 0 if it is answered.

    Otherwise one line says what is wrong, and the exit code is 1: no server, no such model, no version loaded, a
    backend process that is dead or hung, or an error as the answer. The server's own readiness does not detect all
    of these.

    \b
    Example, as a readiness probe of Kubernetes:
      exec: {command: [hotrow, health, --model, ctr]}
    """
    begin = time.perf_counter()
    with address.connect() as server:
        version = server.probe(model, timeout_s=timeout_s)
    click.echo(f"{model}: version {version} answers ({1000 * (time.perf_counter() - begin):.0f} ms)")
