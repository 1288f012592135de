"""Tables of bfloat16 are stored as float32, which has all of its values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from inference_session import InferenceSession
from inference_session.importers.onnx import import_onnx
from tests.testing.onnx_models import KEYS, assert_same, import_model, model_of

BITS = np.random.default_rng(0).integers(0x3C00, 0x4100, (1000, 4)).astype(np.uint16)
BITS[1::2] |= 0x8000
BITS[7] = [0x0000, 0x8000, 0x0001, 0x4E7F]  # zeros, the smallest number, a large one
WIDE = (BITS.astype(np.uint32) << 16).view(np.float32)
READS = {
    "widened": "v = Gather(w, keys) y = Cast<to = 1>(v)",
    "widened before": "t = Cast<to = 1>(w) y = Gather(t, keys)",
    "constant keys too": """v = Gather(w, keys) c = Gather(w, some)
        s = Cast<to = 1>(v) t = Cast<to = 1>(c) y = Add(s, t)""",
}


def _model(reads: str, *, raw: bool = True) -> onnx.ModelProto:
    model = model_of(f"m (int64[b, 2] keys) => (float[b, 2, 4] y) {{ {reads} }}", {"some": np.array([3, -1])})
    values = BITS.tobytes() if raw else WIDE.ravel()
    model.graph.initializer.append(helper.make_tensor("w", TensorProto.BFLOAT16, BITS.shape, values, raw=raw))
    return model


@pytest.mark.parametrize("how", ["widened", "widened before", "constant keys too"])
@pytest.mark.parametrize("raw", [True, False])
def test_answers(tmp_path: Path, how: str, raw: bool) -> None:
    """The imported model answers as the original does."""
    report = import_model(tmp_path, _model(READS[how], raw=raw))

    assert [(table.name, table.dtype) for table in report.tables] == [("w", "float32")]
    assert_same(report, tmp_path / "model.onnx", {"keys": KEYS})
    with InferenceSession.open(report.version_dir) as session:
        np.testing.assert_array_equal(session.lookup("w", np.arange(1000)).view(np.uint32), WIDE.view(np.uint32))


def test_external_data(tmp_path: Path) -> None:
    """A table in a file of its own is read from there, and no copy of it stays in the version."""
    onnx.save(_model(READS["widened"]), tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)

    report = import_onnx(tmp_path / "m.onnx", tmp_path / "repository", "m")

    assert_same(report, tmp_path / "m.onnx", {"keys": KEYS})
    assert not list(report.version_dir.glob(".original*"))
