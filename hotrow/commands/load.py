"""`hotrow load`: a version goes live in a running server."""

from __future__ import annotations

import click

from hotrow.options import completion
from hotrow.options.server import ServerAddress, server_options
from hotrow.options.versions import VERSION
from hotrow.output.progress import waiting
from inference_session.errors import ConfigurationError
from triton_backend.client.server import NoSuchVersionError, RemoteError, RemoteServer

STILL_LOADING = (
    "no answer yet. The server may be reading the checksums of large tables; its log says if the process that loads "
    "has died as it began, and then this load does not end: restart the server"
)


@click.command()
@click.argument("model", shell_complete=completion.models)
@click.option(
    "--version",
    type=VERSION,
    shell_complete=completion.versions,
    help="Serve exactly this version.  [default: the newest, or as the version policy in config.pbtxt says]",
)
@click.option(
    "--beside", is_flag=True, help="Keep the loaded versions, to compare --version with them before it serves."
)
@server_options
def command(model: str, version: int | None, beside: bool, address: ServerAddress) -> None:
    """Load a version of MODEL and wait until it serves; a new model is loaded in the same way.

    The old version answers until the new one is ready. If the new one cannot be loaded, the old one stays active,
    the reason is printed, and the exit code is 1.

    \b
    Examples:
      hotrow load ctr
      hotrow load ctr --version 3 --url server:8001
      hotrow load ctr --version 3 --beside && hotrow smoke-test ctr --version 3 --requests sample.jsonl
    """
    if beside and version is None:
        raise ConfigurationError("--beside needs --version, the version to load in addition to the loaded ones")
    with address.connect() as server:
        before = server.ready_versions(model) if server.has_model(model) else []
        with waiting(f"Loading {model}" + (f" version {version}" if version else ""), STILL_LOADING):
            if version is None:
                server.load(model)
            else:
                _load_version(server, model, version, before if beside else [])
        _report(server, model, version, before)


def _load_version(server: RemoteServer, model: str, version: int, beside: list[int]) -> None:
    try:
        server.load_versions(model, [*beside, version])
    except NoSuchVersionError as error:
        seen = ", ".join(str(state.version) for state in server.versions(model))
        raise RemoteError(
            f"the server's folder of model {model!r} has no version {version}; loaded there so far: {seen}"
        ) from error


def _report(server: RemoteServer, model: str, version: int | None, before: list[int]) -> None:
    """Print the current state; an error unless the requested version is ready."""
    ready = server.ready_versions(model)
    if version is not None and version not in ready:
        found = ", ".join(map(str, ready)) or "none"
        raise RemoteError(f"{model}: version {version} is not loaded; loaded: {found}")
    if not ready:
        raise RemoteError(f"{model}: the server has loaded no version of it")
    others = "".join(f", {other} stays loaded" for other in ready[:-1])
    was = f" (before: {before[-1]})" if before and before[-1] != ready[-1] else ""
    click.echo(f"{model}: version {ready[-1]} serves{was}{others}")
