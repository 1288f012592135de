"""Fixtures of several tests of dense engines."""

from __future__ import annotations

import pytest

from inference_session.dense_engine import openvino


@pytest.fixture
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that has bfloat16, or one on which OpenVINO computes the same layers in float32."""
    if openvino.unusable_bfloat16() is not None:
        monkeypatch.setattr(openvino, "unusable_bfloat16", lambda: None)
