"""Keeps ONNX Runtime from ending the process, or answering wrongly, where a list is empty.

Its GRU and LSTM abort when they get no samples or no steps, its Einsum divides by zero; ONNX defines the result as
empty, or zeros. Each such node moves into a branch that runs only where there is something to compute. Models
that never get an empty list are not changed: CUDA graphs cannot hold branches.

Reductions over axes that are counted from the end leave an empty axis unchanged. Products over an empty axis
with a transposed matrix return uninitialized memory: ONNX Runtime fuses both steps, and the fused step writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, helper

from inference_session.importers.onnx.graph import (
    Names,
    add_constant,
    all_graphs,
    all_nodes,
    attribute,
    axes_of,
    copied,
    defined,
    insert_before,
    make_node,
    producers,
    replace_node,
)
from inference_session.importers.onnx.lookups import Surgery
from inference_session.importers.onnx.types import ValueType

_MIN_OPSET = 10
_RECURRENT = ("GRU", "LSTM")
_FILTERS = ("NonZero", "Compress", "Unique")


def may_meet_empty_lists(graph: GraphProto, inputs: Iterable[ValueType], *, batched: bool) -> bool:
    """Whether a list may be empty although a request has samples: it has another open size, or is filtered by value.

    A request of no samples never reaches the networks of a batched model.
    """
    open_sizes = [dim for kind in inputs for dim in (kind.dims or ())[1:] if not isinstance(dim, int)]
    return not batched or bool(open_sizes) or any(node.op_type in _FILTERS for node in all_nodes(graph))


def guard_empty_lists(model: ModelProto) -> None:
    """Change a model in place; its answers stay the same."""
    names = _free_names(model.graph)
    opset = next((item.version for item in model.opset_import if item.domain in ("", "ai.onnx")), 0)
    if opset < _MIN_OPSET:
        return
    for scope in list(all_graphs(model.graph)):
        for node in list(scope.node):
            if node.domain in ("", "ai.onnx") and (node.op_type in _RECURRENT or _is_plain_einsum(node)):
                replace_node(scope, node, _guarded(scope, names, node))


def _free_names(graph: GraphProto) -> Names:
    return Names(
        name for scope in all_graphs(graph) for name in defined(scope).union(*(node.input for node in scope.node))
    )


def _is_plain_einsum(node: NodeProto) -> bool:
    return node.op_type == "Einsum" and "->" in _equation(node) and "." not in _equation(node)


def _equation(node: NodeProto) -> str:
    return _text(node, "equation").replace(" ", "")


def _text(node: NodeProto, name: str) -> str:
    return next((item.s.decode() for item in node.attribute if item.name == name), "")


def _guarded(scope: GraphProto, names: Names, node: NodeProto) -> list[NodeProto]:
    """The replacement of a node."""
    operands = node.input[:1] if node.op_type in _RECURRENT else node.input
    outputs = [name for name in node.output if name]
    total = names.fresh(f"{outputs[0]}_num_elements")
    nodes = [make_node("Size", [operands[0]], total)]
    for operand in operands[1:]:
        size, product = names.fresh(f"{operand}_num_elements"), names.fresh(f"{outputs[0]}_num_elements")
        nodes += [make_node("Size", [operand], size), make_node("Mul", [total, size], product)]
        total = product
    is_empty = names.fresh(f"{outputs[0]}_is_empty")
    nodes.append(make_node("Equal", [total, add_constant(scope, names, f"{is_empty}_zero", 0)], is_empty))
    empty, full = _Empty(names, node).branch(), _as_it_is(names, node)
    name = f"hotrow_{outputs[0]}"
    nodes.append(helper.make_node("If", [is_empty], outputs, name=name, then_branch=empty, else_branch=full))
    return nodes


def _as_it_is(names: Names, node: NodeProto) -> GraphProto:
    copy = copied(node)
    copy.output[:] = [name and names.fresh(name) for name in node.output]
    return GraphProto(name="full", node=[copy], output=_values([name for name in copy.output if name]))


def _values(names: list[str]) -> list[ValueInfoProto]:
    return [ValueInfoProto(name=name) for name in names]


class _Empty:
    """The branch that answers in the place of a node whose input has no elements."""

    def __init__(self, names: Names, node: NodeProto) -> None:
        self._names, self._node = names, node
        self._graph = GraphProto(name="empty")

    def branch(self) -> GraphProto:
        """All outputs of the node that are wanted."""
        answers = self._recurrent() if self._node.op_type in _RECURRENT else [self._einsum()]
        self._graph.output.extend(_values(answers))
        return self._graph

    def _recurrent(self) -> list[str]:
        """Outputs without steps: an empty sequence and the initial state; without samples: empty outputs."""
        steps, samples = (self._dim(self._node.input[0], axis) for axis in (0, 1))
        num_directions = 2 if _text(self._node, "direction") == "bidirectional" else 1
        directions, width = (self._constant([n]) for n in (num_directions, attribute(self._node, "hidden_size", 0)))
        answers: list[str] = []
        for position, output in enumerate(self._node.output):
            first = self._node.input[4 + position] if 0 < position < len(self._node.input) - 4 else ""
            if output and first:
                answers.append(self._add("Identity", [first]))
            elif output:
                answers.append(self._zeros([*([] if position else [steps]), directions, samples, width]))
        return answers

    def _einsum(self) -> str:
        """Sums over nothing are zero."""
        inputs, _, output = _equation(self._node).partition("->")
        places = {
            label: (operand, axis)
            for operand, labels in zip(self._node.input, inputs.split(","), strict=True)
            for axis, label in enumerate(labels)
        }
        return self._zeros([self._dim(*places[label]) for label in output])

    def _zeros(self, sizes: list[str]) -> str:
        """Zeros of the type of the first input: the sum over none of its elements."""
        flat = self._add("Reshape", [self._node.input[0], self._constant([-1])])
        zero = self._constant([0])
        nothing = self._add("Slice", [flat, zero, zero, zero])
        scalar = self._add("ReduceSum", [nothing], keepdims=0)
        return self._add("Expand", [scalar, self._add("Concat", sizes, axis=0)]) if sizes else scalar

    def _dim(self, value: str, axis: int) -> str:
        return self._add("Gather", [self._add("Shape", [value]), self._constant([axis])], axis=0)

    def _constant(self, values: list[int]) -> str:
        return add_constant(self._graph, self._names, f"{self._node.output[0]}_guard", values)

    def _add(self, op_type: str, inputs: list[str], **attributes: int) -> str:
        output = self._names.fresh(f"{next(filter(None, self._node.output))}_{op_type.lower()}")
        self._graph.node.append(make_node(op_type, inputs, output, **attributes))
        return output


def correct_empty_sums(surgery: Surgery) -> None:
    """Write reductions and products so that ONNX Runtime answers rightly, where ranks are known."""
    for scope in all_graphs(surgery.graph):
        made_by = producers(scope)
        for node in list(scope.node):
            if node.op_type.startswith("Reduce") and not node.domain:
                _count_axes_from_front(surgery, node)
            elif node.op_type == "MatMul" and not node.domain:
                _keep_steps_apart(surgery, scope, made_by, node)


def _count_axes_from_front(surgery: Surgery, node: NodeProto) -> None:
    axes, rank = axes_of(surgery.graph, node), surgery.types.rank(node.input[0])
    if not axes or not rank or min(axes) >= 0:
        return
    from_front = [axis % rank for axis in axes]
    if len(node.input) > 1:
        node.input[1] = surgery.constant(f"{node.output[0]}_axes", from_front)
    else:
        given = next(item for item in node.attribute if item.name == "axes")
        given.ints[:] = from_front


def _keep_steps_apart(surgery: Surgery, scope: GraphProto, made_by: dict[str, NodeProto], product: NodeProto) -> None:
    """Put a Reshape that changes and costs nothing behind a Transpose, unless the sums are known not to be empty."""
    shapes = [surgery.types.dims(name) for name in product.input]
    if any(dims and isinstance(dims[max(axis, -len(dims))], int) for dims, axis in zip(shapes, (-1, -2), strict=True)):
        return
    for i, (name, dims) in enumerate(zip(list(product.input), shapes, strict=True)):
        if dims and name in made_by and made_by[name].op_type == "Transpose":
            apart = surgery.names.fresh(f"{name}_apart")
            same = surgery.constant(f"{apart}_shape", [0] * len(dims))  # 0: as in the input
            insert_before(scope, product, [make_node("Reshape", [name, same], apart)])
            product.input[i] = apart
