"""All engines of ONNX files keep the contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from inference_session.config import SessionConfig
from inference_session.dense_engine import DenseEngine, NetworkFile, OnnxEngine, create_engine
from inference_session.device.host import HOST
from tests.testing.dense_engine_contract import DenseEngineContract


class TestOnnxEngine(DenseEngineContract):
    """ONNX Runtime on the processor."""

    @pytest.fixture
    def engine(self, network: Path) -> Iterator[DenseEngine]:
        engine = OnnxEngine(NetworkFile(network), num_threads=1)
        yield engine
        engine.close()


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
