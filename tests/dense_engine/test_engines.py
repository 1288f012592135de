"""All engines of ONNX files keep the contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inference_session.config import SessionConfig
from inference_session.dense_engine import DenseEngine, OnnxEngine, create_engine
from inference_session.device.host import HOST
from tests.testing.dense_engine_contract import DenseEngineContract


class TestOnnxEngine(DenseEngineContract):
    """ONNX Runtime on the processor."""

    @pytest.fixture
    def engine(self, network: Path) -> Iterator[DenseEngine]:
        engine = OnnxEngine(network, num_threads=1)
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
