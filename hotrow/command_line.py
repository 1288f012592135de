"""The `hotrow` command: finds the module of the requested command, and reports errors in one line."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import cast

import click
from click.shell_completion import CompletionItem

from hotrow import __version__
from hotrow.command_group import CommandGroup
from hotrow.interrupts import raise_after_imports
from hotrow.output.formatting import in_words, printable
from hotrow.output.streams import drop_refused_output, prepare_standard_streams
from inference_session.errors import HotrowError

_SECTIONS = {
    "Models": {
        "import": "Import a trained ONNX, HugeCTR or PyTorch model into a model repository.",
        "train": "Train a model from HugeCTR's JSON configuration.",
        "inspect": "Show the contents of a version directory or a store, and verify them.",
        "quantize": "Create a smaller version, with tables in float16 or int8.",
        "publish-version": "Publish a version directory in a repository.",
        "record-canary": "Record the answers of a good version, to reject bad versions.",
        "size": "Estimate the memory that a model needs, and recommend a cache size.",
    },
    "Serving": {
        "serve": "Serve the models of a repository with tritonserver.",
        "load": "Load a version, or a new model, and wait until it serves.",
        "smoke-test": "Send recorded requests to a version that was loaded with --beside.",
        "roll-back": "Go back to the previous version.",
        "versions": "List a model's versions and their states.",
        "health": "Check that a model answers a request, as a probe.",
        "top": "Watch a running server.",
        "doctor": "Check this machine for problems that prevent serving.",
    },
    "Rows": {
        "push": "Fill a store with the rows of a version.",
        "publish": "Publish changed rows to the servers that follow a model's updates.",
        "announce": "Announce a new version to the servers that follow a model.",
        "follow": "Load each announced version of a model.",
        "dump": "Write the rows that are served, as HugeCTR sparse folders.",
        "copy": "Copy version directories and tables, also to and from HDFS.",
    },
}
"""The commands and their lines in `--help`, here so that it need not load them."""

_MODULES = {"import": "import_model", "inspect": "inspect_version"}
"""Modules whose names differ from their commands'."""


class _Commands(CommandGroup):
    """Loads a command's module only when that command runs, so that `--help` is fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in _SECTIONS.values() for name in names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = import_module(f"hotrow.commands.{_MODULES.get(cmd_name, cmd_name.replace('-', '_'))}")
        command = cast("click.Command", module.command)
        command.name = cmd_name  # else programs that list commands, such as the manual's, would call each one "command"
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names and sentences for `--help`: click itself would load every command for them."""
        sentences = {name: sentence for commands in _SECTIONS.values() for name, sentence in commands.items()}
        names = [CompletionItem(name, help=text) for name, text in sentences.items() if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One section per kind of task."""
        width = max(map(len, self.list_commands(ctx)))
        for title, commands in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), sentence) for name, sentence in commands.items()])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hotrow")
def cli() -> None:
    """Serve recommender models on Triton Inference Server: embedding tables and dense network together.

    \b
    Example:
      hotrow import onnx model.onnx --name ctr --repository model_repository
      hotrow serve --repository model_repository
    """


def main() -> None:
    """Entry point: an error that we raise on purpose, or that a file system raises, is one line and exit code 1."""
    prepare_standard_streams()
    raise_after_imports()
    try:
        cli(prog_name="hotrow")
    except (HotrowError, OSError) as error:
        text = in_words(error) if drop_refused_output() else f"standard output: {in_words(error)}"
        click.echo(f"hotrow: {printable(text)}", err=True)
        sys.exit(1)
