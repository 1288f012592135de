"""The tutorials, run as they are written on a real Triton.

"Serve what you are training" is run by tests/hotrow/training/test_tutorial.py, where PyTorch is installed. "Run on
Kubernetes" needs a cluster: tests/docs/test_names.py reads its commands, and tests/deploy validates its manifests.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.testing.manual import ROOT
from tests.testing.walkthrough import Walkthrough

PAGES = ROOT / "docs/tutorials"


@pytest.mark.triton
@pytest.mark.parametrize("page", ["first-model", "migrate-hugectr", "rank-candidates"])
def test_a_tutorial_reaches_its_end(page: str, tmp_path: Path) -> None:
    """Each command ends with status 0 and prints what the page shows."""
    Walkthrough(PAGES / f"{page}.md", tmp_path).run()


def test_manifests_that_the_tutorials_name_exist() -> None:
    """Commands of a cluster, which tests cannot run, name files that exist."""
    for page in PAGES.glob("*.md"):
        for name in re.findall(r"`(deploy/[\w./-]+)`", page.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{page.name}: {name}"
