"""`hotrow doctor`: what on this machine would keep models from being served."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotrow.options.ports import port_options
from hotrow.options.types import LocalFolder
from hotrow.output.formatting import counted
from hotrow.output.streams import print_json

if TYPE_CHECKING:
    from hotrow.doctor.findings import Finding

_LEVELS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "problem": ("PROBLEM", "red")}


@click.command()
@click.option("--repository", type=LocalFolder(), help="A model repository; what its models need is checked too.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address on which `hotrow serve` would listen.")
@port_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def command(
    repository: Path | None, host: str, http_port: int, grpc_port: int, metrics_port: int, as_json: bool
) -> None:
    """Check a machine for common problems and say how to fix them. Nothing is changed.

    The exit code is 1 if there is a problem that prevents models from being served.

    \b
    Example:
      hotrow doctor --repository model_repository
    """
    from hotrow.doctor.checks import Plan, examine  # takes seconds, which --help should not

    found = []
    for finding in examine(Plan(repository, host, (http_port, grpc_port, metrics_port))):
        found.append(finding)
        if not as_json:
            _show(finding)
    if as_json:
        print_json([asdict(finding) for finding in found])
    counts = Counter(finding.level for finding in found)
    if not as_json:
        click.echo(f"{counted(counts['problem'], 'problem')}, {counted(counts['warning'], 'warning')}.")
    sys.exit(1 if counts["problem"] else 0)


def _show(finding: Finding) -> None:
    level, color = _LEVELS[finding.level]
    click.echo(f"{click.style(f'{level:<8}', fg=color)} {finding.check:<16} {finding.message}")
    if finding.fix:
        click.echo(f"{'':<25} fix: {finding.fix}")
