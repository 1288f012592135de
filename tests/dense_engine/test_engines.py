"""All engines of ONNX files keep the contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest

from inference_session.config import SessionConfig
from inference_session.dense_engine.base import DenseEngine
from inference_session.dense_engine.create import create_engine
from inference_session.dense_engine.network_file import NetworkFile
from inference_session.dense_engine.onnx import OnnxEngine
from inference_session.dense_engine.trial import try_to_open
from inference_session.device.host import HOST
from tests.testing.dense_engine_contract import DenseEngineContract
from tests.testing.onnx_models import model_of, table


class TestOnnxEngine(DenseEngineContract):
    """ONNX Runtime on the processor."""

    @pytest.fixture
    def engine(self, network: Path) -> Iterator[DenseEngine]:
        engine = OnnxEngine(NetworkFile(network), num_threads=1)
        yield engine
        engine.close()


def test_half_precision_does_not_end_the_process(tmp_path: Path) -> None:
    """ONNX Runtime 1.32 crashed on this part of a transformer."""
    graph = "m (float16[b, 12, 32] x) => (float16[b, 12, 32] y, float16[12, b, 96] p) "
    graph += "{ y = Add(bias, x)  t = Transpose <perm = [1, 0, 2]> (x)  p = MatMul(t, w) }"
    path = tmp_path / "half.onnx"
    onnx.save(model_of(graph, {"bias": table(32, 1)[:, 0].astype("f2"), "w": table(32, 96).astype("f2")}), path)
    try_to_open([path], "half.onnx")


def test_convolutions_keep_their_optimisation() -> None:
    """What harms others makes them faster."""
    assert NetworkFile(Path("a.onnx"), b"Gemm").harmful_optimizers()
    assert not NetworkFile(Path("a.onnx"), b"GemmConv").harmful_optimizers()


class _PublicOnly:
    """An ONNX Runtime session without what its releases may rename: names that begin with an underscore."""

    def __init__(self, session: Any) -> None:
        self.__session = session

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.__session, name)


class TestOnnxEnginePublicMethods(DenseEngineContract):
    """The same where ONNX Runtime has only its public methods."""

    @pytest.fixture
    def engine(self, network: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DenseEngine]:
        opened = onnxruntime.InferenceSession
        monkeypatch.setattr(
            onnxruntime, "InferenceSession", lambda *given, **named: _PublicOnly(opened(*given, **named))
        )
        engine = OnnxEngine(NetworkFile(network), num_threads=1)
        yield engine
        engine.close()


class TestFloat16Engine(DenseEngineContract):
    """The same in float16."""

    tolerance = 2e-3

    @pytest.fixture
    def engine(self, network: Path) -> Iterator[DenseEngine]:
        engine = create_engine(network, SessionConfig(device="cpu", dense_precision="float16"), HOST)
        yield engine
        engine.close()


class TestOpenVinoEngine(DenseEngineContract):
    """Layers on OpenVINO, in bfloat16."""

    tolerance = 1e-2

    @pytest.fixture
    def engine(self, network: Path, bfloat16: None) -> Iterator[DenseEngine]:
        engine = create_engine(network, SessionConfig(device="cpu", dense_precision="bfloat16"), HOST)
        yield engine
        engine.close()
