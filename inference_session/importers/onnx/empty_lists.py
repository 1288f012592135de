"""Keeps ONNX Runtime from ending the process, or answering wrongly, where a list is empty.

Its GRU and LSTM abort when they get no samples or no steps, its FeatureVectorizer when it gets no samples, its Einsum
divides by zero; ONNX defines the result as empty, or zeros. Each such node moves into a branch that runs only where
there is something to compute. Models that never get an empty list are not changed: CUDA graphs cannot hold branches.

Reductions over axes that are counted from the end leave an empty axis unchanged. Products over an empty axis
with a transposed matrix return uninitialized memory: ONNX Runtime fuses both steps, and the fused step writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from inference_session.importers.onnx.lookups.graph_lookups import EditedModel
from inference_session.importers.onnx.types import ValueType
from inference_session.onnx_graphs import (
    Names,
    NodeBuilder,
    all_graphs,
    all_nodes,
    attribute,
    axes_of,
    copied,
    insert_before,
    opset_of,
    producers,
    replace_node,
    text_attribute,
)

_MIN_OPSET = 10
_RECURRENT = ("GRU", "LSTM")
_VECTORIZER = "FeatureVectorizer"
_FILTERS = ("NonZero", "Compress", "Unique")


def may_meet_empty_lists(graph: GraphProto, inputs: Iterable[ValueType], *, batched: bool) -> bool:
    """Whether a list may be empty although a request has samples: it has another open size, or is filtered by value.

    A request of no samples never reaches the networks of a batched model.
    """
    open_sizes = [dim for kind in inputs for dim in (kind.dims or ())[1:] if not isinstance(dim, int)]
    return not batched or bool(open_sizes) or any(node.op_type in _FILTERS for node in all_nodes(graph))


def guard_empty_lists(model: ModelProto) -> None:
    """Change a model in place; its answers stay the same."""
    names = Names.unused_in(model.graph)
    if opset_of(model) < _MIN_OPSET:
        return
    for scope in list(all_graphs(model.graph)):
        for node in list(scope.node):
            if _ends_process(node):
                replace_node(scope, node, _guarded(scope, names, node))


def _ends_process(node: NodeProto) -> bool:
    if node.domain in ("", "ai.onnx"):
        return node.op_type in _RECURRENT or _is_plain_einsum(node)
    return node.domain == "ai.onnx.ml" and node.op_type == _VECTORIZER


def _is_plain_einsum(node: NodeProto) -> bool:
    equation = text_attribute(node, "equation")
    return node.op_type == "Einsum" and "->" in equation and "." not in equation


def _guarded(scope: GraphProto, names: Names, node: NodeProto) -> list[NodeProto]:
    """The replacement of a node."""
    operands = node.input[:1] if node.op_type in _RECURRENT else node.input
    outputs = [name for name in node.output if name]
    builder = NodeBuilder(scope, names, outputs[0])
    total = builder.add("Size", [operands[0]])
    if node.op_type == _VECTORIZER:  # samples without features are no reason
        total, operands = _dim(builder, operands[0], 0), operands[:1]
    for operand in operands[1:]:
        total = builder.add("Mul", [total, builder.add("Size", [operand])])
    is_empty = builder.add("Equal", [total, builder.integers(0)])
    empty, full = _Empty(names, node).branch(), _as_it_is(names, node)
    name = f"hotrow_{outputs[0]}"
    branches = helper.make_node("If", [is_empty], outputs, name=name, then_branch=empty, else_branch=full)
    return [*builder.nodes, branches]


def _as_it_is(names: Names, node: NodeProto) -> GraphProto:
    copy = copied(node)
    copy.output[:] = [name and names.fresh(name) for name in node.output]
    return GraphProto(name="full", node=[copy], output=_values([name for name in copy.output if name]))


def _values(names: list[str]) -> list[ValueInfoProto]:
    return [ValueInfoProto(name=name) for name in names]


class _Empty:
    """The branch that answers in the place of a node whose input has no elements."""

    def __init__(self, names: Names, node: NodeProto) -> None:
        self._node, self._graph = node, GraphProto(name="empty")
        self._builder = NodeBuilder(self._graph, names, f"{next(filter(None, node.output))}_guard")

    def branch(self) -> GraphProto:
        """All outputs of the node that are wanted."""
        if self._node.op_type == _VECTORIZER:
            answers = [self._vectorized()]
        else:
            answers = self._recurrent() if self._node.op_type in _RECURRENT else [self._einsum()]
        self._graph.node.extend(self._builder.nodes)
        self._graph.output.extend(_values(answers))
        return self._graph

    def _recurrent(self) -> list[str]:
        """Outputs without steps: an empty sequence and the initial state; without samples: empty outputs."""
        steps, samples = (_dim(self._builder, self._node.input[0], axis) for axis in (0, 1))
        num_directions = 2 if text_attribute(self._node, "direction") == "bidirectional" else 1
        sizes = num_directions, attribute(self._node, "hidden_size", 0)
        directions, width = (self._builder.integers([size]) for size in sizes)
        answers: list[str] = []
        for position, output in enumerate(self._node.output):
            first = self._node.input[4 + position] if 0 < position < len(self._node.input) - 4 else ""
            if output and first:
                answers.append(self._builder.add("Identity", [first]))
            elif output:
                answers.append(self._zeros([*([] if position else [steps]), directions, samples, width]))
        return answers

    def _vectorized(self) -> str:
        """No rows, as wide as all features."""
        attributes = {each.name: each for each in self._node.attribute}
        width = self._builder.integers([sum(attributes["inputdimensions"].ints)])
        return self._builder.add("Cast", [self._zeros([self._builder.integers([0]), width])], to=TensorProto.FLOAT)

    def _einsum(self) -> str:
        """Sums over nothing are zero."""
        inputs, _, output = text_attribute(self._node, "equation").partition("->")
        places = {
            label: (operand, axis)
            for operand, labels in zip(self._node.input, inputs.split(","), strict=True)
            for axis, label in enumerate(labels)
        }
        return self._zeros([_dim(self._builder, *places[label]) for label in output])

    def _zeros(self, sizes: list[str]) -> str:
        """Zeros of the type of the first input: the sum over none of its elements."""
        add, integers = self._builder.add, self._builder.integers
        zero = integers([0])
        nothing = add("Slice", [add("Reshape", [self._node.input[0], integers([-1])]), zero, zero, zero])
        scalar = add("ReduceSum", [nothing], keepdims=0)
        return add("Expand", [scalar, add("Concat", sizes, axis=0)]) if sizes else scalar


def _dim(builder: NodeBuilder, value: str, axis: int) -> str:
    shape = builder.add("Shape", [value])
    return builder.add("Gather", [shape, builder.integers([axis])], axis=0)


def correct_empty_sums(edited: EditedModel) -> None:
    """Write reductions and products so that ONNX Runtime answers rightly, where ranks are known."""
    for scope in all_graphs(edited.graph):
        made_by = producers(scope)
        for node in list(scope.node):
            if node.op_type.startswith("Reduce") and not node.domain:
                _count_axes_from_front(edited, node)
            elif node.op_type == "MatMul" and not node.domain:
                _keep_steps_apart(edited, scope, made_by, node)


def _count_axes_from_front(edited: EditedModel, node: NodeProto) -> None:
    axes, rank = axes_of(edited.graph, node), edited.types.rank(node.input[0])
    if not axes or not rank or min(axes) >= 0:
        return
    from_front = [axis % rank for axis in axes]
    if len(node.input) > 1:
        node.input[1] = edited.builder(node.output[0]).integers(from_front)
    else:
        given = next(item for item in node.attribute if item.name == "axes")
        given.ints[:] = from_front


def _keep_steps_apart(
    edited: EditedModel, scope: GraphProto, made_by: dict[str, NodeProto], product: NodeProto
) -> None:
    """Put a Reshape that changes and costs nothing behind a Transpose, unless the sums are known not to be empty."""
    shapes = [edited.types.dims(name) for name in product.input]
    if any(dims and isinstance(dims[max(axis, -len(dims))], int) for dims, axis in zip(shapes, (-1, -2), strict=True)):
        return
    for i, (name, dims) in enumerate(zip(list(product.input), shapes, strict=True)):
        if dims and name in made_by and made_by[name].op_type == "Transpose":
            builder = edited.builder(name)
            apart = builder.add("Reshape", [name, builder.integers([0] * len(dims))])  # 0: as in the input
            insert_before(scope, product, builder.nodes)
            product.input[i] = apart
