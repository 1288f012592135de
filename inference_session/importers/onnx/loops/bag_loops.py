"""Writes a Loop over bags of equal size as one look-up of a matrix of keys and one reduction.

PyTorch's exporters write EmbeddingBag over a matrix this way: a Loop, or two nested Loops, which take the
rows of one bag after the other, with or without factors and a padding key. `symbolic_loop.py` runs the Loop on symbols
for several numbers of samples; it is replaced only if every iteration reduces the rows of its own sample and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto

from inference_session.importers.onnx.canonical import CanonicalModel
from inference_session.importers.onnx.loops.symbolic_loop import Bag, NotABagError, SymbolicLoop
from inference_session.importers.onnx.shapes import Shapes, sized
from inference_session.importers.onnx.weights import Weight
from inference_session.onnx_graphs import (
    NodeBuilder,
    attribute,
    bodies,
    needed_nodes,
    opset_of,
    producers,
    replace_node,
    set_nodes,
    use_counts,
)

_PROBES = ((3, 2), (5, 2), (3, 4))
"""Samples, and the size of whatever else is open."""
_AXES_INPUT_OPSETS = {"ReduceSum": 13, "ReduceMean": 18, "ReduceMax": 18}


class _Bags(NamedTuple):
    """What a Loop does: the number of rows per bag under each probe (`widths`), and how they are reduced."""

    pattern: Bag
    widths: tuple[int, ...]


def bags_instead_of_loops(canonical: CanonicalModel) -> None:
    """Change a model."""
    model, weights = canonical.model, canonical.weights
    loops = [node for node in model.graph.node if node.op_type == "Loop" and not node.domain and bodies(node)]
    if not loops or not all(_has_symbol(value.type.tensor_type) for value in model.graph.input):
        return
    probes = [
        Shapes(model, weights, {value.name: sized(model.graph, value.name, *sizes) for value in model.graph.input})
        for sizes in _PROBES
    ]
    for loop in loops:
        _Replacement(model, weights, probes, NodeBuilder(model.graph, canonical.names, "bags")).try_loop(loop)


def _has_symbol(tensor: TypeProto.Tensor) -> bool:
    dims = tensor.shape.dim
    return len(dims) > 0 and not dims[0].HasField("dim_value")


@dataclass
class _Replacement:
    """Replaces one Loop."""

    model: ModelProto
    weights: dict[str, Weight]
    probes: Sequence[Shapes]
    builder: NodeBuilder

    def try_loop(self, loop: NodeProto) -> None:
        """Change the graph, unless the Loop does anything other than pool bags of equal size."""
        output = result_of(self.model.graph, loop)
        if output is None:
            return
        try:
            found = self._bags(loop, output)
            self._write(found, output)
        except NotABagError:
            return
        replace_loop(self.model.graph, self.builder.nodes, output)

    def _bags(self, loop: NodeProto, output: str) -> _Bags:
        patterns, widths = set[Bag](), list[int]()
        for shapes, (num_samples, _) in zip(self.probes, _PROBES, strict=True):
            bags = SymbolicLoop(self.model, shapes, self.weights).bags(loop, is_stacked=output in loop.output)
            width = len(bags[0].positions) if bags else 0
            if len(bags) != num_samples or not width:
                raise NotABagError
            for i, bag in enumerate(bags):
                if bag.positions != tuple(range(i * width, (i + 1) * width)):
                    raise NotABagError
                patterns.add(bag.rows_of_all())
            widths.append(width)
        if len(patterns) > 1:
            raise NotABagError
        return _Bags(patterns.pop(), tuple(widths))

    # Its replacement

    def _write(self, bags: _Bags, output: str) -> None:
        pattern = bags.pattern
        rows, factor = self._rows(pattern, bags)
        mask = self._mask(pattern, bags) if pattern.padding is not None else None
        if pattern.reduction == "ReduceMax":
            self._maximum(rows, factor, mask, output)
            return
        if mask is not None:
            number = self.builder.add("Cast", [mask], to=TensorProto.FLOAT)
            factor = number if factor is None else self.builder.add("Mul", [factor, number])
        weighted = rows if factor is None else self.builder.add("Mul", [rows, self._behind(factor)])
        if mask is None or pattern.reduction == "ReduceSum":
            self._reduce(pattern.reduction, weighted, output)
            return
        total, count = self._reduce("ReduceSum", weighted), self._reduce("ReduceSum", number, keepdims=1)
        self.builder.add("Div", [total, self.builder.add("Max", [count, self._float(1.0)])], output)

    def _maximum(self, rows: str, factor: str | None, mask: str | None, output: str) -> None:
        """The maximum of each bag; zeros for a bag of padding alone."""
        weighted = rows if factor is None else self.builder.add("Mul", [rows, self._behind(factor)])
        if mask is None:
            self._reduce("ReduceMax", weighted, output)
            return
        kept = self.builder.add("Where", [self._behind(mask), weighted, self._float(-np.inf)])
        number = self.builder.add("Cast", [mask], to=TensorProto.FLOAT)
        is_any = self.builder.add("Greater", [self._reduce("ReduceMax", number, keepdims=1), self._float(0.0)])
        self.builder.add("Where", [is_any, self._reduce("ReduceMax", kept), self._float(0.0)], output)

    def _rows(self, pattern: Bag, bags: _Bags) -> tuple[str, str | None]:
        """The rows, [samples, width, columns], and the factors, [samples, width]."""
        table, keys, factor = looked_up(self.model.graph, self.probes, pattern)
        if table not in self.weights:
            raise NotABagError
        self._check_padding(pattern, table)
        factors = None if factor is None else self._matrix(factor, bags)
        return self.builder.add("Gather", [table, self._matrix(keys, bags)], axis=0), factors

    def _check_padding(self, pattern: Bag, table: str) -> None:
        """A row that is left out is multiplied by zero, which is correct only if it is finite."""
        if pattern.padding is None:
            return
        dims = self.weights[table].dims
        row = self.weights[table].rows(np.array([pattern.padding.key % dims[0]]))
        is_float = self.weights[table].elem_type == TensorProto.FLOAT
        if pattern.padding.num_rows != dims[0] or not is_float or not np.isfinite(np.asarray(row, np.float32)).all():
            raise NotABagError

    def _mask(self, pattern: Bag, bags: _Bags) -> str:
        """Whether a key is not a padding key, [samples, width]."""
        if pattern.padding is None:
            raise NotABagError
        keys = self._matrix(pattern.padding.keys, bags)
        if keys != self._matrix(looked_up(self.model.graph, self.probes, pattern)[1], bags):
            raise NotABagError
        dtype = np.int32 if self.probes[0].elem_type(keys) == TensorProto.INT32 else np.int64
        found = [
            self.builder.add("Equal", [keys, self.builder.constant(np.array(key, dtype))])
            for key in (pattern.padding.key, pattern.padding.key - pattern.padding.num_rows)
        ]
        return self.builder.add("Not", [self.builder.add("Or", found)])

    def _matrix(self, name: str, bags: _Bags) -> str:
        """The value [samples, width] that a flat one has been made of."""
        made_by = producers(self.model.graph)
        expected = [(n, w) for (n, _), w in zip(_PROBES, bags.widths, strict=True)]
        elem_type = self.probes[0].elem_type(name)
        while [shapes.dims(name) for shapes in self.probes] != expected:
            node = made_by.get(name)
            if node is None or node.op_type not in ("Identity", "Reshape", "Flatten", "Cast"):
                raise NotABagError
            name = node.input[0]
        if self.probes[0].elem_type(name) == elem_type:
            return name
        return self.builder.add("Cast", [name], to=elem_type)

    # Nodes

    def _reduce(self, op_type: str, value: str, output: str | None = None, keepdims: int = 0) -> str:
        """Along the rows of a bag."""
        if opset_of(self.model) < _AXES_INPUT_OPSETS[op_type]:
            return self.builder.add(op_type, [value], output, axes=[1], keepdims=keepdims)
        return self.builder.add(op_type, [value, self.builder.integers([1])], output, keepdims=keepdims)

    def _behind(self, value: str) -> str:
        """The value with a last dimension of one."""
        if opset_of(self.model) < _AXES_INPUT_OPSETS["ReduceSum"]:
            return self.builder.add("Unsqueeze", [value], axes=[2])
        return self.builder.add("Unsqueeze", [value, self.builder.integers([-1])])

    def _float(self, number: float) -> str:
        return self.builder.constant(np.array(number, np.float32))


def result_of(graph: GraphProto, loop: NodeProto) -> str | None:
    """The result of a Loop: its only output that is read, or the matrix made from a sequence."""
    uses = use_counts(graph)
    read = [name for name in loop.output if uses[name]]
    if len(read) != 1:
        return None
    if list(loop.output).index(read[0]) >= len(loop.input) - 2:
        return str(read[0])  # one row of each iteration
    readers = [node for node in graph.node if read[0] in node.input]
    if uses[read[0]] != 1 or len(readers) != 1 or readers[0].op_type != "ConcatFromSequence":
        return None
    joins = attribute(readers[0], "axis", -1) == 0 and not attribute(readers[0], "new_axis", 0)
    return str(readers[0].output[0]) if joins else None


def replace_loop(graph: GraphProto, nodes: list[NodeProto], output: str) -> None:
    """Let these nodes compute the result of a Loop."""
    after = next(node for node in graph.node if output in node.output)
    replace_node(graph, after, nodes)
    set_nodes(graph, needed_nodes(graph.node, [value.name for value in graph.output]))


def looked_up(graph: GraphProto, probes: Sequence[Shapes], bag: Bag) -> tuple[str, str, str | None]:
    """Table, keys and factors of the rows that a Loop is given, looked up in it or before it.

    Raises:
        NotABagError: they are made in another way.
    """
    if bag.table:
        return bag.table, bag.rows, bag.factors or None
    made_by = producers(graph)
    node, factor = made_by.get(bag.rows), bag.factors or None
    while node is not None and node.op_type == "Identity":
        node = made_by.get(node.input[0])
    if node is not None and node.op_type == "Mul" and factor is None:
        sides = [made_by.get(name) for name in node.input]
        if sides[0] is None or sides[1] is None or sides[1].op_type != "Unsqueeze":
            raise NotABagError
        factor = None if _is_one(probes, sides[1].output[0]) else str(sides[1].input[0])
        node = sides[0]
    if node is None or node.op_type != "Gather" or attribute(node, "axis", 0):
        raise NotABagError
    return str(node.input[0]), str(node.input[1]), factor


def _is_one(probes: Sequence[Shapes], name: str) -> bool:
    values = [shapes.known.get(name) for shapes in probes]
    return all(value is not None and bool((value == 1).all()) for value in values)
