"""`dense_engine` `tensorrt`, as far as tests can check without TensorRT: it is refused where it is not available."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import onnx
import onnxruntime
import pytest

from inference_session import InferenceSession
from inference_session.config import SessionConfig
from inference_session.dense_engine.create import check_precision
from inference_session.dense_engine.network_file import NetworkFile
from inference_session.dense_engine.tensorrt_profile import profile_shapes
from inference_session.device.discovery import TENSORRT_PROVIDER, unusable_tensorrt
from inference_session.device.host import HOST
from inference_session.errors import ConfigurationError, ModelFormatError, UnsupportedModelError
from tests.testing import small_model


def _network(path: Path, inputs: str) -> Path:
    text = f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => (float[n, 2] y) {{ y = Identity(x) }}'
    onnx.save(onnx.parser.parse_model(text), path)
    return path


def test_a_cpu(tmp_path: Path) -> None:
    """The load fails, and says what to set."""
    small_model.write(tmp_path / "1")
    with pytest.raises(ConfigurationError, match=r"dense_engine cannot be 'tensorrt' on cpu.* use 'onnxruntime'"):
        InferenceSession.open(tmp_path / "1", device="cpu", dense_engine="tensorrt", dense_precision="tf32")


def test_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT would not compute in it."""
    monkeypatch.setattr(type(HOST), "name", "cuda:0")
    gpu = type(HOST)()

    with pytest.raises(ConfigurationError, match=r"dense_precision 'float32'.* 'tf32' or 'float16'"):
        check_precision(SessionConfig(dense_engine="tensorrt"), gpu)
    check_precision(SessionConfig(dense_engine="tensorrt", dense_precision="float16"), gpu)


def test_unknown_engines() -> None:
    with pytest.raises(ConfigurationError, match="'dense_engine' cannot be 'torch'; allowed: onnxruntime, tensorrt"):
        SessionConfig.resolve({"dense_engine": "torch"})


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First ONNX Runtime's part of it, then TensorRT itself."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert "no TensorRT provider" in str(unusable_tensorrt())

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [TENSORRT_PROVIDER])
    monkeypatch.setattr(onnxruntime, "__file__", str(tmp_path / "__init__.py"))
    assert "comes without libonnxruntime_providers_tensorrt.so" in str(unusable_tensorrt())

    (tmp_path / "capi").mkdir()
    (tmp_path / "capi" / "libonnxruntime_providers_tensorrt.so").touch()
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert "TensorRT is not installed" in str(unusable_tensorrt())

    monkeypatch.setitem(sys.modules, "tensorrt", ModuleType("tensorrt"))
    assert unusable_tensorrt() is None


def test_the_sizes_that_a_network_is_compiled_for(tmp_path: Path) -> None:
    """From one sample to the maximum; other dimensions must be fixed, else the network is refused."""
    path = _network(tmp_path / "a.onnx", "float[n, 2] x, float[n, 3, 4] z, float[5] fixed, float scalar")
    assert profile_shapes(NetworkFile(path), 64) == {
        "trt_profile_min_shapes": "x:1x2,z:1x3x4",
        "trt_profile_opt_shapes": "x:64x2,z:64x3x4",
        "trt_profile_max_shapes": "x:64x2,z:64x3x4",
    }
    assert (
        profile_shapes(NetworkFile(tmp_path / "none", path.read_bytes()), 64)["trt_profile_max_shapes"]
        == "x:64x2,z:64x3x4"
    )

    path = _network(tmp_path / "b.onnx", "float[n, 2] x, float[n, history] z")
    with pytest.raises(UnsupportedModelError, match=r"b\.onnx: .*'tensorrt' does not suit .* input 'z' are not fixed"):
        profile_shapes(NetworkFile(path), 64)

    path.write_bytes(b"\xff\xff")
    with pytest.raises(ModelFormatError, match=r"b\.onnx: cannot be read"):
        profile_shapes(NetworkFile(path), 64)
