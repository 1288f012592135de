"""Slices that are row reads: jax2onnx writes `table[key]` in a scan as a Slice from the key to the key + 1."""

from __future__ import annotations

from onnx import GraphProto, ModelProto, NodeProto

from inference_session.importers.onnx.evaluation import fixed_value
from inference_session.importers.onnx.graph import (
    all_graphs,
    attribute,
    constants,
    integers,
    make_node,
    producers,
    replace_node,
)
from inference_session.importers.onnx.weights import Weight


def gather_instead_of_slice(model: ModelProto, weights: dict[str, Weight]) -> None:
    """Write each Slice of exactly one whole row of a weight as Gather, which differs only for keys out of range."""
    for scope in all_graphs(model.graph):
        for node in list(scope.node):
            if node.op_type != "Slice" or node.input[0] not in weights or len(node.input) != 4:
                continue
            key = _key(model, scope, node, weights[node.input[0]].dims)
            if key is not None:
                replace_node(scope, node, [make_node("Gather", [node.input[0], key], node.output[0], axis=0)])


def _key(model: ModelProto, scope: GraphProto, node: NodeProto, dims: tuple[int, ...]) -> str | None:
    """The value, of one element, that names the row; None where the Slice does not take one whole row."""
    _, starts, ends, axes_name = node.input
    known = constants(model.graph)
    axes = integers(known.get(axes_name))
    made_by = producers(scope)
    end, start = made_by.get(ends), made_by.get(starts)
    if axes is None or end is None or end.op_type != "Add" or starts not in end.input:
        return None
    sizes = integers(known.get(next((name for name in end.input if name != starts), "")))
    if axes != list(range(len(axes))) or sizes is None or sizes != [1, *dims[1 : len(axes)]]:
        return None
    if len(axes) == 1:
        return str(starts)
    if start is None or start.op_type != "Concat" or attribute(start, "axis", 0) != 0 or len(start.input) != len(axes):
        return None
    others = start.input[1:]
    begins = [fixed_value(model, scope, name) for name in others]
    return str(start.input[0]) if all(begin is not None and not begin.any() for begin in begins) else None
