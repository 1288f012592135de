"""Branches that constants or sizes decide on are taken at import.

PyTorch's older exporter writes `squeeze` of an axis whose size it does not know as an If, which asks whether it is 1.
Its `where` asks for numbers of dimensions. Such an If goes where the condition follows from constants and from sizes
that the inputs fix, whatever the open ones.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from inference_session.importers.onnx.evaluation import reference_values
from inference_session.importers.onnx.types import Types
from inference_session.importers.onnx.weights import Weight
from inference_session.onnx_graphs import (
    all_graphs,
    attribute,
    attributes,
    bodies,
    constants,
    is_random,
    make_node,
    set_nodes,
)

Values = dict[str, NDArray[Any]]

_MAX_ROUNDS = 32
"""In each, more follows from what the rounds before have found."""
_MAX_ELEMENTS = 64
_KINDS = (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL)


def take_decided_branches(model: ModelProto, weights: dict[str, Weight]) -> ModelProto:
    """The model with branches in place of the Ifs that take them always; itself where there are none."""
    found = edited = model
    for _ in range(_MAX_ROUNDS):
        conditions = {node.input[0] for node in edited.graph.node if node.op_type == "If"}
        known = _known_values(edited, weights) if conditions else {}
        is_decided = not conditions.isdisjoint(known)
        if not is_decided and known.keys() <= constants(edited.graph).keys():
            break
        edited = _simplified(edited, known)
        if is_decided:
            found = edited
    return found


def _simplified(model: ModelProto, known: Values) -> ModelProto:
    """A copy in which known values are constants, and no condition of an If."""
    edited = ModelProto()
    edited.CopyFrom(model)
    nodes: list[NodeProto] = []
    for node in edited.graph.node:
        if node.op_type == "If" and node.input[0] in known:
            branch = attributes(node)["then_branch" if known[node.input[0]].all() else "else_branch"]
            given = zip(branch.output, node.output, strict=True)
            nodes += [*branch.node, *(make_node("Identity", [inner.name], outer) for inner, outer in given if outer)]
        elif node.output[0] not in known:
            nodes.append(node)
    set_nodes(edited.graph, nodes)
    computed = known.keys() - constants(edited.graph).keys()
    edited.graph.initializer.extend(numpy_helper.from_array(known[name], name) for name in sorted(computed))
    return edited


def _known_values(model: ModelProto, weights: dict[str, Weight]) -> Values:
    """Small integers and conditions: constants, and what nodes compute from these and fixed sizes, except outputs."""
    known: Values = {}
    for tensor in model.graph.initializer:
        if tensor.data_type in _KINDS and math.prod(tensor.dims) <= _MAX_ELEMENTS:
            with suppress(ValueError):  # more elements than its shape has: ONNX Runtime says so where it is read
                known[tensor.name] = numpy_helper.to_array(tensor)
    types, outputs = Types(_undeclared(model), weights), {value.name for value in model.graph.output}
    shapes: Values = {}
    for node in model.graph.node:
        if node.domain or bodies(node) or is_random(node) or len(node.output) != 1 or node.output[0] in outputs:
            continue
        value = _sizes(node, types, shapes, known)
        if value is None and known.keys() >= set(node.input) and _is_small(types, node.output[0]):
            feeds = {name: known[name] for name in node.input}
            value = next(iter(reference_values([node], node.output, feeds, model) or ()), None)
        if value is not None:
            known[node.output[0]] = value
    return known


def _sizes(node: NodeProto, types: Types, shapes: Values, known: Values) -> NDArray[Any] | None:
    """Sizes of a value, if all are known; `shapes` keeps those of which some are, as objects."""
    if node.op_type == "Shape" and (dims := types.dims(node.input[0])) is not None:
        part = slice(attribute(node, "start", 0), attribute(node, "end", len(dims)))
        sizes = np.array([dim if isinstance(dim, int) else None for dim in dims[part]], object)
    elif node.op_type == "Gather" and node.input[0] in shapes and node.input[1] in known:
        sizes = np.asarray(shapes[node.input[0]][known[node.input[1]]], object)
    elif node.op_type == "Size" and node.input[0] in shapes:  # the number of sizes
        return np.array(shapes[node.input[0]].size)
    else:
        return None
    shapes[node.output[0]] = sizes
    return None if None in sizes.ravel() else sizes.astype(np.int64)


def _is_small(types: Types, name: str) -> bool:
    dims = types.dims(name)
    sizes = [dim for dim in dims or () if isinstance(dim, int)]
    is_fixed = dims is not None and len(sizes) == len(dims)
    return is_fixed and math.prod(sizes) <= _MAX_ELEMENTS and types.elem_type(name) in _KINDS


def _undeclared(model: ModelProto) -> ModelProto:
    """A copy without the sizes that the exporter declared: those of a trace may be those of its batch."""
    bare = ModelProto()
    bare.CopyFrom(model)
    for graph in all_graphs(bare.graph):
        del graph.value_info[:]
        for value in graph.output:
            value.type.tensor_type.ClearField("shape")
    return bare
