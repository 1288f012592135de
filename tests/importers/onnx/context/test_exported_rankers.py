"""Ranking networks as PyTorch's two exporters write them: answered as the original on tiled inputs, and divided."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inference_session.importers.onnx import import_onnx
from tests.testing.ranking import assert_alike
from tests.testing.torch_export import export_torch

pytestmark = [pytest.mark.exporters, pytest.mark.filterwarnings("ignore")]
NUM_ROWS, NUM_USER, NUM_CLICKS, NUM_ITEM = 1200, 6, 12, 3
ONCE = {
    "DIN": 0.5,
    "DIN, softmax": 0.5,
    "DIN, ReLU, no mask": 0.5,
    "DIN, repeat": 0.5,
    "DIEN without GRU": 0.6,
    "MMoE": 0.55,
    "MMoE, bmm": 0.55,
    "PLE": 0.5,
    "DCN-v2": 0.2,
    "DCN-v2, low rank": 0.3,
    "DLRM": 0.2,
    "two towers": 0.5,
    "TransformerEncoderLayer": 0.9,
    "MultiheadAttention": 0.8,
    "TransformerEncoderLayer, steps first": 0.9,
    "BST": 0.0,
    "xDeepFM": 0.0,
    "FM": 0.0,
    "DeepFM": 0.5,
}
"""The part of the multiply-adds that has to be computed once per context, at least."""


@pytest.mark.parametrize("exporter", ["dynamo", "legacy"])
@pytest.mark.parametrize("kind", ONCE)
def test_exported_rankers_are_divided(tmp_path: Path, kind: str, exporter: str) -> None:
    """Requests of one context, of several, and with one candidate each."""
    torch = pytest.importorskip("torch")
    from tests.testing.torch_rankers import RANKERS

    random = np.random.default_rng(0)
    widths = {"user": NUM_USER, "clicks": NUM_CLICKS, "item": NUM_ITEM}

    def keys(counts: dict[str, int]) -> dict[str, np.ndarray]:
        return {name: random.integers(0, NUM_ROWS, (counts[name], width)) for name, width in widths.items()}

    class Network(torch.nn.Module):  # type: ignore[misc, name-defined]
        """The exporter wants arguments without names."""

        def __init__(self) -> None:
            super().__init__()
            self.ranker = RANKERS[kind]()

        def forward(self, *inputs: object) -> object:
            return self.ranker(*inputs)

    torch.manual_seed(0)
    inputs = keys(dict.fromkeys(widths, 4))
    path = tmp_path / "model.onnx"
    export_torch(path, Network().eval(), inputs, dict.fromkeys(widths, "batch"), dynamo=exporter == "dynamo")

    report = import_onnx(path, tmp_path / "repository", "m", context=_given(path))

    names = [tensor.name for tensor in report.spec.inputs]
    for counts in ([40], [3, 0, 70, 1], [1, 1, 1]):
        request = keys({"user": len(counts), "clicks": len(counts), "item": sum(counts)})
        assert_alike(tmp_path, report, {name: request[name] for name in names}, counts)
    assert report.spec.joinable
    assert report.spec.ranking is not None
    assert report.spec.ranking.multiply_adds_fraction >= ONCE[kind]


def _given(path: Path) -> list[str]:
    """The context's inputs, of those that the model reads."""
    import onnx

    inputs = {value.name for value in onnx.load(path).graph.input}
    return [name for name in ("user", "clicks") if name in inputs]
