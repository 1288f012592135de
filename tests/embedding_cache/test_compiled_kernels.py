"""Compiled kernels are kept on disk, and found again only while all that went into them is the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAD = "from inference_session.embedding_cache.kernels.intrinsics import kernel\n"
OUTER = HEAD + "from inner import inner\n@kernel\ndef outer(a):\n    return inner(a) * 10\n"
RUN = "import outer; print(outer.outer(1), sum(outer.outer.stats.cache_hits.values()))"


def run_outer(folder: Path, inner: str) -> list[int]:
    """What outer(1) returns in a fresh process, and how often it was found compiled."""
    (folder / "inner.py").write_text(HEAD + f"@kernel\ndef inner(a):\n    return {inner}\n")
    environment = {"PYTHONPATH": f"{folder}:{ROOT}", "NUMBA_CACHE_DIR": str(folder / "compiled")}
    environment["PYTHONDONTWRITEBYTECODE"] = (
        "1"  # a .pyc is found stale by size and whole seconds only, and both can stay
    )
    done = subprocess.run([sys.executable, "-c", RUN], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


@pytest.mark.slow
def test_a_kernel_is_compiled_anew_when_one_that_it_calls_changes(tmp_path: Path) -> None:
    """Numba alone would go on with the old one, as the caller's own file is the same."""
    (tmp_path / "outer.py").write_text(OUTER)
    assert run_outer(tmp_path, "a + 1") == [20, 0]
    assert run_outer(tmp_path, "a + 1") == [20, 1]
    assert run_outer(tmp_path, "a + 5") == [60, 0]
