"""The command line, run in this process: starting one takes longer than most of what it does."""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from hotrow.command_line import cli, main


class Ended(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


def hotrow(*arguments: object) -> str:
    """Run a command that must succeed; returns what it printed."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def run_main(*arguments: object, encoding: str = "utf-8") -> Ended:
    """Run a command whether it succeeds or not, with the messages of its errors. Only the main thread can.

    `encoding`: of standard output and standard error.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr("sys.argv", ["hotrow", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
    return Ended(int(caught.value.code or 0), *map(_text, (out, err)))


def _text(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()
