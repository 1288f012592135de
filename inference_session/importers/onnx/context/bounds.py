"""How large the values of a graph can become, as far as tables and operators say."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from inference_session.importers.onnx.context.work import Work
from inference_session.importers.onnx.weights import Weight

_ROUNDING = 2.0**-24
_MAX_ERROR = 4e-6
"""Of one element of a product, by being taken apart, in the worst case; what is usual is a tenth of it."""
_BOUNDED = frozenset({"Sigmoid", "HardSigmoid", "Tanh", "Softsign", "Softmax", "Sin", "Cos", "Erf", "Sign"})
_KEEPING = frozenset({
    "Abs", "Dropout", "Expand", "Flatten", "Gather", "Identity", "Neg", "ReduceMax", "ReduceMean", "ReduceMin",
    "Relu", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
})  # fmt: skip
_CHUNK_ROWS = 1 << 16


class Bounds:
    """The largest length, as the root of the sum of squares, that a value's last axis can have."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._lengths: dict[str, float | None] = {}

    def may_part(self, node: NodeProto, weights: NDArray[np.float64]) -> bool:
        """Whether the two values that a node adds or subtracts may be multiplied by weights one by one.

        A product's rounding error is about its factors' lengths times 2^-24, whatever the sum of the terms is.
        """
        lengths = [self.length(name) for name in node.input]
        known = [length for length in lengths if length is not None]
        if len(known) < len(lengths):
            return False
        longest = float(np.linalg.norm(weights, axis=0).max(initial=0.0))
        return sum(known) * longest * _ROUNDING <= _MAX_ERROR

    def length(self, name: str) -> float | None:
        """None where nothing limits it: inputs, for instance, may be any numbers."""
        if name not in self._lengths:
            self._lengths[name] = None  # for graphs that have cycles, which none has
            self._lengths[name] = self._found(name)
        return self._lengths[name]

    def _found(self, name: str) -> float | None:
        node = self._work.made_by.get(name)
        if node is None:
            constant = self._work.constant(name)
            return None if constant is None else float(np.sqrt((constant.astype(np.float64) ** 2).sum()))
        if node.domain:
            return None
        width = float((self._work.dims(name) or (0,))[-1])
        if node.op_type in _BOUNDED:
            return float(np.sqrt(width)) if width else None
        if node.op_type == "Gather" and node.input[0] in self._work.weights:
            return _longest_row(self._work.weights[node.input[0]])
        if node.op_type == "Concat":
            return self._joined(node)
        return self.length(node.input[0]) if node.op_type in _KEEPING and self._keeps_width(node) else None

    def _joined(self, node: NodeProto) -> float | None:
        lengths = [self.length(name) for name in node.input]
        known = [length for length in lengths if length is not None]
        return float(np.sqrt(sum(length**2 for length in known))) if len(known) == len(lengths) else None

    def _keeps_width(self, node: NodeProto) -> bool:
        """Whether the last axis stays as it is."""
        before, after = (self._work.dims(name) for name in (node.input[0], node.output[0]))
        return before is not None and after is not None and before[-1:] == after[-1:]


def _longest_row(table: Weight) -> float:
    longest = 0.0
    for begin in range(0, table.dims[0], _CHUNK_ROWS):
        rows = table.rows(np.arange(begin, min(begin + _CHUNK_ROWS, table.dims[0])))
        squares = (rows.astype(np.float32).reshape(len(rows), -1) ** 2).sum(axis=1)
        longest = max(longest, float(np.sqrt(squares.max(initial=0.0))))
    return longest if np.isfinite(longest) else float("inf")
