"""How large the values of a graph can become, as far as tables and operators limit them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from inference_session.importers.onnx.context.work import Work
from inference_session.importers.onnx.weights import Weight
from inference_session.onnx_graphs import attribute, axes_of

_ROUNDING = 2.0**-24
_MAX_ERROR = 2e-5
"""The largest error of an element of a product that is taken apart, in the worst case. Usually it is a hundredth of
that, and the import tries it out."""
_BOUNDED = frozenset({"Sigmoid", "HardSigmoid", "Tanh", "Softsign", "Softmax", "Sin", "Cos", "Erf", "Sign"})
_KEEPING = frozenset({
    "Abs", "Dropout", "Expand", "Gather", "Identity", "Neg", "ReduceMax", "ReduceMean", "ReduceMin",
    "Relu", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
})  # fmt: skip
_CHUNK_ROWS = 1 << 16


class Bounds:
    """The largest length, as the root of the sum of squares, that a value's last axis can have."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._lengths: dict[str, float | None] = {}
        self._tables: dict[str, _Norms] = {}

    def may_part(self, node: NodeProto, weights: NDArray[np.float64]) -> bool:
        """Whether the values that a node adds or subtracts may be multiplied by weights one by one; of a node that
        multiplies, whether the terms of its operands may.

        A product's rounding error is about its factors' lengths times 2^-24, whatever the sum of the terms is.
        """
        lengths = [self.length(name) for name in (node.output[:1] if node.op_type == "Mul" else node.input)]
        known = [length for length in lengths if length is not None]
        if len(known) < len(lengths):
            return False
        longest = float(np.linalg.norm(weights, axis=0).max(initial=0.0))
        return sum(known) * longest * _ROUNDING <= _MAX_ERROR

    def length(self, name: str) -> float | None:
        """None where it has no limit: inputs, for instance, may be any numbers."""
        if name not in self._lengths:
            self._lengths[name] = None  # ends the recursion if a malformed graph has a cycle
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
            return self._norms(node.input[0]).length
        rule = self._rules.get(node.op_type)
        if rule is not None:
            return rule(node)
        return self.length(node.input[0]) if node.op_type in _KEEPING and self._keeps_width(node) else None

    @property
    def _rules(self) -> dict[str, Callable[[NodeProto], float | None]]:
        return {
            **dict.fromkeys(("Add", "Sub", "Mul"), self._combined),
            **dict.fromkeys(("MatMul", "Gemm"), self._multiplied),
            **dict.fromkeys(("Flatten", "Reshape"), self._flattened),
            "Concat": self._joined,
            "LayerNormalization": self._normalized,
            "ReduceSum": self._summed,
        }

    def _normalized(self, node: NodeProto) -> float | None:
        """At most the root of the width, times the largest factor, plus the length of the added row."""
        width, rank = (self._work.dims(node.output[0]) or (0,))[-1], self._work.rank(node.output[0]) or 0
        scale = self._work.constant(node.input[1])
        shift = self.length(node.input[2]) if len(node.input) > 2 else 0.0
        if scale is None or shift is None or attribute(node, "axis", -1) not in (-1, rank - 1):
            return None
        return math.sqrt(width) * float(np.abs(scale).max(initial=0.0)) + shift

    def _summed(self, node: NodeProto) -> float | None:
        """As many vectors, at most."""
        length, dims, axes = self.length(node.input[0]), self._work.dims(node.input[0]), axes_of(self._work.graph, node)
        sizes, kept = self._work.sizes(node.input[0]), attribute(node, "keepdims", 1)
        if length is None or dims is None or not axes or sizes is None:
            return None
        summed = {axis % len(dims) for axis in axes}
        if (
            len(dims) - 1 in summed
            or None in (counts := [sizes[axis] for axis in summed])
            or (not kept and 0 in summed)
        ):
            return None
        return length * math.prod(count or 0 for count in counts)

    def _flattened(self, node: NodeProto) -> float | None:
        """All rows of a sample behind each other, at most."""
        length, dims = self.length(node.input[0]), self._work.dims(node.input[0])
        after = self._work.dims(node.output[0])
        if length is None or dims is None or after is None or dims[0] != after[0]:
            return None
        return length * math.sqrt(math.prod(dims[1:-1]))

    def _combined(self, node: NodeProto) -> float | None:
        """A sum is no longer than its operands together, a product than one times the largest element of the other."""
        lengths = [self.length(name) for name in node.input]
        first, second = lengths
        if first is None or second is None:
            return None
        if node.op_type != "Mul":
            return first + second
        return min(first * (self._largest(node.input[1]) or second), second * (self._largest(node.input[0]) or first))

    def _largest(self, name: str) -> float | None:
        """The largest element of a value, where it is copied from a table; its length is one, too."""
        node = self._work.made_by.get(name)
        while node is not None and not node.domain and node.op_type in (*_KEEPING, "Flatten", "Reshape"):
            if node.op_type == "Gather" and node.input[0] in self._work.weights:
                return self._norms(node.input[0]).largest
            node = self._work.made_by.get(node.input[0])
        return None

    def _multiplied(self, node: NodeProto) -> float | None:
        """Weights stretch no vector by more than their largest singular value."""
        weights, length = self._work.constant(node.input[1]), self.length(node.input[0])
        bias = self.length(node.input[2]) if len(node.input) > 2 and node.input[2] else 0.0
        if weights is None or weights.ndim != 2 or length is None or bias is None:
            return None
        return length * float(np.linalg.norm(weights.astype(np.float64), 2)) + bias

    def _norms(self, table: str) -> _Norms:
        """The norms of a table, which is read through once."""
        if table not in self._tables:
            self._tables[table] = _norms(self._work.weights[table])
        return self._tables[table]

    def _joined(self, node: NodeProto) -> float | None:
        lengths = [self.length(name) for name in node.input]
        known = [length for length in lengths if length is not None]
        return float(np.sqrt(sum(length**2 for length in known))) if len(known) == len(lengths) else None

    def _keeps_width(self, node: NodeProto) -> bool:
        """Whether the last axis stays unchanged."""
        before, after = (self._work.dims(name) for name in (node.input[0], node.output[0]))
        return before is not None and after is not None and before[-1:] == after[-1:]


class _Norms(NamedTuple):
    """The norms of a table's rows."""

    length: float
    """The length of the longest row."""
    largest: float
    """The largest element."""


def _norms(table: Weight) -> _Norms:
    length = largest = 0.0
    for begin in range(0, table.dims[0], _CHUNK_ROWS):
        rows = table.rows(np.arange(begin, min(begin + _CHUNK_ROWS, table.dims[0]))).astype(np.float32)
        flat = rows.reshape(len(rows), -1)
        length = max(length, float(np.sqrt(np.einsum("ij,ij->i", flat, flat).max(initial=0.0))))
        largest = max(largest, float(np.abs(flat).max(initial=0.0)))
    return _Norms(length, largest)
