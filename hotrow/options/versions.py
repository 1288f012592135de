"""Where a version is written, as options of the commands that write one into a model repository."""

from __future__ import annotations

import click

from hotrow.options import completion
from hotrow.options.types import LocalFolder
from inference_session.model_spec import is_folder_name
from inference_session.platform.drafts import MAX_VERSION


def _model_name(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
    if not is_folder_name(value.replace(".", "_")) or value.startswith("."):
        raise click.BadParameter(
            f"{value!r} may contain only letters, digits, '_', '-' and '.', and must not start with '.'"
        )
    return value


VERSION = click.IntRange(1, MAX_VERSION)
name_option = click.option(
    "--name",
    required=True,
    callback=_model_name,
    shell_complete=completion.models,
    help="Name by which clients request the model.",
)
repository_option = click.option(
    "--repository", required=True, type=LocalFolder(), help="Model repository; created if it does not exist."
)
version_option = click.option("--version", type=VERSION, help="Version number.  [default: one above the highest]")
