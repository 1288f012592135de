"""The `hotrow` command: finds the module of the command that was asked for, and reports errors in one line."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import cast

import click

from hotrow import __version__
from inference_session.errors import HotrowError

_SECTIONS = {
    "Models": ("import", "inspect", "publish-version", "record-canary", "size"),
    "Serving": (
        "serve",
        "load",
        "announce",
        "follow",
        "smoke-test",
        "roll-back",
        "versions",
        "health",
        "top",
        "doctor",
    ),
    "Rows": ("push", "publish", "dump", "copy"),
}
"""The commands, as `--help` shows them."""

_MODULES = {"import": "import_model", "inspect": "inspect_version"}
"""Where the module is not called as its command."""


class _Commands(click.Group):
    """Loads a command's module only when that command runs, so that `--help` answers at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in _SECTIONS.values() for name in names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = import_module(f"hotrow.commands.{_MODULES.get(cmd_name, cmd_name.replace('-', '_'))}")
        return cast("click.Command", module.command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """A section per kind of work; whole sentences, where click's own would break them off."""
        for title, names in _SECTIONS.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl([(name, command.get_short_help_str(200)) for name, command in commands if command])


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
