"""`hotrow record-canary`: a request and its answers, to try later versions with."""

from __future__ import annotations

from pathlib import Path

import click

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("version_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("requests", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--to", "target", type=_FILE, required=True, help="The file to write.")
def command(version_dir: Path, requests: Path, target: Path) -> None:
    """Record what a version that is known to be good answers to REQUESTS.

    REQUESTS is an .npz file of one request: an array for each input of the model, by its name. The file that is written
    holds it and all answers. A model with the setting canary_requests refuses versions that answer it with NaN, or
    further off than canary_tolerance allows; the old version goes on.

    \b
    Example:
      hotrow record-canary model_repository/ctr/1 requests.npz --to canary/ctr.npz
      and in model_repository/ctr/config.pbtxt:
      parameters { key: "canary_requests" value { string_value: "/…/canary/ctr.npz" } }
    """
    from inference_session import InferenceSession
    from inference_session.requests.canary import read_arrays, record_canary

    inputs = read_arrays(requests)
    # Without the setting: a file that is to be recorded anew must not stand in its own way.
    with InferenceSession.open(version_dir, canary_requests="") as session:
        record_canary(session.run, inputs, target)
        click.echo(f"{target}: one request and {len(session.spec.outputs)} outputs recorded from {version_dir}")
