"""Certificates for servers with TLS, of an authority that no other program trusts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Certificate:
    """A certificate and its key, in files."""

    file: Path
    key: Path


@dataclass(frozen=True)
class Authority:
    """An authority that signs certificates."""

    folder: Path
    ca: trustme.CA

    @property
    def file(self) -> Path:
        """Its own certificate."""
        return self.folder / "ca.pem"

    def issue(self, *names: str) -> Certificate:
        """A certificate for a host with these names."""
        issued = self.ca.issue_cert(*names)
        made = Certificate(self.folder / f"{names[0]}.pem", self.folder / f"{names[0]}.key")
        made.file.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        made.key.write_bytes(issued.private_key_pem.bytes())
        return made


def new_authority(folder: Path) -> Authority:
    """A new authority."""
    folder.mkdir()
    authority = Authority(folder, trustme.CA())
    authority.ca.cert_pem.write_to_path(str(authority.file))
    return authority


def tls_flags(certificate: Certificate) -> tuple[str, ...]:
    """Options of a certificate, for `serve` and for commands that call a server."""
    return ("--tls-certificate", str(certificate.file), "--tls-key", str(certificate.key))
