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
    """Serve the version of MODEL before the one that serves: the next lower number in the model's folder.

    The version that serves now answers until the other is ready. It stays in the repository: `hotrow load MODEL` brings
    it back. Rolled back twice, a model goes down two versions; where there is no lower one, that is an error.

    \b
    Example:
      hotrow roll-back ctr --url server:8001
    """
    with address.connect() as server, waiting(f"Rolling back {model}"):
        left, target = roll_back(server, model)
    click.echo(f"{model}: version {target} serves (before: {left})")
