"""`hotrow roll-back`: the version below the one that serves."""

from __future__ import annotations

from collections.abc import Iterator

import click

from hotrow.commands.load import STILL_LOADING
from hotrow.options import completion
from hotrow.options.server import ServerAddress, server_options
from hotrow.output.progress import waiting
from triton_backend.client.server import NoSuchVersionError, RemoteError, RemoteServer

_MAX_GAP = 100
"""How many unlisted lower version numbers are tried: a server lists only versions that it has once loaded."""


@click.command()
@click.argument("model", shell_complete=completion.models)
@server_options
def command(model: str, address: ServerAddress) -> None:
    """Go back to the previous version of MODEL: the next lower number in the model's folder.

    The active version answers until the other one is ready. It stays in the repository, and `hotrow load MODEL`
    brings it back. Rolling back twice goes down two versions. It is an error if there is no lower version.

    \b
    Example:
      hotrow roll-back ctr --url server:8001
    """
    with address.connect() as server, waiting(f"Rolling back {model}", STILL_LOADING):
        left, target = _roll_back(server, model)
    click.echo(f"{model}: version {target} serves (before: {left})")


def _roll_back(server: RemoteServer, model: str) -> tuple[int, int]:
    """Serve the next lower version; returns the one that served and the one that does now.

    Raises:
        RemoteError: no version serves, there is no lower one, or it cannot be loaded; the active version stays.
    """
    listed = [state.version for state in server.versions(model)]
    ready = server.ready_versions(model)
    if not ready:
        raise RemoteError(f"{model}: no version is loaded, so there is nothing to roll back; `hotrow load` loads one")
    for candidate in _candidates(listed, ready[-1]):
        try:
            server.load_versions(model, [candidate])
        except NoSuchVersionError:
            continue
        return ready[-1], candidate
    tried = "" if ready[-1] <= _MAX_GAP else f" among the versions loaded before and the {_MAX_GAP} numbers below it"
    raise RemoteError(
        f"{model}: version {ready[-1]} is active, and there is no lower version{tried} to roll back to; "
        f"`hotrow load {model} --version N` loads any other"
    )


def _candidates(listed: list[int], serving: int) -> Iterator[int]:
    """Lower versions, the highest first: the server says which exist when asked to load them."""
    near = range(serving - 1, max(serving - 1 - _MAX_GAP, 0), -1)
    yield from sorted({*near, *(version for version in listed if version < serving)}, reverse=True)
