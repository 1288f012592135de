"""`hotrow roll-back`: the version below the one that serves."""

from __future__ import annotations

import click

from hotrow.progress import waiting
from hotrow.server_options import ServerAddress, server_options
from triton_backend.client.roll_back import roll_back


@click.command()
@click.argument("model")
@server_options
def command(model: str, address: ServerAddress) -> None:
    """Go back to the previous version of MODEL: the next lower number in the model's folder.

    The active version answers until the other one is ready. It stays in the repository, and `hotrow load MODEL`
    brings it back. Rolling back twice goes down two versions. It is an error if there is no lower version.

    \b
    Example:
      hotrow roll-back ctr --url server:8001
    """
    with address.connect() as server, waiting(f"Rolling back {model}"):
        left, target = roll_back(server, model)
    click.echo(f"{model}: version {target} serves (before: {left})")
