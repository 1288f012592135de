"""The command line, run in this process."""

from __future__ import annotations

from click.testing import CliRunner

from hotrow.command_line import cli


def hotrow(*arguments: object) -> str:
    """Run a command that must succeed; returns what it printed."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout
