"""Lets look-ups that a Concat puts side by side fill one matrix, so that the session writes it once, in place."""

from __future__ import annotations

import math
from collections import Counter
from itertools import groupby

from onnx import NodeProto, TensorProto

from inference_session.importers.onnx.lookups.graph_lookups import SHAPE_OPS, EditedModel, GraphLookup, skip_identities
from inference_session.importers.onnx.types import Dims
from inference_session.onnx_graphs import (
    NodeBuilder,
    attribute,
    constants,
    integers,
    make_node,
    producers,
    replace_node,
    use_counts,
)


def share_matrices(edited: EditedModel, lookups: list[GraphLookup]) -> list[GraphLookup]:
    """Change the graph; returns the look-ups, those of one matrix adjacent and in its order."""
    shared: list[GraphLookup] = []
    counts = use_counts(edited.graph)
    for concat in [node for node in edited.graph.node if node.op_type == "Concat" and not node.domain]:
        shared += _share_among(edited, lookups, counts, concat)
    skip_identities(edited.graph)
    _skip_flattening(edited, shared)
    return [*shared, *(lookup for lookup in lookups if lookup.matrix is None)]


def _share_among(
    edited: EditedModel, lookups: list[GraphLookup], counts: dict[str, int], concat: NodeProto
) -> list[GraphLookup]:
    """Let the neighbours among one Concat's inputs share a matrix; returns the look-ups that now share a matrix."""
    members = [(name, _member(edited, lookups, counts, concat, name)) for name in concat.input]
    shared: list[GraphLookup] = []
    inputs: list[str] = []
    builder = edited.builder(concat.output[0])
    for _, block in groupby(members, key=lambda member: member[1] is not None):
        names, found = zip(*block, strict=True)
        run = [lookup for lookup in found if lookup is not None]
        if len(run) > 1:
            inputs.append(_share(edited, run, list(names), builder))
            shared += run
        else:
            inputs += names
    if shared:
        if len(inputs) == 1:
            builder.add("Identity", inputs, concat.output[0])
        else:
            builder.add("Concat", inputs, concat.output[0], axis=attribute(concat, "axis", 0))
        replace_node(edited.graph, concat, builder.nodes)
    return shared


def _member(
    edited: EditedModel, lookups: list[GraphLookup], counts: dict[str, int], concat: NodeProto, name: str
) -> GraphLookup | None:
    """The look-up whose vectors, sample by sample and in their order, are this input of a Concat."""
    lookup = _lookup_behind(edited, lookups, counts, name)
    if lookup is None:
        return None
    dims = lookup.dims if name == lookup.vectors else edited.types.dims(name)
    if dims is None or len(dims) < 2 or attribute(concat, "axis", 0) not in (1, 1 - len(dims)):
        return None
    per_sample = vectors_per_sample(lookup.dims)
    return lookup if per_sample is not None and per_sample == vectors_per_sample(dims) else None


def _lookup_behind(
    edited: EditedModel, lookups: list[GraphLookup], counts: dict[str, int], name: str
) -> GraphLookup | None:
    made_by = producers(edited.graph)
    while counts[name] == 1 and name in made_by and made_by[name].op_type in SHAPE_OPS:
        name = made_by[name].input[0]
    if counts[name] != 1:
        return None
    found = next((lookup for lookup in lookups if lookup.vectors == name and lookup.matrix is None), None)
    if found is None or found.keys_dims is None or found.bags is not None:
        return None
    allowed = (2,) if found.pooling != "none" else (1, 2)
    return found if len(found.keys_dims) in allowed else None


def vectors_per_sample(dims: Dims | None) -> int | None:
    """Elements per sample, where the first dimension counts samples."""
    sizes = [dim for dim in (dims or ())[1:] if isinstance(dim, int)]
    return math.prod(sizes) if dims and len(sizes) == len(dims) - 1 else None


def _share(edited: EditedModel, run: list[GraphLookup], inputs: list[str], builder: NodeBuilder) -> str:
    """Let look-ups share a matrix; returns the value that stands for all of them in the Concat."""
    shapes = [
        lookup.dims if name == lookup.vectors else edited.types.dims(name)
        for lookup, name in zip(run, inputs, strict=True)
    ]
    matrix = edited.names.fresh("joined_vectors")
    for lookup in run:
        lookup.matrix = matrix
    rest = [dim for dim in (shapes[0] or ())[2:] if isinstance(dim, int)]
    width = sum(dims[1] for dims in shapes if dims and isinstance(dims[1], int))
    return builder.add("Reshape", [matrix, builder.integers([-1, width, *rest])]) if rest else matrix


def _skip_flattening(edited: EditedModel, shared: list[GraphLookup]) -> None:
    """Let nodes that flatten the vectors of a sample read them as the matrix that they are."""
    widths: Counter[str] = Counter()
    for lookup in shared:
        widths[lookup.matrix or ""] += vectors_per_sample(lookup.dims) or 0
    known = constants(edited.graph)
    for shaping in [node for node in edited.graph.node if node.op_type == "Reshape" and node.input[0] in widths]:
        shape, width = integers(known.get(shaping.input[1])) or [], widths[shaping.input[0]]
        if shape[:1] != [-1] or math.prod(shape[1:]) != width:  # its rows are not those of the matrix
            continue
        for node in [node for node in edited.graph.node if shaping.output[0] in node.input[:1]]:
            if _flattens(node, len(shape), width, known):
                replace_node(edited.graph, node, [make_node("Identity", [shaping.input[0]], node.output[0])])
        if not use_counts(edited.graph)[shaping.output[0]]:
            replace_node(edited.graph, shaping, [])
    skip_identities(edited.graph)


def _flattens(node: NodeProto, rank: int, width: int, known: dict[str, TensorProto]) -> bool:
    """Whether a node gives a matrix of this width, of a value of this rank with a row for each sample."""
    if node.domain:
        return False
    if node.op_type == "Flatten":
        return attribute(node, "axis", 1) in (1, 1 - rank)
    if node.op_type != "Reshape" or attribute(node, "allowzero", 0):
        return False
    return integers(known.get(node.input[1])) in ([-1, width], [0, width], [0, -1])
