"""The neural part of a model: ONNX Runtime behind a small contract."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from inference_session.config import SessionConfig
from inference_session.dense_engine.base import DenseEngine
from inference_session.dense_engine.onnx_engine import OnnxEngine
from inference_session.dense_engine.vector_engine import VectorEngine

if TYPE_CHECKING:
    from inference_session.gpu_context import GpuContext

__all__ = ["DenseEngine", "OnnxEngine", "VectorEngine", "create_engine"]


def create_engine(path: Path, config: SessionConfig, gpu: GpuContext | None) -> OnnxEngine:
    """The engine of an ONNX file, on the GPU if there is one; raises what the engines do."""
    if gpu is None:
        return OnnxEngine(path, num_threads=config.num_dense_threads)
    from inference_session.dense_engine.cuda_engine import CudaEngine

    return CudaEngine(
        path,
        num_threads=config.num_dense_threads,
        gpu=gpu,
        use_tf32=config.dense_precision == "tf32",
    )
