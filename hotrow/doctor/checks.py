"""All checks of `hotrow doctor`, in order; none changes anything on the machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hotrow.doctor import machine
from hotrow.doctor.findings import Finding
from hotrow.doctor.repository import check_packages, check_repository
from hotrow.output.formatting import in_words
from triton_backend.launcher.reaper import SHARED_MEMORY


@dataclass(frozen=True)
class Plan:
    """The models to serve, and where."""

    repository: Path | None = None
    host: str = "127.0.0.1"
    ports: tuple[int, int, int] = (8000, 8001, 8002)
    """HTTP, gRPC, metrics."""


def examine(plan: Plan) -> Iterator[Finding]:
    """All findings, in the order in which to fix them; a check without permission is a finding, too."""
    checks = {
        "Python": machine.check_python(),
        "tritonserver": machine.check_server(),
        "NumPy": machine.check_numpy(),
        "GPU": machine.check_gpu(),
        str(SHARED_MEMORY): machine.check_shared_memory(),
        "ports": machine.check_ports(plan.host, plan.ports),
        "open files": machine.check_limits(),
        "compiled kernels": machine.check_kernel_cache(),
        "repository": check_repository(plan.repository) if plan.repository else check_packages(set()),
    }
    for name, findings in checks.items():
        yield from _with_failures(name, findings)


def _with_failures(check: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """The findings of a check, and a problem if it fails itself."""
    try:
        yield from findings
    except (OSError, subprocess.SubprocessError) as error:
        message = f"cannot be read by user {os.geteuid()}: {in_words(error)}"
        fix = "run `hotrow doctor` as the user that serves, or give this user read access"
        yield Finding(check, "problem", message, fix)
