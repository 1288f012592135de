"""Simple queries of ONNX graphs, and the small changes that importers and engines make to them.

Changes expect names that are unique across the graph and its bodies (importers/onnx/canonical.py sees to that).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

NO_END = 10**9
"""As the end of a Slice: all up to the end of an axis. tf2onnx writes this number, and no axis is as long."""
_SMALL_BYTES = 4096
UNARY = frozenset({
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Cast", "CastLike", "Ceil", "Celu",
    "Clip", "Cos", "Cosh", "Dropout", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity",
    "IsInf", "IsNaN", "LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Shrink",
    "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Swish", "Tan", "Tanh", "ThresholdedRelu",
})  # fmt: skip
"""Operators that compute each element from one of the first operand; the others are the same for all elements."""
BROADCASTING = frozenset({
    "Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal", "Greater", "GreaterOrEqual",
    "Less", "LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul", "Or", "Pow", "PRelu", "Sub", "Sum", "Where", "Xor",
})  # fmt: skip
"""Operators that compute each element from one of each operand, which are stretched to one shape."""


class Names:
    """Gives out names that the model does not use."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)

    @classmethod
    def unused_in(cls, graph: GraphProto, weights: Iterable[str] = ()) -> Names:
        """Names that the graph, its bodies and its weights do not have."""
        scopes = all_graphs(graph)
        return cls({*weights}.union(*(defined(s).union(*(node.input for node in s.node)) for s in scopes)))

    def fresh(self, stem: str) -> str:
        """`stem`, or `stem_2`, `stem_3` … where that is taken."""
        name, count = stem, 1
        while name in self._taken:
            count += 1
            name = f"{stem}_{count}"
        self._taken.add(name)
        return name


def bodies(node: NodeProto) -> list[GraphProto]:
    """The graphs inside a node: the bodies of Loop and Scan, the branches of If."""
    found: list[GraphProto] = []
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            found.append(attribute.g)
        elif attribute.type == AttributeProto.GRAPHS:
            found.extend(attribute.graphs)
    return found


def all_graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """The graph and every body below it."""
    yield graph
    for node in graph.node:
        for body in bodies(node):
            yield from all_graphs(body)


def all_nodes(graph: GraphProto) -> Iterator[NodeProto]:
    """Every node of the graph and of the bodies below it."""
    for scope in all_graphs(graph):
        yield from scope.node


def defined(graph: GraphProto) -> set[str]:
    """The values that this graph itself, without its bodies, defines."""
    names = {value.name for value in graph.input}
    names.update(tensor.name for tensor in graph.initializer)
    names.update(tensor.values.name for tensor in graph.sparse_initializer)
    for node in graph.node:
        names.update(node.output)
    return names - {""}


def reads(node: NodeProto) -> set[str]:
    """The values that a node needs: its inputs, and what its bodies capture."""
    names = set(node.input) - {""}
    for body in bodies(node):
        names |= captures(body)
    return names


def captures(body: GraphProto) -> set[str]:
    """The values of outer graphs that a body needs."""
    names = {value.name for value in body.output}
    for node in body.node:
        names |= reads(node)
    return names - defined(body)


def use_counts(graph: GraphProto) -> Counter[str]:
    """How often each value is read, in the graph and its bodies; being a graph's output counts."""
    counts: Counter[str] = Counter()
    for scope in all_graphs(graph):
        counts.update(value.name for value in scope.output)
        for node in scope.node:
            counts.update(node.input)
    return counts


def producers(graph: GraphProto) -> dict[str, NodeProto]:
    """The node that makes each value, of this graph alone."""
    return {name: node for node in graph.node for name in node.output if name}


def needed_nodes(nodes: Iterable[NodeProto], targets: Iterable[str], given: Collection[str] = ()) -> list[NodeProto]:
    """The nodes that compute the targets from given values, in their order (which must be one of execution)."""
    wanted = set(targets)
    kept: list[NodeProto] = []
    for node in reversed(list(nodes)):
        if wanted.intersection(node.output).difference(given):
            kept.append(node)
            wanted |= reads(node)
    return kept[::-1]


def set_nodes(graph: GraphProto, nodes: Iterable[NodeProto]) -> None:
    """Replace the nodes of a graph."""
    kept = [copied(node) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)


def drop_unused(graph: GraphProto) -> None:
    """Remove the nodes, constants and declarations of values that no output needs."""
    outputs = [value.name for value in graph.output]
    nodes = needed_nodes(graph.node, outputs)
    read = set(outputs).union(*map(reads, nodes))
    values = read.union(*(node.output for node in nodes))
    tensors = [tensor for tensor in graph.initializer if tensor.name in read]
    declared = [value for value in graph.value_info if value.name in values]
    set_nodes(graph, nodes)
    del graph.initializer[:], graph.value_info[:]
    graph.initializer.extend(tensors)
    graph.value_info.extend(declared)


def insert_before(graph: GraphProto, node: NodeProto, new: list[NodeProto]) -> None:
    """Put nodes in front of one, which is found by identity."""
    at = position(graph, node)
    for offset, item in enumerate(new):
        graph.node.insert(at + offset, item)


def position(graph: GraphProto, node: NodeProto) -> int:
    """Where a node stands in its graph; nodes are identified by their outputs."""
    return next(i for i, other in enumerate(graph.node) if other.output == node.output)


def rename(graph: GraphProto, names: Callable[[str], str]) -> None:
    """Pass every name of the graph and its bodies through a function."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.name = names(value.name)
    for tensor in graph.initializer:
        tensor.name = names(tensor.name)
    for node in graph.node:
        node.input[:] = [names(name) if name else "" for name in node.input]
        node.output[:] = [names(name) if name else "" for name in node.output]
        for body in bodies(node):
            rename(body, names)


def rename_inner(body: GraphProto, names: Names) -> None:
    """Give a fresh name to every value that a body, or a body within it, defines."""
    fresh = {name: names.fresh(name) for name in sorted(defined(body))}
    rename(body, lambda name: fresh.get(name, name))
    for node in body.node:
        for inner in bodies(node):
            rename_inner(inner, names)


def replace_node(graph: GraphProto, node: NodeProto, new: list[NodeProto]) -> None:
    """Put nodes in the place of one."""
    at = position(graph, node)
    insert_before(graph, node, new)
    del graph.node[at + len(new)]


def replace_reads(graph: GraphProto, new_names: Mapping[str, str]) -> None:
    """Let every reader of some values, the bodies' too, read others. Graph outputs are left alone."""
    for node in all_nodes(graph):
        if not new_names.keys().isdisjoint(node.input):
            node.input[:] = [new_names.get(name, name) for name in node.input]


def sort_nodes(graph: GraphProto) -> None:
    """Put the nodes of a graph and of its bodies into an order of execution, unless they are already.

    Raises:
        ValueError: no such order exists, as some nodes depend on themselves.
    """
    # Bodies before the graphs that hold them: set_nodes copies nodes, with their bodies.
    for scope in reversed(list(all_graphs(graph))):
        makers = {name: i for i, node in enumerate(scope.node) for name in node.output}
        needs = {i: {makers[name] for name in reads(node) & makers.keys()} for i, node in enumerate(scope.node)}
        if all(max(before, default=-1) < i for i, before in needs.items()):
            continue
        try:
            order = list(TopologicalSorter(needs).static_order())
        except CycleError as error:
            names = [scope.node[i].output[0] for i in error.args[1]]
            raise ValueError(f"values depend on themselves: {' <- '.join(map(repr, names[:8]))}") from error
        set_nodes(scope, [scope.node[i] for i in order])


def attribute(node: NodeProto, name: str, default: int) -> int:
    """An integer attribute."""
    return next((int(a.i) for a in node.attribute if a.name == name), default)


def attributes(node: NodeProto) -> dict[str, Any]:
    """All attributes that are given."""
    return {item.name: helper.get_attribute_value(item) for item in node.attribute}


def text_attribute(node: NodeProto, name: str) -> str:
    """A text among the attributes, without spaces; empty where it is not given."""
    return next((a.s.decode().replace(" ", "") for a in node.attribute if a.name == name), "")


def opset_of(model: ModelProto) -> int:
    """The version of the standard operators; 0 where the model uses none."""
    return next((int(item.version) for item in model.opset_import if item.domain in ("", "ai.onnx")), 0)


def is_random(node: NodeProto) -> bool:
    """Whether the result of a node is drawn at random."""
    return node.op_type.startswith("Random") or node.op_type in ("Bernoulli", "Multinomial")


def constants(graph: GraphProto) -> dict[str, TensorProto]:
    """The initializers of a graph, by name."""
    return {tensor.name: tensor for tensor in graph.initializer}


def integers(tensor: TensorProto | None) -> list[int] | None:
    """The elements of a small integer tensor; None for anything else."""
    if tensor is None or tensor.data_type not in (TensorProto.INT64, TensorProto.INT32):
        return None
    return [int(i) for i in numpy_helper.to_array(tensor).ravel()]


def integers_attribute(node: NodeProto, name: str) -> list[int] | None:
    """A list of integers among the attributes; None where it is not given."""
    return next((list(a.ints) for a in node.attribute if a.name == name), None)


def axes_of(graph: GraphProto, node: NodeProto, name: str = "axes") -> list[int] | None:
    """The axes of a reduction, Squeeze or Unsqueeze, an attribute or a constant input by opset; None if not given.

    With the name `split`, the sizes that Split gives out.
    """
    axes = integers_attribute(node, name)
    if axes is None and len(node.input) > 1:
        return integers(constants(graph).get(node.input[1]))
    return axes


def sink_constants(graph: GraphProto, names: Names) -> None:
    """Give bodies copies of the small constants they capture: shape inference does not look outside a body."""
    small = {t.name: t for t in graph.initializer if len(t.SerializeToString()) <= _SMALL_BYTES}
    for body in [body for node in graph.node for body in bodies(node)]:
        for scope in all_graphs(body):
            _copy_constants(scope, small, names)


def _copy_constants(scope: GraphProto, small: dict[str, TensorProto], names: Names) -> None:
    for name in sorted({name for node in scope.node for name in node.input} & set(small)):
        tensor = scope.initializer.add()
        tensor.CopyFrom(small[name])
        tensor.name = names.fresh(name)
        for node in scope.node:
            node.input[:] = [tensor.name if i == name else i for i in node.input]


def make_node(op_type: str, inputs: list[str], output: str, **attributes: Any) -> NodeProto:
    """A node of the standard domain with one output."""
    return helper.make_node(op_type, inputs, [output], name=f"hotrow_{output}", **attributes)


def copied(node: NodeProto) -> NodeProto:
    """A node that may be changed."""
    copy = NodeProto()
    copy.CopyFrom(node)
    return copy


class NodeBuilder:
    """Writes new nodes in their order, each with one output, and the constants that they read."""

    def __init__(self, graph: GraphProto, names: Names, stem: str) -> None:
        """`graph` gets the constants; the names of new values begin with `stem`."""
        self._graph, self._names, self._stem = graph, names, stem
        self.nodes: list[NodeProto] = []

    def add(self, op_type: str, inputs: Iterable[str], output: str | None = None, **attributes: Any) -> str:
        """A node; returns the name of its output."""
        name = output or self._fresh(op_type.lower())
        self.nodes.append(make_node(op_type, list(inputs), name, **attributes))
        return name

    def copy(self, node: NodeProto, inputs: Iterable[str]) -> str:
        """A node with the same operator and attributes; returns the name of its output."""
        again = copied(node)
        again.input[:] = inputs
        again.output[:] = [self._fresh(node.op_type.lower())]
        again.name = f"hotrow_{again.output[0]}"
        self.nodes.append(again)
        return str(again.output[0])

    def integers(self, values: ArrayLike) -> str:
        """An int64 constant of these values, of any shape; returns its name."""
        return self.constant(np.asarray(values, np.int64))

    def constant(self, values: NDArray[Any]) -> str:
        """A constant of these values, of their shape and type; returns its name."""
        name = self._fresh("constant")
        self._graph.initializer.append(numpy_helper.from_array(values, name))
        return name

    def _fresh(self, part: str) -> str:
        return self._names.fresh(f"{self._stem}_{part}")
