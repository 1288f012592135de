"""`hotrow serve`: a real tritonserver in the foreground."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import click

from hotrow.options import completion
from hotrow.options.ports import port_options
from hotrow.options.server import read_key
from hotrow.options.types import FILE, FOLDER_OR_URL
from hotrow.output.progress import byte_progress
from inference_session.errors import ConfigurationError
from inference_session.model_source import is_url
from triton_backend.client.tls import ServerTls
from triton_backend.launcher.process_group import adopt_orphans
from triton_backend.launcher.server import ServerOptions, TritonServer
from triton_backend.repository.remote import local_repository

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OWN_FLAGS = {
    "--http-port": "give --http-port before `--`",
    "--grpc-port": "give --grpc-port before `--`",
    "--metrics-port": "give --metrics-port before `--`",
    "--http-address": "give --host or --http-host before `--`",
    "--grpc-address": "give --host before `--`",
    "--metrics-address": "give --host before `--`",
    "--allow-http": "it watches the server over HTTP",
    "--allow-grpc": "it loads models over gRPC",
    "--model-control-mode": "it loads models over gRPC, in the mode `explicit`",
    "--backend-directory": "it makes a folder of the server's backends and its own",
}
"""Flags of tritonserver that the user cannot give, because we rely on the value that we give; with what to say."""


@click.command()
@click.option(
    "--repository",
    required=True,
    type=FOLDER_OR_URL,
    metavar="DIR|URL",
    help="The model repository, a folder per model.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME",
    shell_complete=completion.models,
    help="Serve only this model; may be repeated.",
)
@click.option(
    "--host", default="127.0.0.1", show_default=True, help=("Address to listen on; 0.0.0.0 for all interfaces.")
)
@port_options
@click.option(
    "--restrict-apis",
    "key_file",
    type=FILE,
    help="Allow loading, configuration, statistics, logging and shared memory only to clients that send the key in "
    "this file as header `hotrow-key` (gRPC: `triton-grpc-protocol-hotrow-key`).",
)
@click.option("--tls-certificate", type=FILE, help="Use TLS for gRPC with this certificate; needs --tls-key.")
@click.option("--tls-key", type=FILE, help="The unencrypted key of the certificate.")
@click.option("--tls-client-ca", type=FILE, help="Accept only gRPC clients whose certificate this authority signed.")
@click.option(
    "--http-host",
    metavar="ADDRESS",
    help="Address for HTTP, which has no TLS.  [default: as --host; with --tls-certificate 127.0.0.1]",
)
@click.option(
    "--front",
    is_flag=True,
    help="Run nginx in front of the server, which protects it from requests that would end it: cancelled requests, "
    "and huge shapes and deep arrays in JSON. Requests may have at most 64 MiB; no streams. Needs nginx (apt-get "
    "install nginx-light).",
)
@click.option("--verbose", is_flag=True, help="Show the server's informational log lines too.")
@click.argument("flags", nargs=-1, metavar="[-- TRITONSERVER FLAGS]")
def command(
    repository: str,
    models: tuple[str, ...],
    host: str,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    key_file: Path | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    http_host: str | None,
    front: bool,
    verbose: bool,
    flags: tuple[str, ...],
) -> None:
    """Serve the models of a repository with tritonserver, in the foreground.

    A repository on HDFS, hdfs://HOST:PORT/path, is first copied to the user's cache folder and verified; only
    changed files are copied. The line `copy` shows the folder from which it is served.

    The server is the one on PATH or in /opt/tritonserver, otherwise the one of the nvidia-pytriton package. When
    all models are ready, the command prints one line per endpoint and per model. It ends on SIGTERM or Ctrl-C.
    Flags after `--` are passed to tritonserver.

    \b
    Examples:
      hotrow serve --repository model_repository
      hotrow serve --repository model_repository --model ctr --host 0.0.0.0 --restrict-apis /run/secrets/hotrow.key
      hotrow serve --repository model_repository --front --host 0.0.0.0 --restrict-apis /run/secrets/hotrow.key
      hotrow serve --repository model_repository --host 0.0.0.0 --tls-certificate tls.crt --tls-key tls.key
    """
    _check_flags(flags)
    options = ServerOptions(
        repository=Path(repository),
        models=models,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        http_host=http_host,
        tls=_tls(tls_certificate, tls_key, tls_client_ca),
        restricted_key=read_key(key_file) if key_file else None,
        front=front,
        verbose=verbose,
        extra_flags=flags,
    )
    _serve(options, repository)


def _check_flags(flags: Sequence[str]) -> None:
    if flags and not flags[0].startswith("-"):
        raise click.UsageError(f"{flags[0]!r} is no flag of tritonserver; --repository and --model name what to serve")
    for flag in flags:
        name = flag.partition("=")[0]
        if name in _OWN_FLAGS:
            raise click.UsageError(f"`hotrow serve` sets tritonserver's {name} itself: {_OWN_FLAGS[name]}")


def _serve(options: ServerOptions, repository: str) -> None:
    for number in _STOPS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, _interrupt)
    adopt_orphans()
    try:
        with ExitStack() as stack:
            folder = _enter_repository(stack, repository, options.models)
            server = stack.enter_context(TritonServer.start(replace(options, repository=folder)))
            _announce(server)
            _warn(options)
            server.wait()
    except KeyboardInterrupt:
        sys.exit(0)


def _enter_repository(stack: ExitStack, repository: str, models: Sequence[str]) -> Path:
    if not is_url(repository):
        return Path(repository)
    with byte_progress(f"Reading {repository}") as progress:
        folder = stack.enter_context(local_repository(repository, models, progress))
    click.echo(f"copy     {folder}")
    return folder


def _interrupt(number: int, frame: object) -> None:
    """Stop, once: a second signal does not interrupt the stop, which ends by itself."""
    for stop in _STOPS:
        signal.signal(stop, signal.SIG_IGN)
    raise KeyboardInterrupt


def _warn(options: ServerOptions) -> None:
    """Who may load models may run code (docs/how-to/secure.md)."""
    if endpoints := options.open_to_others():
        names = " and ".join({"http": "HTTP", "grpc": "gRPC"}[one] for one in endpoints)
        click.echo(
            f"hotrow: other machines that reach the {names} port may load and unload models; --restrict-apis FILE "
            "asks them for a key",
            err=True,
        )


def _announce(server: TritonServer) -> None:
    for name, url in server.endpoints.items():
        click.echo(f"{name:<8} {url}")
    for model, versions in server.served_versions().items():
        noun = "version" if len(versions) == 1 else "versions"
        click.echo(f"model    {model} ({noun} {', '.join(map(str, versions))})")


def _tls(certificate: Path | None, key: Path | None, client_ca: Path | None) -> ServerTls | None:
    if certificate and key:
        return ServerTls(certificate, key, client_ca)
    if certificate or key or client_ca:
        raise ConfigurationError("TLS needs both --tls-certificate and --tls-key")
    return None
