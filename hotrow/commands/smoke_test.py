"""`hotrow smoke-test`: sends recorded requests to a version that does not serve yet."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np

from hotrow.options import completion
from hotrow.options.server import ServerAddress, server_options
from hotrow.options.types import FILE, Number
from hotrow.options.versions import VERSION
from hotrow.output.formatting import counted
from hotrow.output.progress import waiting
from inference_session.errors import ConfigurationError
from triton_backend.client.recorded_requests import RecordedRequest, largest_difference, not_finite, read_requests
from triton_backend.client.server import RemoteError, RemoteServer

_NOT_LOADED = ("not at ready state", "is not found")
"""In Triton's refusal of a version that it has unloaded, and of one that it never had loaded."""


@click.command()
@click.argument("model", shell_complete=completion.models)
@click.option(
    "--version",
    type=VERSION,
    required=True,
    shell_complete=completion.versions,
    help="The version to test; it must be loaded.",
)
@click.option(
    "--requests",
    type=FILE,
    required=True,
    help='A request per line, as JSON: {"inputs": [{"name": …, "shape": …, "datatype": …, "data": …}]}.',
)
@click.option(
    "--compare-with",
    type=VERSION,
    metavar="OLD",
    shell_complete=completion.versions,
    help=("Send the requests to this version too, and compare the answers."),
)
@click.option("--tolerance", type=Number(min=0), help="Largest difference allowed.  [default: no limit]")
@server_options
def command(
    model: str, version: int, requests: Path, compare_with: int | None, tolerance: float | None, address: ServerAddress
) -> None:
    """Send recorded requests to one version of MODEL, loaded with `hotrow load --beside`, and check the answers.

    An error, NaN, infinity, or a difference above --tolerance ends the command with exit code 1 and names the
    request.

    \b
    Example:
      hotrow smoke-test ctr --version 3 --requests sample.jsonl --compare-with 2 --tolerance 0.2
    """
    if tolerance is not None and compare_with is None:
        raise ConfigurationError("--tolerance needs --compare-with, the version whose answers are compared")
    recorded = read_requests(requests)
    differences = [0.0]
    with address.connect() as server, waiting(f"Testing {model} version {version}"):
        for number, request in enumerate(recorded, 1):
            difference = _test(server, model, request, version, compare_with, f"{requests}, request {number}")
            differences.append(difference)
            if tolerance is not None and not difference <= tolerance:
                raise RemoteError(
                    f"{requests}, request {number}: the answers of versions {version} and {compare_with} differ by "
                    f"{difference:.6g}, more than {tolerance:.6g}"
                )
    compared = (
        f"; versions {version} and {compare_with} differ by {np.max(differences):.6g} at most" if compare_with else ""
    )
    click.echo(f"{model}: version {version} answered {counted(len(recorded), 'request')}{compared}")


def _test(
    server: RemoteServer, model: str, request: RecordedRequest, version: int, other: int | None, where: str
) -> float:
    """How much the answers of the two versions differ; RemoteError if one is an error or no number."""
    try:
        answer = server.ask(model, request.inputs, version=version, datatypes=request.datatypes)
        old = server.ask(model, request.inputs, version=other, datatypes=request.datatypes) if other else answer
    except RemoteError as error:
        is_loaded = not any(sign in str(error) for sign in _NOT_LOADED)
        hint = "" if is_loaded else "; `hotrow load` with --version and --beside loads it"
        raise RemoteError(f"{where}: {error}{hint}") from error
    if names := not_finite(answer):
        raise RemoteError(f"{where}: version {version} answered NaN or infinity in {', '.join(map(repr, names))}")
    return largest_difference(answer, old)
