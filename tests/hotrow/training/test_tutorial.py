"""The tutorial "Serve what you are training", run as it is written with a real broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.testing.broker import Broker
from tests.testing.walkthrough import Walkthrough

pytest.importorskip("torch")

pytestmark = [pytest.mark.training, pytest.mark.triton]

PAGE = Path(__file__).parents[3] / "docs/tutorials/serve-what-you-train.md"


def test_the_served_rows_are_the_trainers(tritonserver: None, broker: Broker, tmp_path: Path) -> None:
    """Its last command prints the difference between served and trained rows, which is zero."""
    not_run = ["make online-learning", "docker run", "served      AUC"]
    page = Walkthrough(PAGE, tmp_path, environment={"BROKER": broker.url}, not_run=not_run)
    page.run()
    assert any('"model_name":"clicks"' in output for output in page.outputs)
