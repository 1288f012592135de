"""The neural part of a model: ONNX Runtime behind a small contract."""

from inference_session.dense_engine.base import DenseEngine
from inference_session.dense_engine.onnx_engine import OnnxEngine

__all__ = ["DenseEngine", "OnnxEngine"]
