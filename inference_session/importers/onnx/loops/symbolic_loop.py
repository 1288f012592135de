"""Runs a Loop with its sizes as numbers and its data as symbols, to see which rows each iteration reduces.

Numbers, conditions and positions that follow from sizes are computed. For data, only the operators of bags
are supported: rows are taken, looked up, multiplied by factors and reduced; keys are compared with the padding key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, helper
from onnx.reference import ReferenceEvaluator

from inference_session.importers.onnx.shapes import Shapes
from inference_session.importers.onnx.weights import Weight
from inference_session.onnx_graphs import attribute, bodies, integers_attribute, is_random

_MAX_STEPS = 5000


class NotABagError(Exception):
    """A Loop does something that bags do not do. Never leaves the importer."""


@dataclass(frozen=True)
class Padding:
    """Rows are left out whose key, counted from the front, is this one."""

    keys: str
    key: int
    num_rows: int


@dataclass(frozen=True)
class _Rows:
    """Some rows of a value of the main graph."""

    rows: str
    positions: tuple[int, ...]
    table: str = ""
    """Whose rows are looked up with them as keys."""
    factors: str = ""
    """A list, by which they are multiplied."""
    padding: Padding | None = None
    is_column: bool = False


@dataclass(frozen=True)
class Bag:
    """Rows, reduced to one."""

    reduction: str
    rows: str
    positions: tuple[int, ...]
    table: str
    factors: str
    padding: Padding | None
    keeps_dims: bool

    def rows_of_all(self) -> Bag:
        """The same without the positions."""
        return replace(self, positions=())


_NO_ROWS = Bag("", "", (), "", "", None, keeps_dims=True)
"""What is a row of zeros."""


@dataclass(frozen=True)
class _KeptPositions:
    """Positions that are kept unless their key pads; the last ones, `added`, whatever their key is."""

    positions: tuple[int, ...]
    padding: Padding
    added: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Question:
    """What follows from a key, or from kept positions."""

    kind: Literal["is negative", "moved", "from the front", "pads", "is kept", "number of", "is none"]
    subject: _Rows | _KeptPositions
    number: int = 0
    key: int = 0


Value = Any
"""NDArray, _Rows, Bag, _KeptPositions, _Question, or a tuple of values: a sequence."""


@dataclass
class SymbolicLoop:
    """Runs one Loop under the sizes of one probe."""

    model: ModelProto
    shapes: Shapes
    weights: Mapping[str, Weight]
    _values: dict[str, Value] = field(default_factory=dict)
    _evaluators: dict[str, ReferenceEvaluator] = field(default_factory=dict)
    _num_steps: int = 0

    def bags(self, loop: NodeProto, *, is_stacked: bool) -> list[Bag]:
        """The meaning of each row of the result.

        Args:
            is_stacked: the result is a row of each iteration, rather than a sequence of matrices of one row.

        Raises:
            NotABagError: it is not always a reduction of rows.
        """
        results = self._loop(loop)
        read = [value for value in results if _are_bags(value)]
        if len(read) != 1 or any(bag.keeps_dims == is_stacked for bag in read[0]):
            raise NotABagError
        return list(read[0])

    def _value(self, name: str) -> Value:
        if name in self._values:
            return self._values[name]
        if name in self.shapes.known:
            return self.shapes.known[name]
        if self._is_empty_sequence(name):
            return ()
        dims = self.shapes.dims(name)
        if not dims or name in self.weights:
            raise NotABagError
        return _Rows(name, tuple(range(dims[0])))

    def _is_empty_sequence(self, name: str) -> bool:
        return any(node.op_type == "SequenceEmpty" and name in node.output for node in self.model.graph.node)

    def _run(self, graph: GraphProto) -> list[Value]:
        for node in graph.node:
            self._num_steps += 1
            if self._num_steps > _MAX_STEPS or node.domain:
                raise NotABagError
            for name, value in zip(node.output, self._results(node), strict=False):
                self._values[name] = value
        return [self._value(output.name) for output in graph.output]

    def _results(self, node: NodeProto) -> Sequence[Value]:
        if node.op_type == "Loop":
            return self._loop(node)
        if node.op_type == "If":
            return self._if(node)
        if node.op_type == "Gather" and node.input[0] in self.weights:
            return [self._looked_up(node)]
        if node.op_type in ("Shape", "Size"):
            return [self._size(node)]
        values = [self._value(name) if name else None for name in node.input]
        if all(value is None or isinstance(value, np.ndarray) for value in values):
            return self._computed(node, values)
        rule = _RULES.get(node.op_type)
        if rule is None:
            raise NotABagError
        return [rule(node, values)]

    def _computed(self, node: NodeProto, values: Sequence[Value]) -> Sequence[Value]:
        """The results of a node whose operands are numbers."""
        if is_random(node):
            raise NotABagError
        feeds = {name: value for name, value in zip(node.input, values, strict=True) if name}
        key = node.output[0]
        if key not in self._evaluators:
            graph = helper.make_graph(
                [node],
                "piece",
                [ValueInfoProto(name=name) for name in feeds],
                [ValueInfoProto(name=n) for n in node.output],
            )
            piece = helper.make_model(graph, opset_imports=self.model.opset_import)
            self._evaluators[key] = ReferenceEvaluator(piece)
        return [np.asarray(value) for value in self._evaluators[key].run(None, feeds)]

    def _loop(self, loop: NodeProto) -> list[Value]:
        (body,) = bodies(loop)
        limit = _integer(self._value(loop.input[0])) if loop.input[0] else None
        goes_on = not loop.input[1] or bool(_integer(self._value(loop.input[1])))
        carried = [self._value(name) for name in loop.input[2:]]
        rows: list[list[Value]] = [[] for _ in body.output[1 + len(carried) :]]
        i = 0
        while goes_on and (limit is None or i < limit):
            inner = [np.array(i), np.array(True), *carried]
            self._values.update(zip((value.name for value in body.input), inner, strict=True))
            condition, *results = self._run(body)
            goes_on = bool(_integer(condition))
            carried = results[: len(carried)]
            for row, value in zip(rows, results[len(carried) :], strict=True):
                row.append(value)
            i += 1
        return [*carried, *map(tuple, rows)]

    def _if(self, node: NodeProto) -> list[Value]:
        branches = {item.name: item.g for item in node.attribute}
        condition = self._value(node.input[0])
        if isinstance(condition, np.ndarray):
            return self._run(branches["then_branch" if _integer(condition) else "else_branch"])
        then, other = (self._run(branches[name]) for name in ("then_branch", "else_branch"))
        if len(then) != 1 or not isinstance(condition, _Question):
            raise NotABagError
        return [_either(condition, then[0], other[0])]

    def _size(self, node: NodeProto) -> Value:
        value = self._value(node.input[0])
        if isinstance(value, _KeptPositions) and node.op_type == "Size" and not value.added:
            return _Question("number of", value)
        if isinstance(value, np.ndarray):
            return self._computed(node, [value])[0]
        dims = self.shapes.dims(node.input[0])
        if dims is None or not isinstance(value, _Rows) or value.rows != node.input[0]:
            raise NotABagError
        return self._computed(node, [np.empty(dims, np.bool_)])[0]

    def _looked_up(self, node: NodeProto) -> Value:
        keys = self._value(node.input[1])
        if attribute(node, "axis", 0) or not isinstance(keys, _Rows) or keys.table or keys.factors or keys.is_column:
            raise NotABagError
        return replace(keys, table=str(node.input[0]))


def _are_bags(value: Value) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(item, Bag) for item in value)


def _integer(value: Value) -> int:
    if not isinstance(value, np.ndarray) or value.size != 1:
        raise NotABagError
    return int(value.ravel()[0])


def _integers(value: Value) -> list[int]:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
        raise NotABagError
    return [int(i) for i in value.ravel()]


def _either(condition: _Question, then: Value, other: Value) -> Value:
    """The result of an If whose condition depends on keys."""
    subject = condition.subject
    if condition.kind == "is negative" and isinstance(then, _Question) and then.kind == "moved":
        is_moved = then.subject == other == subject
        found: Value = _Question("from the front", subject, then.number) if is_moved else None
    elif condition.kind == "is kept" and isinstance(subject, _Rows) and len(subject.positions) == 1:
        found = _kept(subject, Padding(subject.rows, condition.key, condition.number), then, other)
    elif condition.kind == "is none" and isinstance(subject, _KeptPositions) and isinstance(then, np.ndarray):
        is_of_subject = isinstance(other, Bag) and (other.padding, other.positions) == (
            subject.padding,
            subject.positions,
        )
        found = other if is_of_subject and not then.any() else None
    else:
        found = None
    if found is None:
        raise NotABagError
    return found


def _kept(key: _Rows, padding: Padding, then: Value, other: Value) -> _KeptPositions | None:
    """One position more in a list of kept ones, if its key does not pad."""
    if isinstance(other, np.ndarray) and other.size == 0:
        before, after = _KeptPositions((), padding), _KeptPositions((), padding, tuple(_integers(then)))
    else:
        before, after = other, then
    if (
        not isinstance(before, _KeptPositions)
        or before.padding != padding
        or after != replace(before, added=key.positions)
    ):
        return None
    return _KeptPositions((*before.positions, *key.positions), padding)


# Operators


def _copied(_node: NodeProto, values: Sequence[Value]) -> Value:
    return values[0]


def _sliced(_node: NodeProto, values: Sequence[Value]) -> Value:
    given, bounds = values[0], [_integers(value) for value in values[1:]]
    begins, ends, axes, steps = [*bounds, *([0], [1])[len(bounds) - 2 :]]
    if not isinstance(given, _Rows) or given.padding or axes != [0] or steps != [1] or min(*begins, *ends) < 0:
        raise NotABagError
    return replace(given, positions=given.positions[begins[0] : ends[0]])


def _gathered(node: NodeProto, values: Sequence[Value]) -> Value:
    given, places = values
    if not isinstance(given, _Rows) or attribute(node, "axis", 0) or given.padding:
        raise NotABagError
    if isinstance(places, _KeptPositions) and not places.added:
        picked = places.positions
        padding: Padding | None = places.padding
    else:
        picked, padding = tuple(_integers(places)), None
    if not picked or not 0 <= min(picked) <= max(picked) < len(given.positions):
        raise NotABagError
    return replace(given, positions=tuple(given.positions[i] for i in picked), padding=padding)


def _axes(node: NodeProto, values: Sequence[Value]) -> list[int] | None:
    axes = integers_attribute(node, "axes")
    return _integers(values[1]) if axes is None and len(values) > 1 and values[1] is not None else axes


def _as_column(node: NodeProto, values: Sequence[Value]) -> Value:
    axes = _axes(node, values)
    if not isinstance(values[0], _Rows) or values[0].is_column or values[0].table or axes not in ([1], [-1]):
        raise NotABagError
    return replace(values[0], is_column=True)


def _multiplied(_node: NodeProto, values: Sequence[Value]) -> Value:
    rows, factors = values[::-1] if isinstance(values[0], _Rows) and values[0].is_column else values
    if not isinstance(rows, _Rows) or not isinstance(factors, _Rows) or rows.is_column or rows.factors:
        raise NotABagError
    if not factors.is_column or factors.positions != rows.positions or factors.padding != rows.padding:
        raise NotABagError
    return replace(rows, factors=factors.rows)


def _reduced(node: NodeProto, values: Sequence[Value]) -> Value:
    rows, axes = values[0], _axes(node, values)
    if not isinstance(rows, _Rows) or rows.is_column or axes not in ([0], [-2]):
        raise NotABagError
    keeps_dims = bool(attribute(node, "keepdims", 1))
    return Bag(node.op_type, rows.rows, rows.positions, rows.table, rows.factors, rows.padding, keeps_dims)


def _divided(_node: NodeProto, values: Sequence[Value]) -> Value:
    """A sum by the number of its rows."""
    bag, number = values
    if not isinstance(bag, Bag) or not isinstance(number, np.ndarray) or number.size != 1:
        raise NotABagError
    if bag.reduction != "ReduceSum" or bag.padding or float(number.ravel()[0]) != len(bag.positions):
        raise NotABagError
    return replace(bag, reduction="ReduceMean")


def _is_less(_node: NodeProto, values: Sequence[Value]) -> Value:
    if _integer(values[1]) != 0:
        raise NotABagError
    return _Question("is negative", _key(values[0]))


def _key(value: Value) -> _Rows:
    if not isinstance(value, _Rows) or len(value.positions) != 1 or value.table or value.factors or value.padding:
        raise NotABagError
    return value


def _moved(_node: NodeProto, values: Sequence[Value]) -> Value:
    return _Question("moved", _key(values[0]), _integer(values[1]))


def _equals(_node: NodeProto, values: Sequence[Value]) -> Value:
    question, number = values
    if not isinstance(question, _Question):
        raise NotABagError
    if question.kind == "from the front":
        return replace(question, kind="pads", key=_integer(number))
    if question.kind == "number of" and _integer(number) == 0:
        return replace(question, kind="is none")
    raise NotABagError


def _negated(_node: NodeProto, values: Sequence[Value]) -> Value:
    if not isinstance(values[0], _Question) or values[0].kind != "pads":
        raise NotABagError
    return replace(values[0], kind="is kept")


def _appended(_node: NodeProto, values: Sequence[Value]) -> Value:
    if not isinstance(values[0], _KeptPositions) or values[0].added or len(values) != 2:
        raise NotABagError
    return replace(values[0], added=tuple(_integers(values[1])))


def _cast_like(_node: NodeProto, values: Sequence[Value]) -> Value:
    """A number in the type of the keys."""
    if not isinstance(values[0], np.ndarray):
        raise NotABagError
    return values[0]


def _inserted(_node: NodeProto, values: Sequence[Value]) -> Value:
    if len(values) != 2 or not isinstance(values[0], tuple):
        raise NotABagError
    bag = _NO_ROWS if _are_zeros(values[1]) else values[1]
    if not isinstance(bag, Bag):
        raise NotABagError
    return (*values[0], bag)


def _are_zeros(value: Value) -> bool:
    return isinstance(value, np.ndarray) and value.ndim > 1 and len(value) == 1 and not value.any()


_RULES: dict[str, Callable[[NodeProto, Sequence[Value]], Value]] = {
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceMax"), _reduced),
    "Add": _moved,
    "CastLike": _cast_like,
    "Concat": _appended,
    "Div": _divided,
    "Equal": _equals,
    "Gather": _gathered,
    "Identity": _copied,
    "Less": _is_less,
    "Mul": _multiplied,
    "Not": _negated,
    "SequenceInsert": _inserted,
    "Slice": _sliced,
    "Unsqueeze": _as_column,
}
