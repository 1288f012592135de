"""Proves of the values of a graph that a sample's part of them depends on that sample alone, and says where it lies.

A value whose proof fails, because its operator looks along the samples or is none that this module knows, is UNKNOWN,
and so is all that is made of it: nothing is cut there, and requests of such a model are not joined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import numpy as np
from onnx import GraphProto, NodeProto

from inference_session.importers.onnx.context.shapes import Shape, Shapes
from inference_session.importers.onnx.graph import attribute, bodies

UNARY = frozenset({
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Cast", "CastLike", "Ceil", "Celu",
    "Clip", "Cos", "Cosh", "Dropout", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity",
    "IsInf", "IsNaN", "LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Shrink",
    "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Swish", "Tan", "Tanh", "ThresholdedRelu",
})  # fmt: skip
BROADCASTING = frozenset({
    "Add", "And", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal", "Greater", "GreaterOrEqual", "Less",
    "LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul", "Or", "Pow", "PRelu", "Sub", "Sum", "Where", "Xor",
})  # fmt: skip
_REDUCTIONS = frozenset(
    f"Reduce{kind}" for kind in ["L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare"]
) | {"ArgMax", "ArgMin"}
_RESHAPING = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
_FLATTENING_OPSET = 13


class Other(Enum):
    """What values are that have no part for each sample."""

    FREE = "the same for every batch"
    SIZES = "depends on the sizes of the batch, on no element of it"
    UNKNOWN = "may depend on the other samples of the batch"


@dataclass(frozen=True)
class Rows:
    """Along one axis, the samples: `outer` repetitions of all of them, each `inner` elements long."""

    axis: int
    factors: tuple[tuple[int, int], ...]
    """(outer, inner) under each probe."""

    @property
    def plain(self) -> bool:
        """Whether the axis counts samples and nothing else."""
        return all(factors == (1, 1) for factors in self.factors)


State: TypeAlias = Rows | Other
_Rule: TypeAlias = Callable[["RowAnalysis", NodeProto], "State | dict[str, State]"]


@dataclass(frozen=True)
class Probe:
    """The shapes under one number of samples."""

    num_samples: int
    shapes: Shapes


class RowAnalysis:
    """The states of all values of a graph.

    Args:
        probes: of which the first two differ in their number of samples only.
        tables: initializers; free as they are.
    """

    def __init__(self, graph: GraphProto, probes: Sequence[Probe], opset: int) -> None:
        self._probes = probes
        self._opset = opset
        self._plain = ((1, 1),) * len(probes)
        self.states: dict[str, State] = {value.name: Rows(0, self._plain) for value in graph.input}
        for node in graph.node:
            self._visit(node)

    def state(self, name: str) -> State:
        """The state of a value; initializers are FREE."""
        return self.states.get(name, Other.FREE)

    def _visit(self, node: NodeProto) -> None:
        found = self._found(node)
        for name in filter(None, node.output):
            state = found.get(name, Other.UNKNOWN) if isinstance(found, dict) else found
            self.states[name] = self._checked(name, state)

    def _found(self, node: NodeProto) -> State | dict[str, State]:
        inputs = [self.state(name) for name in node.input if name]
        if node.domain or bodies(node) or Other.UNKNOWN in inputs:
            return Other.UNKNOWN
        if not inputs or not any(isinstance(state, Rows) for state in inputs):
            return self._without_rows(node, inputs)
        rule = _RULES.get(node.op_type)
        try:
            return Other.UNKNOWN if rule is None else rule(self, node)
        except _UnprovenError:
            return Other.UNKNOWN

    def _checked(self, name: str, state: State) -> State:
        """A state that the shapes do not contradict."""
        if not isinstance(state, Rows):
            return state
        for probe, (outer, inner) in zip(self._probes, state.factors, strict=True):
            dims = probe.shapes.dims(name)
            if dims is None or state.axis >= len(dims) or dims[state.axis] != outer * probe.num_samples * inner:
                return Other.UNKNOWN
        return state

    # Values that no element of the batch is part of

    def _without_rows(self, node: NodeProto, inputs: Sequence[State]) -> State:
        if node.op_type.startswith("Random") or node.op_type in ("Multinomial", "Bernoulli"):
            return Other.UNKNOWN
        if Other.SIZES not in inputs:
            return Other.FREE
        if node.op_type in ("ConstantOfShape", "Expand"):
            return self._filled(node)
        return self._of_sizes(node.output[0])

    def _of_sizes(self, name: str) -> State:
        """FREE where the number of samples makes no difference."""
        first, second = (probe.shapes.known.get(name) for probe in self._probes[:2])
        if first is None or second is None:
            return Other.UNKNOWN
        return Other.FREE if np.array_equal(first, second) else Other.SIZES

    def _filled(self, node: NodeProto) -> State:
        """Samples that are all alike, made without looking at any."""
        first, second = (self._dims(probe, node.output[0]) for probe in self._probes[:2])
        if first == second:
            return Other.FREE
        axes = [axis for axis, sizes in enumerate(zip(first, second, strict=True)) if len(set(sizes)) > 1]
        return Rows(axes[0], self._plain) if len(axes) == 1 else Other.UNKNOWN

    # Values with a part for each sample

    def _dims(self, probe: Probe, name: str) -> Shape:
        dims = probe.shapes.dims(name)
        if dims is None:
            raise _UnprovenError
        return dims

    def _rank(self, name: str) -> int:
        return len(self._dims(self._probes[0], name))

    def _rows(self, name: str) -> Rows:
        state = self.state(name)
        if not isinstance(state, Rows):
            raise _UnprovenError
        return state

    def _free(self, node: NodeProto, begin: int) -> None:
        """Refuse inputs, from one on, that are not the same for every batch."""
        if any(name and self.state(name) is not Other.FREE for name in node.input[begin:]):
            raise _UnprovenError

    def same(self, node: NodeProto) -> State:
        """Each element becomes one."""
        self._free(node, 1)
        if node.op_type == "Dropout" and len(node.input) > 2 and any(self._constant(node.input[2])):
            raise _UnprovenError  # of the training: drawn at random
        return self._rows(node.input[0])

    def broadcast(self, node: NodeProto) -> State:
        """Elements of inputs that are stretched to one shape become one."""
        rank = self._rank(node.output[0])
        found: set[Rows] = set()
        for name in node.input:
            state = self.state(name)
            if state is Other.SIZES:
                raise _UnprovenError
            if isinstance(state, Rows):
                found.add(Rows(state.axis + rank - self._rank(name), state.factors))
        return self._only(found)

    @staticmethod
    def _only(found: set[Rows]) -> Rows:
        if len(found) != 1:
            raise _UnprovenError
        return found.pop()

    def reshaped(self, node: NodeProto) -> State:
        """The order of the elements stays."""
        rows = self._rows(node.input[0])
        places = [self._place(probe, node, rows, factors) for probe, factors in self._with_factors(rows)]
        axes = {axis for axis, _ in places}
        if len(axes) > 1:
            raise _UnprovenError
        return Rows(axes.pop(), tuple(factors for _, factors in places))

    def _with_factors(self, rows: Rows) -> zip[tuple[Probe, tuple[int, int]]]:
        return zip(self._probes, rows.factors, strict=True)

    def _place(
        self, probe: Probe, node: NodeProto, rows: Rows, factors: tuple[int, int]
    ) -> tuple[int, tuple[int, int]]:
        before, after = self._dims(probe, node.input[0]), self._dims(probe, node.output[0])
        step = math.prod(before[rows.axis + 1 :]) * factors[1]
        if math.prod(before) != math.prod(after) or not step:
            raise _UnprovenError
        below = 1
        for axis in reversed(range(len(after))):
            size = after[axis]
            if below * size > step:
                inner = step // below
                if step % below or size % (inner * probe.num_samples):
                    break
                return axis, (size // (inner * probe.num_samples), inner)
            below *= size
        raise _UnprovenError

    def transposed(self, node: NodeProto) -> State:
        """Axes change places."""
        rows, rank = self._rows(node.input[0]), self._rank(node.input[0])
        order = next((list(a.ints) for a in node.attribute if a.name == "perm"), list(range(rank))[::-1])
        return Rows(order.index(rows.axis), rows.factors)

    def product(self, node: NodeProto) -> State:
        """MatMul: rows of the left matrix, or matrices of both sides."""
        rank, found = self._rank(node.output[0]), set[Rows]()
        for position, name in enumerate(node.input):
            state = self.state(name)
            if state is Other.SIZES:
                raise _UnprovenError
            if not isinstance(state, Rows):
                continue
            from_end = self._rank(name) - state.axis
            if self._rank(name) < 2 or from_end == (1, 2)[position]:
                raise _UnprovenError  # summed over
            found.add(Rows(rank - from_end, state.factors))
        if min(self._rank(name) for name in node.input) < 2:
            raise _UnprovenError
        return self._only(found)

    def gemm(self, node: NodeProto) -> State:
        """Rows of the left matrix."""
        rows = self._rows(node.input[0])
        if rows.axis or attribute(node, "transA", 0) or self.state(node.input[1]) is not Other.FREE:
            raise _UnprovenError
        if len(node.input) > 2 and node.input[2] and self.state(node.input[2]) not in (Other.FREE, rows):
            raise _UnprovenError
        return rows

    def along_axis(self, node: NodeProto) -> State:
        """Softmax, which in older opsets takes all axes from one on together."""
        rows, rank = self._rows(node.input[0]), self._rank(node.input[0])
        together = self._opset < _FLATTENING_OPSET and "oftmax" in node.op_type
        axis = attribute(node, "axis", 1 if together else -1) % rank
        if rows.axis >= axis if together else rows.axis == axis:
            raise _UnprovenError
        return rows

    def normalized(self, node: NodeProto) -> State:
        """LayerNormalization and its kind: over the axes from one on."""
        rows = self._rows(node.input[0])
        if rows.axis >= attribute(node, "axis", -1) % self._rank(node.input[0]):
            raise _UnprovenError
        self._free(node, 1)
        return rows

    def batch_normalized(self, node: NodeProto) -> State:
        """With the statistics of the training; otherwise it looks along the samples."""
        if attribute(node, "training_mode", 0) or len([name for name in node.output if name]) > 1:
            raise _UnprovenError
        return self._first_axis(node)

    def _first_axis(self, node: NodeProto) -> State:
        """Samples are in front, where the operator leaves them."""
        rows = self._rows(node.input[0])
        if rows.axis or self._rank(node.input[0]) < 2:
            raise _UnprovenError
        self._free(node, 1)
        return rows

    def reduced(self, node: NodeProto) -> State:
        """Other axes than that of the samples are summed up."""
        rows, rank = self._rows(node.input[0]), self._rank(node.input[0])
        axes = self._axes(node)
        if node.op_type.startswith("Arg"):
            axes = [attribute(node, "axis", 0)]
        if not axes:
            if attribute(node, "noop_with_empty_axes", 0):
                return rows
            raise _UnprovenError
        dropped = {axis % rank for axis in axes}
        if rows.axis in dropped:
            raise _UnprovenError
        gone = 0 if attribute(node, "keepdims", 1) else sum(axis < rows.axis for axis in dropped)
        return Rows(rows.axis - gone, rows.factors)

    def _axes(self, node: NodeProto) -> list[int] | None:
        given = next((list(a.ints) for a in node.attribute if a.name == "axes"), None)
        if given is None and len(node.input) > 1 and node.input[1]:
            return self._constant(node.input[1])
        return given

    def _constant(self, name: str) -> list[int]:
        """A small list of integers that is the same for every batch."""
        known = self._probes[0].shapes.known.get(name)
        if known is None or self.state(name) is not Other.FREE:
            raise _UnprovenError
        return [int(i) for i in known.ravel()]

    def joined(self, node: NodeProto) -> State:
        """Concat, along another axis."""
        states = [self.state(name) for name in node.input]
        rows = self._only({state for state in states if isinstance(state, Rows)})
        if not all(isinstance(state, Rows) for state in states):
            raise _UnprovenError  # constants of as many samples as the batch has
        if attribute(node, "axis", 0) % self._rank(node.input[0]) == rows.axis:
            raise _UnprovenError
        return rows

    def split(self, node: NodeProto) -> State:
        """Along another axis."""
        rows = self._rows(node.input[0])
        if attribute(node, "axis", 0) % self._rank(node.input[0]) == rows.axis:
            raise _UnprovenError
        self._free(node, 1)
        return rows

    def sliced(self, node: NodeProto) -> State:
        """Along other axes."""
        rows, rank = self._rows(node.input[0]), self._rank(node.input[0])
        self._free(node, 1)
        if len(node.input) < 3:
            axes = next((list(a.ints) for a in node.attribute if a.name == "axes"), None)
        else:
            axes = self._constant(node.input[3]) if len(node.input) > 3 and node.input[3] else None
        if axes is None or rows.axis in {axis % rank for axis in axes}:
            raise _UnprovenError
        return rows

    def gathered(self, node: NodeProto) -> State:
        """Rows of a table by each sample's keys, or the same places of each sample."""
        data, keys = (self.state(name) for name in node.input)
        axis = attribute(node, "axis", 0) % self._rank(node.input[0])
        if data is Other.FREE and isinstance(keys, Rows):
            return Rows(keys.axis + axis, keys.factors)
        if keys is not Other.FREE or not isinstance(data, Rows) or data.axis == axis:
            raise _UnprovenError
        added = self._rank(node.input[1]) - 1 if axis < data.axis else 0
        return Rows(data.axis + added, data.factors)

    def gathered_elements(self, node: NodeProto) -> State:
        """Places of each sample that the sample itself says."""
        rows = self._only({self._rows(name) for name in node.input})
        if attribute(node, "axis", 0) % self._rank(node.input[0]) == rows.axis:
            raise _UnprovenError
        return rows

    def gathered_nd(self, node: NodeProto) -> State:
        """The same for several axes, where samples are batch dimensions."""
        rows = self._only({self._rows(name) for name in node.input})
        if rows.axis >= attribute(node, "batch_dims", 0):
            raise _UnprovenError
        return rows

    def stretched(self, node: NodeProto) -> State:
        """Expand: other axes grow."""
        rows = self._rows(node.input[0])
        added = self._rank(node.output[0]) - self._rank(node.input[0])
        return Rows(rows.axis + added, rows.factors)

    def tiled(self, node: NodeProto) -> State:
        """Tile: other axes are repeated."""
        rows, repeats = self._rows(node.input[0]), self._constant(node.input[1])
        if repeats[rows.axis] != 1:
            raise _UnprovenError
        return rows

    def padded(self, node: NodeProto) -> State:
        """Pad: along other axes."""
        rows, rank = self._rows(node.input[0]), self._rank(node.input[0])
        self._free(node, 1)
        if len(node.input) < 2 or len(node.input) > 3:
            raise _UnprovenError
        pads = self._constant(node.input[1])
        if pads[rows.axis] or pads[rows.axis + rank]:
            raise _UnprovenError
        return rows

    def cumulated(self, node: NodeProto) -> State:
        """CumSum: along another axis."""
        rows, rank = self._rows(node.input[0]), self._rank(node.input[0])
        if rows.axis in {axis % rank for axis in self._constant(node.input[1])}:
            raise _UnprovenError
        return rows

    def one_hot(self, node: NodeProto) -> State:
        """A new axis for each key."""
        rows, rank = self._rows(node.input[0]), self._rank(node.output[0])
        self._free(node, 1)
        return Rows(rows.axis + (attribute(node, "axis", -1) % rank <= rows.axis), rows.factors)

    def recurrent(self, node: NodeProto) -> dict[str, State]:
        """LSTM and its kind: steps first, samples second."""
        expected = {0: 1, 4: 0, 5: 1, 6: 1}
        if attribute(node, "layout", 0):
            raise _UnprovenError
        for position, name in enumerate(node.input):
            state = self.state(name) if name else Other.FREE
            if position in expected and isinstance(state, Rows):
                if state.axis != expected[position] or not state.plain:
                    raise _UnprovenError
            elif state is not Other.FREE:
                raise _UnprovenError
        axes = (2, 1, 1)
        return {name: Rows(axis, self._plain) for name, axis in zip(node.output, axes, strict=False) if name}

    def contracted(self, node: NodeProto) -> State:
        """Einsum: one letter counts samples, in every operand that has any, and stays."""
        text = next(a.s.decode() for a in node.attribute if a.name == "equation").replace(" ", "")
        left, arrow, right = text.partition("->")
        letters: set[str] = set()
        for name, axes in zip(node.input, left.split(","), strict=True):
            state = self.state(name)
            if state is Other.SIZES or not arrow or "." in text:
                raise _UnprovenError
            if isinstance(state, Rows):
                if not state.plain:
                    raise _UnprovenError
                letters.add(axes[state.axis])
        if len(letters) != 1 or (letter := letters.pop()) not in right or right.count(letter) > 1:
            raise _UnprovenError
        return Rows(right.index(letter), self._plain)

    def shape(self, node: NodeProto) -> State:
        """Sizes; no element is looked at."""
        return self._of_sizes(node.output[0])


class _UnprovenError(Exception):
    """A value of which it is not proved that its samples do not see each other."""


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(UNARY, RowAnalysis.same),
    **dict.fromkeys(BROADCASTING, RowAnalysis.broadcast),
    **dict.fromkeys(_REDUCTIONS, RowAnalysis.reduced),
    **dict.fromkeys(_RESHAPING, RowAnalysis.reshaped),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax", "TopK"), RowAnalysis.along_axis),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization", "LpNormalization"), RowAnalysis.normalized),
    **dict.fromkeys(
        ("Conv", "AveragePool", "MaxPool", "GlobalAveragePool", "GlobalMaxPool", "InstanceNormalization",
         "GroupNormalization", "LRN", "DepthToSpace", "SpaceToDepth"),
        RowAnalysis._first_axis,
    ),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), RowAnalysis.recurrent),
    **dict.fromkeys(("Shape", "Size"), RowAnalysis.shape),
    "BatchNormalization": RowAnalysis.batch_normalized,
    "Concat": RowAnalysis.joined,
    "CumSum": RowAnalysis.cumulated,
    "Einsum": RowAnalysis.contracted,
    "Expand": RowAnalysis.stretched,
    "Gather": RowAnalysis.gathered,
    "GatherElements": RowAnalysis.gathered_elements,
    "GatherND": RowAnalysis.gathered_nd,
    "Gemm": RowAnalysis.gemm,
    "MatMul": RowAnalysis.product,
    "OneHot": RowAnalysis.one_hot,
    "Pad": RowAnalysis.padded,
    "Slice": RowAnalysis.sliced,
    "Split": RowAnalysis.split,
    "Tile": RowAnalysis.tiled,
    "Transpose": RowAnalysis.transposed,
}  # fmt: skip
