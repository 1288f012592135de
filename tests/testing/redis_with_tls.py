"""A Redis that speaks TLS, which those of PyPI do not: the machine's, else Debian's."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.testing.certificates import Authority, Certificate
from tests.testing.packages import kept_folder, unpack_debian

_PACKAGES = ("redis-server", "redis-tools", "libjemalloc2", "liblzf1")


def tls_redis_binary() -> str:
    """The machine's redis-server if it can speak TLS, else Debian's; skips where it cannot be fetched."""
    found = shutil.which("redis-server")
    if found and "libssl" in subprocess.run(["ldd", found], capture_output=True, text=True, check=False).stdout:
        return found
    return str(kept_folder("redis-with-tls", _fetch) / "redis-server")


def _fetch(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".redis-") as temporary:
        files = unpack_debian(_PACKAGES, Path(temporary), "a Redis with TLS")
        (library,) = {path.parent.relative_to(files) for path in files.rglob("libjemalloc.so.*")}
        starter = files / "redis-server"
        starter.write_text(
            f'#!/bin/sh\nLD_LIBRARY_PATH="{folder / library}" exec "{folder}/usr/bin/redis-server" "$@"\n',
            encoding="utf-8",
        )
        starter.chmod(0o755)
        files.rename(folder)


@dataclass(frozen=True)
class TlsServers:
    """What Redis servers and sentinels need to speak TLS alone, and to each other."""

    certificate: Certificate
    authority: Authority

    def settings(self, port: int) -> Sequence[tuple[str, str]]:
        """Lines of a configuration."""
        return (
            *(("port", "0"), ("tls-port", str(port)), ("tls-replication", "yes"), ("tls-auth-clients", "no")),
            *(("tls-cert-file", str(self.certificate.file)), ("tls-key-file", str(self.certificate.key))),
            ("tls-ca-cert-file", str(self.authority.file)),
        )

    def client_settings(self) -> dict[str, object]:
        """Those of the redis package."""
        return {"ssl": True, "ssl_ca_certs": str(self.authority.file)}
