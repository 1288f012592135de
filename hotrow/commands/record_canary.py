"""`hotrow record-canary`: a request and its answers, to try later versions with."""

from __future__ import annotations

from pathlib import Path

import click

from hotrow.options.types import FILE, FOLDER
from hotrow.output.formatting import counted


@click.command()
@click.argument("version_dir", type=FOLDER)
@click.argument("requests", type=FILE)
@click.option(
    "--to", "target", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The file to write."
)
def command(version_dir: Path, requests: Path, target: Path) -> None:
    """Record the answers of a version that is known to be good to REQUESTS.

    REQUESTS is an .npz file with one request: an array for each input of the model, by its name. The written file
    contains the request and all answers. A model with the setting canary_requests rejects versions whose answers
    contain NaN or differ by more than canary_tolerance; the old version stays active.

    \b
    Example:
      hotrow record-canary model_repository/ctr/1 requests.npz --to canary/ctr.npz
      and in model_repository/ctr/config.pbtxt:
      parameters { key: "canary_requests" value { string_value: "/…/canary/ctr.npz" } }
    """
    from inference_session import InferenceSession
    from inference_session.requests.canary import read_arrays, record_canary

    inputs = read_arrays(requests)
    # Without the setting: an existing canary file must not prevent its own replacement.
    with InferenceSession.open(version_dir, canary_requests="") as session:
        target.parent.mkdir(parents=True, exist_ok=True)
        record_canary(session.run, inputs, target)
        click.echo(
            f"{target}: one request and {counted(len(session.spec.outputs), 'output')} recorded from {version_dir}"
        )
