"""The audit of `make check`, with a stand-in for pip-audit that says what an advisory service would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci/audit.py"
SKIPPED = {"name": "click", "skip_reason": "not found"}
SOUND = {"name": "numpy", "version": "2.0", "vulns": []}
VULNERABLE = {"name": "onnx", "version": "1.0", "vulns": [{"id": "CVE-1", "fix_versions": ["1.1"]}]}


@pytest.mark.parametrize(
    ("packages", "status", "said"),
    [
        ([SOUND, SKIPPED], 0, "1 of"),
        ([SOUND, VULNERABLE], 1, "onnx 1.0: CVE-1, fixed in 1.1"),
        ([SKIPPED, SKIPPED], 0, "NOT AUDITED"),
        (None, 0, "NOT AUDITED"),
    ],
)
def test_what_is_known_to_be_vulnerable_fails(
    packages: list[dict[str, Any]] | None, status: int, said: str, tmp_path: Path
) -> None:
    """And packages that cannot be looked up are reported as not audited."""
    report = "raise ConnectionError" if packages is None else f"print({json.dumps({'dependencies': packages})!r})"
    (tmp_path / "pip_audit.py").write_text(report, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (status, "")
    assert said in done.stdout
