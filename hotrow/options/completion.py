"""What the tab key completes besides paths: models and versions, of a repository or of a running server."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import click

from hotrow.options.server import ServerAddress, client_tls
from inference_session.errors import HotrowError

_TIMEOUT_S = 2.0
"""Who has pressed the tab key waits no longer for a server that does not answer."""


def models(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The models of `--repository`, if it stands before, else those of the server at `--url`, if it answers."""
    repository = ctx.params.get("repository")
    return _beginning(incomplete, (name for name, _ in _on_server(ctx)) if repository is None else _in(repository))


def versions(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The versions of the model that the server lists."""
    # click assigns no arguments where an option's value is still to come.
    model = ctx.params.get("model") or next(iter(ctx.args), "")
    return _beginning(incomplete, (version for name, version in _on_server(ctx) if name == model))


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return sorted({name for name in names if name and name.startswith(incomplete)})


def _in(repository: str | Path) -> Iterable[str]:
    with suppress(OSError):
        return [path.name for path in Path(repository).iterdir() if path.is_dir() and not path.name.startswith(".")]
    return []


def _on_server(ctx: click.Context) -> list[tuple[str, str]]:
    """Models, and versions as far as the server lists them."""
    url, key_file, *files = map(ctx.params.get, ("url", "key_file", "tls_ca", "tls_certificate", "tls_key"))
    if url is None:
        return []
    with suppress(HotrowError, OSError), ServerAddress(url, key_file, client_tls(*files)).connect() as server:
        return [(entry["name"], entry.get("version", "")) for entry in server.repository_index(_TIMEOUT_S)]
    return []
