"""What the tests of divided networks share."""

from __future__ import annotations

import pytest

from inference_session.importers.onnx.ranking import ranking_import


@pytest.fixture(autouse=True)
def always_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks are divided however fast they are on this machine."""
    monkeypatch.setattr(ranking_import, "measure", lambda *_: None)
