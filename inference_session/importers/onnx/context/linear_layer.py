"""Products of a value with weights, in any of the forms that exporters write."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from inference_session.importers.onnx.context.work import Work
from inference_session.onnx_graphs import attributes

Matrix = NDArray[np.float64]


class LinearLayer(NamedTuple):
    """`matrix` times `weights`, [columns of the matrix, width], plus `bias`, [width]."""

    matrix: str
    weights: Matrix
    bias: Matrix


def linear_layer(work: Work, node: NodeProto | None) -> LinearLayer | None:
    """A MatMul or Gemm with float32 weights; None for anything else."""
    if node is None or node.domain or node.op_type not in ("MatMul", "Gemm") or not work.is_float(node.output[0]):
        return None
    weights = work.constant(node.input[1])
    if weights is None or weights.ndim != 2 or (work.rank(node.input[0]) or 0) < 2:
        return None
    factors = attributes(node)
    bias: NDArray[np.generic] | None = np.zeros(1)
    if len(node.input) > 2 and node.input[2] and factors.get("beta", 1) != 0:
        bias = work.constant(node.input[2])
    if factors.get("transA", 0) or factors.get("alpha", 1) != 1 or bias is None or bias.ndim > 1:
        return None
    weights = (weights.T if factors.get("transB", 0) else weights).astype(np.float64)
    total = bias.astype(np.float64) * factors.get("beta", 1)
    return LinearLayer(node.input[0], weights, np.broadcast_to(total, weights.shape[1:]))
