"""The tutorial "Serve what you are training", run as it is written with a real broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.testing.broker import Broker
from tests.testing.walkthrough import Walkthrough

pytestmark = pytest.mark.training

PAGE = Path(__file__).parents[3] / "docs/tutorials/serve-what-you-train.md"


def test_the_served_rows_are_the_trainers(broker: Broker, tmp_path: Path) -> None:
    """Its last command prints how far the rows that are served are from those that were trained: not at all."""
    walkthrough = Walkthrough(PAGE, tmp_path, environment={"BROKER": broker.url})
    walkthrough.run()

    assert "exported version 1" in walkthrough.outputs[0]
    assert "largest difference from the trainer: 0.0" in walkthrough.outputs[-1]
