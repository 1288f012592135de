"""What commands print on standard output: tables for people, unbroken lines and JSON for programs."""

from __future__ import annotations

import io
import json
import os
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

_LEAST_WIDTH = 80
"""A table needs this width for its numbers. A narrower terminal breaks its lines."""
_PIPE_WIDTH = 10_000
"""Wide enough for any line: programs that read the output need unbroken ones."""


def prepare_standard_streams() -> None:
    """Make standard output and standard error take any text, and exist.

    A character that their encoding lacks, as in a name of a table, is escaped. Where the parent process has closed
    one, text is dropped: else the next file that is opened would take its number, and get what libraries print.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest free number
        os.set_inheritable(number, True)
    os.close(number)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def drop_refused_output() -> bool:
    """Drop what standard output does not take, for instance because its disk is full; returns whether it took all.

    Otherwise Python writes it again when it ends, and reports that error in lines of its own.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def output_console() -> Console:
    """Standard output for tables, which are as wide as their content, but no wider than a terminal."""
    from rich.console import Console  # loaded where it is needed: not every command shows tables

    console = Console(highlight=False)
    console.width = max(console.width, _LEAST_WIDTH) if sys.stdout.isatty() else _PIPE_WIDTH
    return console


def print_json(value: Any) -> None:
    """Print JSON, with escapes for what the encoding of the output may lack."""
    encoding = sys.stdout.encoding or "utf-8"  # text in memory has none
    is_utf = encoding.lower().startswith("utf")
    click.echo(json.dumps(value, indent=1, ensure_ascii=not is_utf))
