"""What `tritonserver` is started with: the options of `hotrow serve` as its flags, and safe defaults."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from triton_backend.backend import heartbeat
from triton_backend.backend.log import VERBOSE_VARIABLE
from triton_backend.client import probe
from triton_backend.client.server import RESTRICTED_HEADER
from triton_backend.client.tls import ServerTls
from triton_backend.launcher.installation import Installation
from triton_backend.launcher.ports import is_of_this_machine, reserved_ports, write_served_ports
from triton_backend.repository.servable import ServableModel, is_plain, ps_json_variables
from triton_backend.repository.view import has_gpu

EXIT_TIMEOUT_S = 5
"""How long a stopping server waits for clients to disconnect, before it is killed."""
_NUM_KEPT_REQUESTS = 1024
"""More gRPC requests than clients have under way at one time. Their memory is used again, not freed."""
RESTRICTED_APIS = "model-repository,model-config,shared-memory,statistics,trace,logging"
THIS_MACHINE = "127.0.0.1"
_HEARTBEATS = "heartbeats"

Endpoint: TypeAlias = Literal["http", "grpc", "metrics"]


@dataclass(frozen=True)
class ServerOptions:
    """What to serve, and where."""

    repository: Path
    models: tuple[str, ...] = ()
    """Empty: all of the repository."""
    host: str = "127.0.0.1"
    http_port: int = 8000
    """Port 0: a free one is chosen."""
    grpc_port: int = 8001
    metrics_port: int = 8002
    http_host: str | None = None
    """Where HTTP listens, if not like the others: it has no TLS. None: as `host`, with `tls` on this machine only."""
    tls: ServerTls | None = None
    """TLS of the gRPC endpoint. None: plain text."""
    restricted_key: str | None = None
    """A secret that clients send as header `hotrow-key` to use the management APIs. None: these are open."""
    front: bool = False
    """Let nginx listen on the HTTP and gRPC ports, and tritonserver on local ports of this machine (front.py)."""
    inner_ports: tuple[int, int] = (0, 0)
    """The local ports of HTTP and gRPC behind nginx, chosen with the others."""
    verbose: bool = False
    """Show the server's informational log lines too."""
    complete_configs: bool = False
    """Let backends describe the inputs and outputs that a config.pbtxt lacks: models in Python load slower then."""
    extra_flags: tuple[str, ...] = ()
    """Flags passed to tritonserver unchanged, after ours."""

    def host_of(self, endpoint: Endpoint) -> str:
        """The address at which clients reach an endpoint."""
        if endpoint != "http":
            return self.host
        return self.http_host or (self.host if self.tls is None else THIS_MACHINE)

    def open_to_others(self) -> tuple[Endpoint, ...]:
        """Endpoints at which clients of other machines may load and unload models without a key or a certificate."""
        if self.restricted_key is not None:
            return ()
        certified = {"grpc"} if self.tls is not None and self.tls.client_ca is not None else set()
        endpoints: tuple[Endpoint, ...] = ("http", "grpc")
        return tuple(one for one in endpoints if one not in certified and not is_of_this_machine(self.host_of(one)))

    def port_of(self, endpoint: Endpoint) -> int:
        """The port at which clients reach an endpoint."""
        return {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}[endpoint]

    def listens_at(self, endpoint: Endpoint) -> tuple[str, int]:
        """The address and the port that tritonserver itself listens on."""
        if not self.front or endpoint == "metrics":
            return self.host_of(endpoint), self.port_of(endpoint)
        return THIS_MACHINE, self.inner_ports[("http", "grpc").index(endpoint)]

    @property
    def own_tls(self) -> ServerTls | None:
        """TLS of tritonserver's own gRPC endpoint."""
        return None if self.front else self.tls


@dataclass(frozen=True)
class ServerCommand:
    """How the server's program is run, and run again."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    folder: Path
    """Its working directory: stubs import from theirs first, so it must not be the user's."""
    memory_prefix: str
    """Prefix of the names of its shared memory."""
    probe_key: str = field(repr=False)
    """What marks a request as a probe (probe.py)."""

    @classmethod
    def of(cls, options: ServerOptions, installation: Installation, backends: Path, folder: Path) -> ServerCommand:
        """The command of an installation's program, which finds its backends in `backends` and works in `folder`."""
        memory_prefix = f"hotrow_{os.getpid()}_{secrets.token_hex(4)}_"
        probe_key = secrets.token_hex(16)
        probe.write_key(folder, options.grpc_port, probe_key)
        write_served_ports(folder, [options.port_of(endpoint) for endpoint in get_args(Endpoint)])
        arguments = (
            str(installation.executable),
            f"--backend-directory={backends}",
            f"--cache-directory={installation.caches}",
            f"--backend-config=python,shm-region-prefix-name={memory_prefix}",
            *_flags(options),
        )
        environment = {
            **installation.environment(folder),
            **ps_json_variables(options.extra_flags),
            heartbeat.FOLDER_VARIABLE: str(folder / _HEARTBEATS),
            probe.KEY_VARIABLE: probe_key,
            **({VERBOSE_VARIABLE: "1"} if options.verbose else {}),
        }
        return cls(arguments, environment, folder, memory_prefix, probe_key)

    @property
    def heartbeats(self) -> Path:
        """The folder where backend processes beat."""
        return self.folder / _HEARTBEATS

    def start(self, models: Sequence[ServableModel]) -> subprocess.Popen[bytes]:
        """Run it, in a separate process group, to load these models."""
        return subprocess.Popen(
            [*self.arguments, *(f"--load-model={model.name}" for model in models)],
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@contextlib.contextmanager
def with_ports(options: ServerOptions) -> Iterator[ServerOptions]:
    """Options whose ports are reserved until the context ends, chosen where they were 0.

    Raises:
        ConfigurationError: one is taken.
    """
    wanted = {f"--{name}-port": (options.host_of(name), options.port_of(name)) for name in get_args(Endpoint)}
    inner = dict.fromkeys(("inner HTTP", "inner gRPC"), (THIS_MACHINE, 0))
    with reserved_ports({**wanted, **inner}) as ports:
        http, grpc, metrics, inner_http, inner_grpc = ports.values()
        inner_ports = (inner_http, inner_grpc)
        yield replace(options, http_port=http, grpc_port=grpc, metrics_port=metrics, inner_ports=inner_ports)


def plain_path(repository: Path, folder: Path) -> Path:
    """The repository, through a link in `folder` if its path has spaces or the like: stubs are started by a shell."""
    if is_plain(str(repository)):
        return repository
    link = folder / "repository"
    link.symlink_to(repository)
    return link


def _flags(options: ServerOptions) -> list[str]:
    flags = [
        f"--model-repository={options.repository}",
        "--model-control-mode=explicit",
        # Strict readiness turns false while a version is loaded, and stays false after a failed load.
        "--strict-readiness=false",
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
        # What exceeds the pool is freed, although Triton 24.10 still writes to it: keys in streams change, and it dies.
        f"--grpc-infer-allocation-pool-size={_NUM_KEPT_REQUESTS}",
    ]
    for endpoint in get_args(Endpoint):
        host, port = options.listens_at(endpoint)
        flags += [f"--{endpoint}-address={host}", f"--{endpoint}-port={port}"]
    if options.own_tls is not None:
        flags += options.own_tls.flags()
    # Percentiles in addition to the averages; the cost is not measurable.
    flags.append("--metrics-config=summary_latencies=true")
    if not options.complete_configs:
        flags.append("--disable-auto-complete-config")
    if not options.verbose:
        flags.append("--log-info=false")
    if not has_gpu():
        flags += ["--allow-gpu-metrics=false", "--pinned-memory-pool-byte-size=0"]
        # A thread reads the use of the processor and sleeps for half of this. A server that ends waits for it.
        flags.append("--metrics-interval-ms=500")
    if options.restricted_key is not None:
        rule = f"{RESTRICTED_APIS}:{RESTRICTED_HEADER}={options.restricted_key}"
        flags += [f"--http-restricted-api={rule}", f"--grpc-restricted-protocol={rule}"]
    return [*flags, *options.extra_flags]
