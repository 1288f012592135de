"""The neural part of a model: ONNX Runtime behind a small contract."""

from inference_session.dense_engine.base import DenseEngine
from inference_session.dense_engine.onnx_engine import OnnxEngine
from inference_session.dense_engine.vector_engine import VectorEngine

__all__ = ["DenseEngine", "OnnxEngine", "VectorEngine"]
