"""The `hotrow` command: finds the module of the command that was asked for, and reports errors in one line."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import cast

import click

from hotrow import __version__
from inference_session.errors import HotrowError

_COMMANDS = {
    "import": "import_model",
    "serve": "serve",
    "inspect": "inspect_version",
    "push": "push",
    "publish-version": "publish_version",
    "publish": "publish",
    "load": "load",
    "smoke-test": "smoke_test",
    "roll-back": "roll_back",
    "versions": "versions",
    "health": "health",
    "record-canary": "record_canary",
    "copy": "copy",
    "dump": "dump",
    "size": "size",
    "top": "top",
    "doctor": "doctor",
}


class _Commands(click.Group):
    """Loads a command's module only when that command runs, so that `--help` answers at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        return cast("click.Command", import_module(f"hotrow.commands.{_COMMANDS[cmd_name]}").command)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hotrow")
def cli() -> None:
    """Serve recommender models on Triton Inference Server, tables and dense network together.

    \b
      hotrow import onnx model.onnx --name ctr --repository model_repository
      hotrow serve --repository model_repository
    """


def main() -> None:
    """Entry point: an error that we raise on purpose, or that a file system raises, is one line and exit code 1."""
    try:
        cli(prog_name="hotrow")
    except (HotrowError, OSError) as error:
        click.echo(f"hotrow: {_in_one_line(error)}", err=True)
        sys.exit(1)


def _in_one_line(error: HotrowError | OSError) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)
