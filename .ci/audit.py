"""Look for known vulnerabilities in the packages of this environment with pip-audit.

The exit status is 1 if a newer version of a package would fix one. Vulnerabilities that no version fixes yet are
printed and do not fail the check. If no advisory service can be reached, the check prints that and passes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from typing import Any

NOT_OURS = frozenset({"hotrow", "pip", "setuptools", "wheel"})
"""This package, and those that every virtual environment contains."""
ACCEPTED: Mapping[str, str] = {}
"""Vulnerabilities that do not affect hotrow: their ids, and why."""
PROBE = "requests"
"""A package with known advisories, to see whether an advisory service answers."""
TIMEOUT_S = 300.0


def installed() -> list[str]:
    """The packages of this environment, as requirements."""
    found = {dist.metadata["Name"].lower(): dist.version for dist in distributions()}
    return sorted(f"{name}=={version}" for name, version in found.items() if name not in NOT_OURS)


def audited(requirements: Sequence[str]) -> list[dict[str, Any]]:
    """What the services know of each package; packages that they do not know are left out."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(requirements))
        file.flush()
        command = [sys.executable, "-m", "pip_audit", "--requirement", file.name, "--no-deps", "--disable-pip"]
        command += ["--format", "json", "--progress-spinner", "off", "--timeout", "10"]
        command += [option for accepted in ACCEPTED for option in ("--ignore-vuln", accepted)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            report = json.loads(done.stdout)
        except (subprocess.TimeoutExpired, json.JSONDecodeError):  # it prints no report if no service answers
            return []
    return [package for package in report["dependencies"] if "skip_reason" not in package]


def main() -> int:
    """Ask about one package first: if no service answers, asking about each would take minutes."""
    packages = audited([f"{PROBE}==2.31.0"]) and audited(installed())
    if not packages:
        print("*** NOT AUDITED: no advisory service can be reached; known vulnerabilities would go unnoticed. ***")
        return 0
    vulnerable = [package for package in packages if package["vulns"]]
    for package in vulnerable:
        for found in package["vulns"]:
            mended = ", ".join(found["fix_versions"]) or "no version yet"
            print(f"{package['name']} {package['version']}: {found['id']}, fixed in {mended}")
    print(f"{len(packages)} of {len(installed())} packages audited, {len(vulnerable)} vulnerable")
    return int(any(found["fix_versions"] for package in vulnerable for found in package["vulns"]))


if __name__ == "__main__":
    sys.exit(main())
